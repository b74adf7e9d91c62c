"""Runs a script's ranks under the hooks of an elastic job, a fork each, without agents and stores.

What a round leaves goes to the next one through files: DeepSpeed and Accelerate are imported once,
and a round of two ranks costs two CPU-seconds, a tenth of what a whole job costs.
"""

# What DeepSpeed is to run on is said before it is imported, and the hooks before that.
# ruff: noqa: E402

import importlib
import json
import logging
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.filterwarnings("ignore")  # DeepSpeed's own, about what a CPU machine lacks

import torch
import torch.distributed as dist

from scalai.core.errors import ScalaiError
from scalai.core.job.function_proof import Numbers
from scalai.patches import worker_start
from scalai.runtime import session as sessions
from scalai.runtime.consumption import LEDGER
from scalai.runtime.live import LiveState, held_rows, piece_view, wanted_rows
from scalai.runtime.processes import die_with_parent
from scalai.runtime.session import Session
from scalai.store.generation import unite
from support.training.deepspeed_jobs import import_all
from support.training.rounds import Round, Seen

worker_start.install()
deepspeed = import_all()
importlib.import_module("accelerate")
torch.set_num_threads(1)
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# Nothing is compiled.
deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))

ROUND_S = 100


seen = Seen()


def note(**values: Any) -> None:
    """Note something of a rank, for the test."""
    seen.notes.append(values)


def run(rank: int, store: Any, given: Round) -> Seen:
    """Run one rank in a fork."""
    answer, reported = os.pipe()
    worker = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(answer)
        die_with_parent(worker)
        _run_rank(rank, given)
        with open(reported, "wb") as pipe:
            pickle.dump(seen, pipe)
        sys.stdout.flush()
        os._exit(0)
    os.close(reported)
    try:
        with open(answer, "rb") as pipe:
            if not select.select([pipe], [], [], ROUND_S)[0]:
                return Seen(ending="no answer in time")
            found: Seen = pickle.load(pipe)
            return found
    except EOFError:
        return Seen(ending="the process died")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _run_rank(rank: int, given: Round) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(given.world),
        LOCAL_WORLD_SIZE=str(given.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(given.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    logger = logging.getLogger("scalai")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Noting())
    job = sessions._current = RoundSession(given)
    module, _, name = given.script.partition(":")
    try:
        getattr(importlib.import_module(f"{__package__}.{module}"), name)(**given.arguments)
        job.finish()
        seen.ending = "finished"
    except SystemExit:
        seen.ending = "left" if job.is_stopped else "exit"
    except ScalaiError as error:
        seen.ending = f"{type(error).__name__}: {error}"
    except BaseException:
        seen.ending = traceback.format_exc()
    seen.facts = {**job.facts, **job.told}


class _Noting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        seen.log.append(record.getMessage())


class RoundSession(Session):
    """A session whose rounds hand their state on through files, each rank's own."""

    def __init__(self, given: Round) -> None:
        stages = given.settings.get("stages")
        super().__init__(pp=stages[given.number] if stages else 1)
        self.given = given
        self.facts, self.settings = given.facts, given.settings
        self.told: dict[str, Any] = {}
        self._progress.is_compared = given.number > 0 and bool(given.settings.get("compares"))
        self._folder = Path(given.folder)

    def report_facts(self, **facts: Any) -> None:
        super().report_facts(**facts)
        self.told.update(facts)

    def attach(
        self, state: LiveState, *, step: int = 0, samples: int = 0, restore: bool = True
    ) -> bool:
        super().attach(state, step=step, samples=samples)
        slots = [*state.slots(), *self._registered.slots()]
        self._held = held_rows(slots)
        self._values()  # what cannot be kept is refused before the first step
        parts = sorted(self._folder.glob(f"{self.given.number - 1}.*"))
        if not parts:
            self._consumption.begin(step, samples)
            return False
        kept = [torch.load(path, weights_only=True) for path in parts]
        _fill(wanted_rows(slots), [pieces for part in kept for pieces in part["pieces"]])
        reported = [json.loads(part["scalars"]) for part in kept]
        state.load_scalars(unite(part["state"] for part in reported))
        ranks = {part["coordinate"]: part["rank_state"] for part in reported}
        self.step, self.consumed_samples = reported[0]["step"], reported[0]["samples"]
        assert self._attached is not None
        self._attached.restored_step = self.step
        state.load_rank_state(ranks.get(state.coordinate), self.step)
        ledger = next((part[LEDGER] for part in reported if part.get(LEDGER)), None)
        self._consumption.restore(ledger, self.step, self.consumed_samples)
        self._registered.put(reported[0]["user"])
        return True

    def _values(self) -> Any:
        """Return what is registered as JSON, through its text."""
        return json.loads(json.dumps(self._registered.values()))

    def renew(self, state: LiveState, *, step: int, samples: int) -> None:
        super().renew(state, step=step, samples=samples)
        self._consumption.begin(step, samples)
        self._held = held_rows([*state.slots(), *self._registered.slots()])

    def boundary(
        self, step: int | None = None, consumed_samples: int | None = None, *, samples: int = 0
    ) -> bool:
        super().boundary(step, consumed_samples, samples=samples)
        self._consumption.step_ended(self.step, self.consumed_samples)
        self._progress.has_stepped = True
        if self.step == self.given.stop_at:
            self._keep()
            self._progress.is_stopped = True
        return self._progress.is_stopped

    @property
    def is_proving(self) -> bool:
        return not self._progress.has_stepped or self._progress.is_stopped

    @property
    def is_to_prove(self) -> bool:
        return self._progress.is_stopped and bool(self.given.settings.get("proves"))

    def note_numbers(self, numbers: Numbers) -> None:
        seen.numbers.append(numbers)

    def _keep(self) -> None:
        assert self._attached is not None
        state = self._attached.state
        self._registered.refresh()
        scalars = {
            "state": state.scalars(),
            "user": self._values(),
            "coordinate": state.coordinate,
            "rank_state": state.rank_state(),
            "step": self.step,
            "samples": self.consumed_samples,
            **self._consumption.scalars(),
        }
        pieces = [
            (slot.tensor.name, slot.tensor.shape, piece.box.offset, piece_view(slot, piece).clone())
            for slot, piece in self._held
        ]
        path = self._folder / f"{self.given.number}.{dist.get_rank()}"
        torch.save({"pieces": pieces, "scalars": json.dumps(scalars)}, path)


def _fill(rows: Any, pieces: list[Any]) -> None:
    """Fill live memory from the pieces of all ranks."""
    whole: dict[str, torch.Tensor] = {}
    for name, shape, offset, bits in pieces:
        tensor = whole.setdefault(name, torch.zeros(shape, dtype=bits.dtype))
        _part(tensor, offset, bits.shape).copy_(bits)
    for slot, piece in rows:
        bits = _part(whole[slot.tensor.name], piece.box.offset, piece.box.shape)
        piece_view(slot, piece).copy_(bits)


def _part(tensor: torch.Tensor, offset: Any, shape: Any) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
