"""The runs of ``resize.py`` and ``resize_deepspeed.py``: one job through changes of its layout, by
Scalai or by a checkpoint.

Both give a ``Change`` for every change, read from what the workers noted (``resize_marks``).
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
from typing import Any, Protocol

from resize_marks import LAST_STEP

from scalai.launch.config.endpoint import read_card
from scalai.launch.coordinator.person_calls import Scale
from scalai.runtime.calls import Channel

TIMEOUT_S = 900.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Layout:
    """On how many ranks a round runs, and its degrees as ``scalai scale`` takes them."""

    ranks: int
    degrees: str


class Job(Protocol):
    """What is trained, and how it is told so."""

    @property
    def script(self) -> Path:
        """The script that trains it."""

    @property
    def steps(self) -> int:
        """Steps between two changes, at least."""

    def layouts(self, rounds: int) -> Sequence[Layout]:
        """Return the layout of each round, to and fro between two."""

    def flags(self) -> list[str]:
        """Return the script's flags."""

    def elastic(self, folder: Path) -> tuple[list[str], list[str]]:
        """Return what makes it elastic: flags of scalai-run, and further ones of the script. Writes
        configurations into ``folder``."""

    def stock(self, folder: Path, layout: Layout) -> list[str]:
        """Return the script's further flags under torchrun."""

    def convert(self, saved: Path) -> Path:
        """Make the checkpoint that a round saved into what the next one loads; return where."""


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
    """What all ranks noted in one round, of which there are so many.

    ``number`` counts the rounds that began: one that was given up before has a restart count too.
    """

    def __init__(self, folder: Path, number: int, ranks: int) -> None:
        self._count = ranks
        begun = sorted({int(path.name.split("-")[1]) for path in folder.glob("round-*.jsonl")})
        self.number = begun[number] if number < len(begun) else number
        """Its restart count, which numbers reports too."""
        paths = sorted(folder.glob(f"round-{self.number}-*.jsonl"))
        self._ranks = [[json.loads(line) for line in path.open()] for path in paths]
        self.layout = next((entry["layout"] for entry in self._all("built")), "")

    def _all(self, event: str) -> list[dict[str, Any]]:
        return [entry for rank in self._ranks for entry in rank if entry["event"] == event]

    def last(self, event: str, clock: str = "at") -> float:
        """Return when the last rank was there for the first time; ``cpu``: its processor time."""
        first = (next(e for e in rank if e["event"] == event) for rank in self._ranks)
        return max(float(entry[clock]) for entry in first)

    def has(self, event: str) -> bool:
        """Whether all ranks were there."""
        return len(self._ranks) == self._count and all(
            any(entry["event"] == event for entry in rank) for rank in self._ranks
        )

    def steps(self) -> int:
        """Return how many steps the slowest rank has made."""
        return len(self._all("step")) // self._count if len(self._ranks) == self._count else 0

    def end(self, clock: str = "at") -> float:
        """Return when the last step had ended on all ranks; ``cpu``: their processor time then."""
        return max(float(entry[clock]) for entry in self._all("step"))

    def newest_step(self) -> int:
        return max(int(entry["step"]) for entry in self._all("step"))

    def step_s(self) -> float:
        """Return the median of the steps after the first."""
        first = min(entry["step"] for entry in self._all("step"))
        return median(float(e["took_s"]) for e in self._all("step") if e["step"] > first)

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


STAGES = ("script", "imported", "entered", "connected", "model", "built", "restored", "step")
"""What a new worker notes on its way, in order; Megatron's has no ``model`` of its own before."""


def change_between(
    old: Round, new: Round, before: str, asked: float, report: Mapping[str, Any]
) -> Change:
    """Return the change from one round to the next. ``before``: what the old workers do last;
    ``asked``: when the change was asked for."""
    moments = [("", old.end()), (before, old.last(before))]
    stages = [stage for stage in STAGES if new.has(stage)]
    moments += [(stage, new.last(stage)) for stage in stages]
    processor = [("", 0.0), *((stage, new.last(stage, "cpu")) for stage in stages)]
    cpu = {before: round(old.last(before, "cpu") - old.end("cpu"), 4), **_differences(processor)}
    downtime = new.last("step") - old.end() - new.step_s()
    slowed = old.slowed_s(asked)
    return Change(new.layout, downtime, slowed, new.step_s(), _differences(moments), cpu, report)


def _differences(moments: Sequence[tuple[str, float]]) -> dict[str, float]:
    return {name: round(at - since, 4) for (_, since), (name, at) in pairwise(moments)}


