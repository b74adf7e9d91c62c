"""One run of ``trace.py``: a job that is measured, and then taken through a trace."""

import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from resize import Gpt
from resize_marks import LAST_STEP
from resize_runs import Layout as Asked
from resize_runs import Running, Say, elastic_job, scale

from scalai.core.degrees.degrees import Degrees
from scalai.core.planner.columns import Layout
from scalai.core.planner.trace import Trace
from scalai.core.planner.trace_replay import Account, TracePiece

TP2, DP2, PP2, ONE = (
    Layout(Degrees(*sizes), 1) for sizes in ((2, 1, 1), (1, 1, 2), (1, 2, 1), (1, 1, 1))
)
TOUR = (TP2, ONE, DP2, PP2, ONE)
"""Layouts that are measured first."""
TURNS = 3
"""So often the job then changes to the fastest layout and back, as it will in the trace."""
FIRST_CHANGES = 2
"""Those of a job are no usual ones."""
WARM_STEPS = 3
"""The first steps of a round are no usual ones; they are part of what its change takes."""
ENDING_STEPS = 6


def steps_of(marks: Path, number: int) -> list[tuple[float, int]]:
    """Return when the first rank of a round has made which step."""
    path = marks / f"round-{number}-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines if '"event": "step"' in line]
    return [(float(entry["at"]), int(entry["step"])) for entry in entries]


class Progress:
    """When the job has made which step, by the marks of the first rank of each round."""

    def __init__(self, marks: Path, rounds: int) -> None:
        self.rounds = [steps_of(marks, number) for number in range(rounds)]
        self._all = [(0.0, 0), *sorted(step for one in self.rounds for step in one)]
        self._times = [at for at, _ in self._all]

    def at(self, moment: float) -> float:
        """Return how many steps were made by then, with the part of the one under way."""
        place = bisect_right(self._times, moment) - 1
        began, made = self._all[place]
        if place + 1 == len(self._all):
            return float(made)
        ends, after = self._all[place + 1]
        return made + (after - made) * (moment - began) / (ends - began)


@dataclass(frozen=True)
class Visit:
    """A stay at a layout: which, when it was asked for, and until when it was undisturbed."""

    layout: Layout
    asked: float
    until: float


@dataclass(frozen=True)
class Calibrated:
    """What was measured of a job: seconds a step by layout, seconds a change by pair of them."""

    step_s: Mapping[Layout, float]
    change_s: Mapping[tuple[Layout, Layout], float]

    def cost(self, before: Layout | None, after: Layout) -> float:
        """Return the seconds of a change; of one that was not measured those of a usual one."""
        assert before is not None, "no change of this trace begins from nothing"
        known = self.change_s.get((before, after))
        return fmean(self.change_s.values()) if known is None else known

    def steps_shown(self) -> dict[str, float]:
        return {str(one): round(seconds, 4) for one, seconds in self.step_s.items()}

    def changes_shown(self) -> dict[str, float]:
        return {
            f"{before.degrees} to {after.degrees}": round(seconds, 3)
            for (before, after), seconds in self.change_s.items()
        }


@dataclass(frozen=True)
class Run:
    """A job that went through a trace, with the launcher's reports of the trace's changes."""

    calibrated: Calibrated
    simulated_steps: float
    measured_steps: float
    reports: Sequence[Mapping[str, Any]]


Simulate = Callable[[Trace, Calibrated], tuple[tuple[TracePiece, ...], Account]]


class Driven:
    """A job whose layout is changed by its driver."""

    def __init__(self, folder: Path, name: str, running: Running, marks: Path) -> None:
        self._job, self._running, self._marks = folder / "store" / name, running, marks
        self._layouts: list[Layout] = []

    @property
    def layout(self) -> Layout:
        return self._layouts[-1]

    @property
    def rounds(self) -> int:
        return len(self._layouts)

    def progress(self) -> Progress:
        return Progress(self._marks, self.rounds)

    def begin(self, layout: Layout) -> float:
        """Ask for a layout. Returns when."""
        asked = time.monotonic()
        if self._layouts:
            world = layout.degrees.world_size
            scale(self._job, Asked(world, f"tp{layout.degrees.tp} pp{layout.degrees.pp}"))
        self._layouts.append(layout)
        return asked

    def visit(self, layout: Layout, seconds: float) -> Visit:
        """Change to a layout and stay until it has run undisturbed for so long."""
        asked, number = self.begin(layout), self.rounds - 1

        def is_measured() -> bool:
            steps = steps_of(self._marks, number)
            return len(steps) > WARM_STEPS and steps[-1][0] - steps[WARM_STEPS - 1][0] >= seconds

        self._running.wait_for(is_measured, f"steps at {layout}")
        return Visit(layout, asked, time.monotonic())

    def end(self) -> None:
        """Let the job end a few steps on."""
        newest = self.progress().rounds[-1][-1][1]
        aside = self._marks / f"{LAST_STEP}.new"
        aside.write_text(str(newest + ENDING_STEPS))
        os.replace(aside, self._marks / LAST_STEP)


