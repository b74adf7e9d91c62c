"""The runs of ``resize.py``: one job through changes of its degrees, by Scalai or by a checkpoint.

Both give a ``Change`` for every change, read from what the workers noted (``resize_job.Marks``).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from scalai.launch.places import read_card
from scalai.runtime.messages import Channel

JOB = Path(__file__).with_name("resize_job.py")
WORKERS = 2
TIMEOUT_S = 900.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How large the model is, how many steps lie between two changes, and whether its next workers
    are built ahead."""

    hidden: int
    layers: int
    steps: int
    vocabulary: int = 1024
    build_ahead: str = "auto"

    def flags(self) -> list[str]:
        return [
            *("--hidden", str(self.hidden), "--layers", str(self.layers)),
            *("--vocabulary", str(self.vocabulary)),
        ]

    def config(self) -> str:
        """Return the elastic configuration of the job."""
        return (
            f'[degrees]\n{WORKERS} = "tp{WORKERS} pp1"\n1 = "tp1 pp1"\n'
            f"[model]\nnum_attention_heads = {self.hidden // 64}\nnum_layers = {self.layers}\n"
            f"padded_vocab_size = {self.vocabulary}\nglobal_batch_size = {WORKERS}\n"
            f'micro_batch_size = 1\n[resize]\nsettle_s = 0.0\nbuild_ahead = "{self.build_ahead}"\n'
            '[probe]\nkind = "none"\n'
        )


