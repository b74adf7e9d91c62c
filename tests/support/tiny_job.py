"""A job whose state is a few integers: what a resize does to it can be told exactly.

Run by ``scalai-run``. The state is a matrix cut by rows over TP, a replicated vector, a scalar and
what a user registered. Every step is integer arithmetic, so that the sum over the job is the same
number in any layout; rank 0 writes one line a step.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import scalai
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Box, Piece, row_major
from scalai.runtime.live import Slot
from support.tiny_order import Samples

ROWS, COLUMNS = 12, 5
MODULUS = 1_000_003
BALLAST = 4 << 20
"""Elements of a tensor that never changes: 16 MiB."""
HELD_S = 120.0


def initial() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole matrix, [ROWS, COLUMNS], and the vector, [COLUMNS], at step 0."""
    return torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS), torch.arange(COLUMNS) + 7


def advance(matrix: torch.Tensor, vector: torch.Tensor, step: int) -> None:
    """Make step ``step`` in place, on any rows of the matrix and the whole vector."""
    matrix.mul_(31).add_(vector + step).remainder_(MODULUS)
    vector.mul_(17).add_(step).remainder_(MODULUS)


def sums(steps: int) -> list[int]:
    """Return what an uninterrupted run writes: the sum of the matrix after each step, [steps]."""
    matrix, vector = initial()
    found = []
    for step in range(1, steps + 1):
        advance(matrix, vector, step)
        found.append(int(matrix.sum()))
    return found


def check_steps(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """Check every step that was written against an uninterrupted run. Returns the steps, in the
    order in which they were made."""
    expected = sums(max(line["step"] for line in lines))
    wrong = [line for line in lines if line["sum"] != expected[line["step"] - 1]]
    assert not wrong, f"{len(wrong)} steps differ from an uninterrupted run: {wrong[:3]}"
    return [line["step"] for line in lines]


def check_each_once(lines: Sequence[Mapping[str, Any]]) -> None:
    """Check that each step was made once, in order, as an uninterrupted run makes it.

    Rank 0 may be killed between a step and its line, which is then missing: others have made the
    step, and the sums behind it say so.
    """
    check_steps(lines)
    for before, line in pairwise(lines):
        is_other = line.get("pid") != before.get("pid")
        assert line["step"] - before["step"] in (1, 1 + is_other), (before, line)


class TinyState:
    """The live state of one rank, at ``tp_rank`` of ``tp``."""

    announces_updates = True

    def __init__(self, tp_rank: int, tp: int, dp_rank: int, ballast: int = 0) -> None:
        matrix, self.vector = initial()
        self.low, high = BALLAST * tp_rank // tp, BALLAST * (tp_rank + 1) // tp
        self.ballast = [torch.full((high - self.low,), float(n)) for n in range(ballast)]
        self.first, rows = ROWS * tp_rank // tp, ROWS * (tp_rank + 1) // tp - ROWS * tp_rank // tp
        self.matrix = matrix[self.first : self.first + rows].contiguous()
        self.steps = torch.zeros((), dtype=torch.int64)
        self.coordinate = f"tp{tp_rank}-dp{dp_rank}"

    def slots(self) -> Sequence[Slot]:
        tensors = [
            (Tensor("param/matrix", (ROWS, COLUMNS), "I64"), self.matrix, (self.first, 0)),
            (Tensor("param/vector", (COLUMNS,), "I64"), self.vector, (0,)),
            (Tensor("step/matrix", (), "I64"), self.steps, ()),
            *(
                (Tensor(f"param/ballast{n}", (BALLAST,), "F32"), buffer, (self.low,))
                for n, buffer in enumerate(self.ballast)
            ),
        ]
        return [
            Slot(
                tensor,
                buffer.view(-1),
                (Piece(Box(offset, tuple(buffer.shape)), 0, row_major(tuple(buffer.shape))),),
            )
            for tensor, buffer, offset in tensors
        ]

    def scalars(self) -> Mapping[str, Any]:
        return {"steps": int(self.steps)}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        assert scalars["steps"] == int(self.steps), "scalars and tensors are of different steps"

    def rank_state(self) -> Any:
        return {"at": self.coordinate}

    def load_rank_state(self, state: Any, step: int) -> str:
        assert state is None or state["at"] == self.coordinate
        return "random numbers: none"


def hold(held: Path) -> None:
    """Return once a file is not there (any more). A file beside it says meanwhile that it is
    waited for."""
    end, waits = time.monotonic() + HELD_S, held.with_name(f"{held.name}.held")
    while held.exists():
        assert time.monotonic() < end, f"{held} is still there"
        waits.touch()
        time.sleep(0.05)
    waits.unlink(missing_ok=True)


def fail(wanted: Path) -> None:
    """Raise, once, where a file is there."""
    if wanted.exists():
        wanted.unlink()
        raise RuntimeError(f"{wanted.name} was wanted")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--shares", action="store_true", help="ranks share this time")
    parser.add_argument("--held", type=Path, default=Path("/nowhere"), help="no model is built")
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--faults", type=Path, default=Path("/nowhere"), help="what goes wrong")
    parser.add_argument("--draws", action="store_true", help="samples of a blend are drawn")
    parser.add_argument("--ballast", type=int, default=0, help="tensors of 16 MiB more")
    parser.add_argument("--enough", type=Path, default=Path("/nowhere"), help="ends it")
    options = parser.parse_args()
    with scalai.elastic() as job:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        job.begin_build()
        hold(options.held)  # what a model would take to build
        state = TinyState(rank % job.tp, job.tp, rank // job.tp, options.ballast)
        samples: list[int] = []
        job.register_state("samples", lambda: len(samples), lambda n: samples.extend(range(n)))
        job.attach(state)
        loader = Samples(job) if options.draws else None
        while job.step < options.steps:
            drawn = loader.draw() if loader else [0] * 3
            # What a model would compute.
            time.sleep(options.step_s / (job.world_size if options.shares else 1))
            matrix, vector = state.matrix.clone(), state.vector.clone()
            advance(matrix, vector, job.step + 1)
            is_enough = rank == 0 and options.enough.exists()
            sums_of_all = torch.stack((matrix.sum(), torch.tensor(int(is_enough))))
            fail(options.faults / f"raise-{rank}")
            # As in a training, the others of the job are waited for before the update.
            dist.all_reduce(sums_of_all)
            total, enough = sums_of_all.tolist()
            fail(options.faults / f"raise-late-{rank}")
            job.begin_update()
            state.matrix.copy_(matrix)
            hold(options.faults / f"tear-{rank}")
            state.vector.copy_(vector)
            state.steps += 1
            samples.append(job.step)
            assert len(samples) == int(state.steps) == job.step + 1
            if rank == 0:
                line = {
                    "step": job.step + 1, "sum": total // job.dp, "world": job.world_size,
                    "tp": job.tp, "pid": os.getpid(), "drawn": drawn,
                }  # fmt: skip
                with options.metrics.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if job.boundary(samples=len(drawn)) or enough:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