def run_trace(
    folder: Path, job: Gpt, trace: Trace, simulate: Simulate, window_s: float, say: Say
) -> Run:
    """Measure a job, say what it will make of a trace, and take it through that."""
    marks, reports, name = folder / "marks", folder / "reports", "trace-benchmark"
    marks.mkdir()
    layouts = [Asked(TP2.degrees.world_size, "")]
    flags = ["--marks", str(marks)]
    with elastic_job(folder, job, name, layouts, flags, marks, reports) as running:
        running.wait_for(lambda: "event=warm" in running.log(), "warm fork server")
        driven = Driven(folder, name, running, marks)
        visits = [driven.visit(layout, window_s) for layout in TOUR]
        steps = calibrated(driven.progress(), visits).step_s
        fastest = min((TP2, DP2, PP2), key=lambda layout: steps[layout])
        visits += [driven.visit(layout, window_s) for layout in (fastest, ONE) * TURNS]
        found = calibrated(driven.progress(), visits)
        say(f"a step takes {found.steps_shown()}")
        say(f"a change takes {found.changes_shown()}")
        pieces, its = simulate(trace, found)
        say(f"simulated: {its.steps:.1f} steps, {its.changes} changes, lost {dict(its.lost_s)}")
        if driven.layout != first_of(pieces):
            driven.visit(first_of(pieces), window_s)
        first, began = driven.rounds, time.monotonic()
        follow(driven, pieces, began, running, say)
        measured = driven.progress().at(began + trace.seconds) - driven.progress().at(began)
        say(f"measured: {measured:.1f} steps")
        said = [report_of(reports, number) for number in range(first, driven.rounds)]
        driven.end()
    return Run(found, its.steps, measured, [one for one in said if one is not None])


def first_of(pieces: Sequence[TracePiece]) -> Layout:
    layout = pieces[0].layout
    assert layout is not None, "the trace begins with devices"
    return layout


def follow(
    driven: Driven, pieces: Sequence[TracePiece], began: float, running: Running, say: Say
) -> None:
    """Have the job run the layouts of the pieces when they do, until the last one ends."""
    for piece in pieces:
        if piece.layout is not None and piece.layout != driven.layout:
            sleep_until(running, began + piece.begin_s)
            driven.begin(piece.layout)
            say(f"{piece.begin_s:6.1f} s: {piece.gpus} devices, {piece.layout}")
    sleep_until(running, began + pieces[-1].end_s)


def sleep_until(running: Running, moment: float) -> None:
    running.wait_for(lambda: time.monotonic() >= moment, "end of the wait", every_s=0.02)


def report_of(folder: Path, number: int) -> Mapping[str, Any] | None:
    """Return the launcher's report of the change to a round; None: it was not complete."""
    path = folder / f"resize-{number + 1:04d}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def calibrated(progress: Progress, visits: Sequence[Visit]) -> Calibrated:
    """Return what the visits of a job say: seconds of steps while nothing else goes on, and what
    each change takes from them, its warm steps included."""
    spans: dict[Layout, list[tuple[float, int]]] = {}
    for number, visit in enumerate(visits):
        steps = [one for one in progress.rounds[number] if one[0] <= visit.until][WARM_STEPS - 1 :]
        (began, first), (ended, last) = steps[0], steps[-1]
        spans.setdefault(visit.layout, []).append((ended - began, last - first))
    step_s = {
        layout: sum(took for took, _ in found) / sum(made for _, made in found)
        for layout, found in spans.items()
    }
    lost: dict[tuple[Layout, Layout], list[float]] = {}
    for number, (before, after) in enumerate(pairwise(visits)):
        old = progress.rounds[number][-1][1] - progress.at(after.asked)
        new = progress.at(after.until) - progress.rounds[number][-1][1]
        took = after.until - after.asked
        seconds = took - old * step_s[before.layout] - new * step_s[after.layout]
        if number >= FIRST_CHANGES:
            lost.setdefault((before.layout, after.layout), []).append(max(seconds, 0.0))
    return Calibrated(step_s, {pair: fmean(seconds) for pair, seconds in lost.items()})