@dataclass(frozen=True)
class Change:
    """One change of the degrees.

    ``downtime_s``: end of the last old step to end of the first new one, minus a median new step.
    ``slowed_s``: how much longer the old steps took once the change was asked for, together, than
    as many median ones.
    ``stages`` are seconds between what the workers noted, in order, ``cpu`` their processor time
    (of the busiest rank), which a busy machine changes less; ``report`` is the launcher's.
    """

    layout: str
    downtime_s: float
    slowed_s: float
    step_s: float
    stages: Mapping[str, float]
    cpu: Mapping[str, float]
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A job through its changes: the changes, steps of each round, and the loss of each step."""

    changes: tuple[Change, ...]
    steps: tuple[int, ...]
    losses: Mapping[int, float]

    @classmethod
    def of(cls, rounds: "Sequence[Round]", changes: Sequence[Change]) -> "Run":
        losses = {step: loss for one in rounds for step, loss in one.losses().items()}
        return cls(tuple(changes), tuple(len(one.losses()) for one in rounds), losses)


class Round:
    """What all ranks noted in one round."""

    def __init__(self, folder: Path, number: int) -> None:
        paths = sorted(folder.glob(f"round-{number}-*.jsonl"))
        self._ranks = [[json.loads(line) for line in path.open()] for path in paths]
        self.layout = next((entry["layout"] for entry in self._all("built")), "")

    def _all(self, event: str) -> list[dict[str, Any]]:
        return [entry for rank in self._ranks for entry in rank if entry["event"] == event]

    def last(self, event: str, clock: str = "at") -> float:
        """Return when the last rank was there for the first time; ``cpu``: its processor time."""
        return max(next(e[clock] for e in rank if e["event"] == event) for rank in self._ranks)

    def has(self, event: str) -> bool:
        """Whether all ranks were there."""
        return len(self._ranks) == WORKERS and all(
            any(entry["event"] == event for entry in rank) for rank in self._ranks
        )

    def steps(self) -> int:
        """Return how many steps the slowest rank has made."""
        return len(self._all("step")) // WORKERS if len(self._ranks) == WORKERS else 0

    def end(self, clock: str = "at") -> float:
        """Return when the last step had ended on all ranks; ``cpu``: their processor time then."""
        return max(float(entry[clock]) for entry in self._all("step"))

    def newest_step(self) -> int:
        return max(int(entry["step"]) for entry in self._all("step"))

    def step_s(self) -> float:
        """Return the median of the steps after the first."""
        first = min(entry["step"] for entry in self._all("step"))
        return median(e["took_s"] for e in self._all("step") if e["step"] > first)

    def slowed_s(self, since: float) -> float:
        """Return by how much the steps that ended after ``since`` took longer than median ones of
        before, added up."""
        first = min(entry["step"] for entry in self._all("step"))
        usual: float = median(
            e["took_s"] for e in self._all("step") if e["step"] > first and e["at"] < since
        )
        slow = (
            [e["took_s"] - usual for e in rank if e["event"] == "step" and e["at"] > since]
            for rank in self._ranks
        )
        return float(max(map(sum, slow)))

    def losses(self) -> dict[int, float]:
        """Return the loss of each step, equal on all ranks."""
        return {int(entry["step"]): float(entry["loss"]) for entry in self._all("step")}


STAGES = ("script", "imported", "entered", "connected", "built", "restored", "step")
"""What a new worker notes on its way, in order."""


def change_between(
    old: Round, new: Round, before: str, asked: float, report: Mapping[str, Any]
) -> Change:
    """Return the change from one round to the next. ``before``: what the old workers do last;
    ``asked``: when the change was asked for."""
    moments = [("", old.end()), (before, old.last(before))]
    moments += [(stage, new.last(stage)) for stage in STAGES]
    processor = [("", 0.0), *((stage, new.last(stage, "cpu")) for stage in STAGES)]
    cpu = {before: round(old.last(before, "cpu") - old.end("cpu"), 4), **_differences(processor)}
    downtime = new.last("step") - old.end() - new.step_s()
    slowed = old.slowed_s(asked)
    return Change(new.layout, downtime, slowed, new.step_s(), _differences(moments), cpu, report)


def _differences(moments: Sequence[tuple[str, float]]) -> dict[str, float]:
    return {name: round(at - since, 4) for (_, since), (name, at) in pairwise(moments)}


def layouts(changes: int) -> list[int]:
    """Return TP of each round: to and fro between TP2 DP1 and TP1 DP2."""
    return [WORKERS if number % 2 == 0 else 1 for number in range(changes + 1)]


def run_by_checkpoint(folder: Path, size: Size, steps: Sequence[int], say: Say) -> Run:
    """Run the job under torchrun, so many steps a round; each change is save, exit, start, load."""
    marks = folder / "stock"
    marks.mkdir()
    found: list[Change] = []
    rounds: list[Round] = []
    tps = layouts(len(steps) - 1)
    for number, tp in enumerate(tps):
        flags = ["--tp", str(tp), "--round", str(number), "--steps", str(steps[number])]
        loaded = folder / f"checkpoint-{number - 1}"
        if number:
            flags += ["--load", str(loaded)]
        if number < len(tps) - 1:
            flags += ["--save", str(folder / f"checkpoint-{number}")]
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
        command += [str(JOB), *size.flags(), "--marks", str(marks), *flags]
        with Running(command, marks) as running:
            # The loaded checkpoint goes before the next is saved: both would need more memory.
            running.wait_for(lambda n=number: Round(marks, n).steps() > 1, "steps")
            shutil.rmtree(loaded, ignore_errors=True)
        rounds.append(Round(marks, number))
        if number:
            asked = rounds[-2].end()  # it ends by itself
            found.append(change_between(rounds[-2], rounds[-1], "saved", asked, {}))
            say(f"checkpoint -> {rounds[-1].layout}: {found[-1].downtime_s:.2f} s")
            say(f"    {found[-1].stages}")
    return Run.of(rounds, found)


def run_by_scalai(folder: Path, size: Size, changes: int, say: Say) -> Run:
    """Run the job under scalai-run; each change is ``scalai scale --degrees``."""
    marks, reports, name = folder / "ours", folder / "reports", "resize-benchmark"
    marks.mkdir()
    flags = [*size.flags(), "--marks", str(marks)]
    found: list[Change] = []
    with elastic_job(folder, size, name, flags, marks, reports=reports) as running:
        running.wait_for(lambda: "event=warm" in running.log(), "warm fork server")
        for number, tp in enumerate(layouts(changes)):
            asked = time.monotonic()
            if number:
                _scale(folder / "store" / name, f"tp{tp} pp1")
            running.wait_for(lambda n=number: Round(marks, n).steps() > size.steps, "steps")
            if number:
                report = json.loads((reports / f"resize-{number + 1:04d}.json").read_text())
                old, new = Round(marks, number - 1), Round(marks, number)
                found.append(change_between(old, new, "deposited", asked, report))
                say(f"scalai -> {new.layout}: {found[-1].downtime_s:.2f} s {found[-1].stages}")
                say(f"    {report['seconds']}")
        aside = marks / "last_step.new"
        aside.write_text(str(Round(marks, changes).newest_step() + 4))
        os.replace(aside, marks / "last_step")
    return Run.of([Round(marks, number) for number in range(changes + 1)], found)


def _scale(job: Path, degrees: str) -> None:
    """What ``scalai scale`` does, without the start of a process on busy cores."""
    card = read_card(job)
    assert card is not None, f"no coordinator in {job}"
    channel = Channel(*card)
    channel.call("scale", nproc=WORKERS, nnodes=None, degrees=degrees, dry_run=False)
    channel.close()


def elastic_job(
    folder: Path,
    size: Size,
    name: str,
    flags: Sequence[str],
    logs: Path,
    workers: int = WORKERS,
    reports: Path | None = None,
) -> "Running":
    """Return the job under scalai-run."""
    config = folder / f"{name}.toml"
    config.write_text(size.config())
    command = ["scalai.launch.run", "--job", name, "--elastic", str(config)]
    command += ["--nproc-per-node", str(workers), "--store-dir", str(folder / "store")]
    if reports is not None:
        command += ["--report-dir", str(reports)]
    return Running([*command, str(JOB), *flags], logs)


class Running:
    """``python -m <command>`` around a block, its output in ``folder/log``.

    At the end of the block it is waited for; after an error it is ended."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._log = folder / "log"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and self._process.wait(TIMEOUT_S):
                raise self._failed("ended")
        finally:
            while self._process.poll() is None:
                self._process.terminate()  # the second one ends scalai-run at once
                time.sleep(0.5)

    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait until ``is_done``. Ends the benchmark where that takes too long or never comes."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_done():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise self._failed(f"no {what}")
            time.sleep(0.2)

    def _failed(self, what: str) -> SystemExit:
        lines = "\n".join(self.log().splitlines()[-60:])
        return SystemExit(f"{what}, exit code {self._process.poll()}:\n{lines}")