def run_by_checkpoint(folder: Path, job: Job, steps: Sequence[int], say: Say) -> Run:
    """Run the job under torchrun, so many steps a round; each change is save, exit, convert where
    the framework needs it, start, load."""
    marks = folder / "stock"
    marks.mkdir()
    found: list[Change] = []
    rounds: list[Round] = []
    loaded: Path | None = None
    for number, layout in enumerate(job.layouts(len(steps))):
        saved = folder / f"checkpoint-{number}"
        flags = [*job.stock(folder, layout), "--round", str(number), "--steps", str(steps[number])]
        if loaded is not None:
            flags += ["--load", str(loaded)]
        if number < len(steps) - 1:
            flags += ["--save", str(saved)]
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.ranks)]
        command += [str(job.script), *job.flags(), "--marks", str(marks), *flags]
        with Running(command, marks) as running:
            # The loaded checkpoint goes before the next is saved: both would need more memory.
            running.wait_for(_has_made(marks, number, layout, 1), "steps")
            if loaded is not None:
                shutil.rmtree(loaded)
        rounds.append(Round(marks, number, layout.ranks))
        if number:
            asked = rounds[-2].end()  # it ends by itself
            found.append(change_between(rounds[-2], rounds[-1], "saved", asked, {}))
            say(f"checkpoint -> {rounds[-1].layout}: {found[-1].downtime_s:.2f} s")
            say(f"    {found[-1].stages}")
        if number < len(steps) - 1:
            loaded = job.convert(saved)
    return Run.of(rounds, found)


def run_by_scalai(folder: Path, job: Job, changes: int, say: Say) -> Run:
    """Run the job under scalai-run; each change is ``scalai scale``."""
    marks, reports, name = folder / "ours", folder / "reports", "resize-benchmark"
    marks.mkdir()
    found: list[Change] = []
    rounds: list[Round] = []
    layouts = job.layouts(changes + 1)
    with elastic_job(
        folder, job, name, layouts, ["--marks", str(marks)], marks, reports
    ) as running:
        running.wait_for(lambda: "event=warm" in running.log(), "warm fork server")
        for number, layout in enumerate(layouts):
            asked = time.monotonic()
            if number:
                scale(folder / "store" / name, layout)
            running.wait_for(_has_made(marks, number, layout, job.steps), "steps")
            if number:
                rounds[-1] = Round(marks, number - 1, layouts[number - 1].ranks)
            rounds.append(Round(marks, number, layout.ranks))
            if number:
                place = rounds[-1].number - rounds[0].number + 1
                report = json.loads((reports / f"resize-{place:04d}.json").read_text())
                found.append(change_between(rounds[-2], rounds[-1], "written", asked, report))
                say(f"scalai -> {rounds[-1].layout}: {found[-1].downtime_s:.2f} s")
                say(f"    {found[-1].stages}")
                say(f"    {report['seconds']}")
        aside = marks / f"{LAST_STEP}.new"
        aside.write_text(str(rounds[-1].newest_step() + 4))
        os.replace(aside, marks / LAST_STEP)
    rounds[-1] = Round(marks, changes, layouts[-1].ranks)
    return Run.of(rounds, found)


def _has_made(marks: Path, number: int, layout: Layout, steps: int) -> Callable[[], bool]:
    """Return whether a round has made more than so many steps."""
    return lambda: Round(marks, number, layout.ranks).steps() > steps


def scale(job: Path, layout: Layout) -> None:
    """What ``scalai scale`` does, without the start of a process on busy cores."""
    card = read_card(job)
    assert card is not None, f"no coordinator in {job}"
    channel = Channel(*card)
    channel.call(Scale(layout.ranks, None, layout.degrees, dry_run=False))
    channel.close()


def elastic_job(
    folder: Path,
    job: Job,
    name: str,
    layouts: Sequence[Layout],
    flags: Sequence[str],
    logs: Path,
    reports: Path | None = None,
) -> "Running":
    """Return the job under scalai-run, on as many ranks as the largest of its layouts has."""
    launch, script = job.elastic(folder)
    command = ["scalai.launch.run", "--log-level", "debug", "--job", name, *launch]
    command += ["--nproc-per-node", str(max(layout.ranks for layout in layouts))]
    command += ["--store-dir", str(folder / "store")]
    if reports is not None:
        command += ["--report-dir", str(reports)]
    return Running([*command, str(job.script), *job.flags(), *script, *flags], logs)


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
            if kind is not None:
                print(self._failed("interrupted"), file=sys.stderr)
        finally:
            while self._process.poll() is None:
                self._process.terminate()  # the second one ends scalai-run at once
                time.sleep(0.5)

    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, is_done: Callable[[], bool], what: str, every_s: float = 0.2) -> None:
        """Wait until ``is_done``. Ends the benchmark where that takes too long or never comes."""
        deadline = time.monotonic() + TIMEOUT_S
        while not is_done():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise self._failed(f"no {what}")
            time.sleep(every_s)

    def _failed(self, what: str) -> SystemExit:
        lines = "\n".join(self.log().splitlines()[-60:])
        return SystemExit(f"{what}, exit code {self._process.poll()}:\n{lines}")
