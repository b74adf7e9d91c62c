"""Times of a resize's phases: a log line per phase, and a JSON report per resize in the folder of
``--report-dir``. A full or hung folder neither ends nor delays a job."""

import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from scalai.core.degrees.passes import PARTS
from scalai.core.job.membership import Assignment, Phase
from scalai.launch.slow_files import PatientWriter
from scalai.store.atomic import replace_file

PHASES = (
    "detect", "build", "drain", "snapshot", "commit", "relaunch",
    "plan", "move", "restore", "proof", "first_step",
)  # fmt: skip
Cause = Literal[
    "start", "joined", "lost", "failed", "leaving", "asked", "devices", "planner", "again",
    "function",
]  # fmt: skip
"""First cause of a change."""
Kind = Literal["start", "grow", "shrink", "degrees", "recovery", "notice"]
"""Kind of a change, for counts."""
_RECOVERIES = ("lost", "failed", "function")
REPORT_S = 2.0
"""Longest wait for a report, in seconds; after a longer one, no wait until the folder answers."""


class Timeline:
    """Seconds of each phase of the present resize; 0: unmeasured."""

    def __init__(
        self,
        folder: Path | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._folder = None if folder is None else ReportFolder(folder, say)
        self._say = say
        self.reports: deque[dict[str, Any]] = deque(maxlen=16)
        """The newest reports."""
        self._ran: Assignment | None = None
        self._begin("start", "start")

    def _begin(self, reason: str, cause: Cause) -> None:
        self._reason, self.cause = reason, cause
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._marks = {"event": self._clock()}
        self._facts: dict[str, Any] = {}

    def begin(self, reason: str, cause: Cause = "asked") -> None:
        """Begin the time of a change, unless one is in progress. Workers may notice the loss of a
        host first, by their failure."""
        if not self.is_open:
            self._begin(reason, cause)
        elif cause == "lost" and self.cause == "failed" and not self.has_round:
            self._reason, self.cause = reason, cause

    @property
    def is_open(self) -> bool:
        return bool(self._marks)

    @property
    def has_round(self) -> bool:
        """Whether the present change has led to a round."""
        return self.is_open and "round" in self._facts

    @property
    def kind(self) -> Kind:
        """Kind of the present change, or of the newest one."""
        if self.cause in _RECOVERIES:
            return "recovery"
        if self.cause in ("start", "leaving"):
            return "start" if self.cause == "start" else "notice"
        before, after = self._facts.get("world_before"), self._facts.get("world_after")
        if before is None or after is None or before == after:
            return "grow" if self.cause == "joined" else "degrees"
        return "grow" if after > before else "shrink"

    def forget(self) -> None:
        """Drop a change without a result."""
        self._marks = {}

    def mark(self, name: str) -> None:
        """Record the time of a moment."""
        self._marks[name] = self._clock()

    def mark_first(self, name: str) -> None:
        """The same, unless it is recorded already."""
        self._marks.setdefault(name, self._clock())

    def since(self, mark: str) -> float:
        """Seconds since ``mark``; 0 without it."""
        return self._clock() - self._marks[mark] if mark in self._marks else 0.0

    def phase(self, name: str, seconds: float, **facts: Any) -> None:
        """End a phase: keep its seconds (of the slowest host) and log a line."""
        assert name in PHASES, name
        self._seconds[name] = max(self._seconds[name], seconds)
        self._facts.update(facts)
        words = " ".join(f"{key}={value}" for key, value in facts.items())
        self._say(f"event={name} took_s={seconds:.3f} {words}".rstrip())

    def note(self, **facts: Any) -> None:
        self._facts.update(facts)

    def enter(self, was: Phase, now: Phase, failure: str, slowest: Callable[[str], float]) -> None:
        """End and begin phases at a transition of the job.

        Args:
            was, now: The phases.
            failure: Reason of a freeze.
            slowest: Seconds of the slowest worker for a part of its snapshot.
        """
        if was is Phase.RUNNING and now in (Phase.BUILDING, Phase.PREPARING):
            # Without a join, loss or request: a host is well again, or its quarantine is over.
            self.begin("others may run workers now, or a change is tried again", "again")
            self.phase("detect", self.since("event"))
            self.mark("detected")
        if was is Phase.BUILDING:
            self.phase("build", self.since("detected"))
        if now is Phase.PREPARING:
            self.mark("preparing")
        elif now is Phase.FREEZING:
            if failure:
                self.begin(failure, "failed")
            self.mark("failed")
            self.mark_first("stood")
        elif now is Phase.COMMITTING and was is Phase.RESCUING:
            self.phase("snapshot", self.since("failed"), is_emergency=True)
            self.mark("sealed")
        elif now is Phase.COMMITTING:
            snapshot, proof = slowest("snapshot"), slowest("snapshot_proof")
            self.phase("drain", max(0.0, self.since("preparing") - snapshot))
            self.phase("snapshot", snapshot, snapshot_proof_s=round(proof, 6))
            self.mark("sealed")
            self._marks.setdefault("stood", self._clock() - snapshot)
        elif now is Phase.STOPPING and was is not Phase.STARTING:
            self.mark_first("stood")

    def aim(self, assignment: Assignment) -> None:
        """Record what the change is to lead to."""
        ran = self._ran
        self.note(
            world_before=ran.degrees.world_size if ran else None,
            world_after=assignment.degrees.world_size,
        )

    def start(self, round: int, generation: int | None, step: int, assignment: Assignment) -> None:
        """Record the start of a round from the state of this step."""
        self.aim(assignment)
        ran, self._ran = self._ran, assignment
        self.note(
            workers_before=dict(ran.workers) if ran else {},
            round=round,
            generation=generation,
            step=step,
            before=str(ran.degrees) if ran else None,
            passes_before=ran.passes.to_json() if ran else None,
            after=str(assignment.degrees),
            passes_after=assignment.passes.to_json(),
            workers=dict(assignment.workers),
            why=assignment.reason,
        )
        # The old workers' end after a commit is part of the relaunch.
        self.mark_first("committed")

    def correct(self, step: int) -> int | None:
        """Correct the workers' first step: the script may have its own checkpoint. Returns the
        steps lost then; None: nothing new."""
        lost, begun = self._facts.get("steps_lost"), self._facts.get("step", 0)
        if not self.is_open or not lost or step <= begun:
            return None
        self.note(steps_lost=max(0, lost - (step - begun)), step=step)
        return int(self._facts["steps_lost"])

    def close(self, **facts: Any) -> Mapping[str, Any]:
        """Write and return the report after the first step. ``paused_s``: seconds without a step; a
        first start has none."""
        if "stood" in self._marks:
            facts["paused_s"] = round(self.since("stood"), 6)
        if self._facts.get("steps_lost"):
            self._facts.setdefault("steps_lost_why", "no newer state was whole: see recovery")
        report = {
            "reason": self._reason,
            "cause": self.cause,
            "kind": self.kind,
            **self._facts,
            **facts,
            "seconds": {name: round(value, 6) for name, value in self._seconds.items()},
            "total_s": round(self.since("event"), 6),
            "at": time.time(),
        }
        self.reports.append(report)
        self._marks = {}
        if self._folder is not None:
            self._folder.write(int(report.get("round", 0)), report)
        return report

    def amend(self, function: str, prove_s: float) -> None:
        """Add the result of the function's proof to the newest report."""
        if self.reports:
            self.reports[-1].update(function=function, prove_s=round(prove_s, 6))
            if self._folder is not None:
                self._folder.write_again(self.reports[-1])


def summary(report: Mapping[str, Any]) -> str:
    """Log line of a report, for a person."""
    ranks = report.get("world_after")
    passes = report.get("passes_after") or {}
    after = f"{report.get('after')}" + "".join(
        f", {part.replace('_', ' ')} {passes[part]}" for part in PARTS if passes.get(part)
    )
    if "paused_s" not in report:
        return f"event=started on {ranks} ranks, {after}, after {report['total_s']:.1f} s"
    before, paused_s, lost = report.get("before"), report["paused_s"], report.get("steps_lost", 0)
    layouts = after if before in (None, report.get("after")) else f"{before} -> {after}"
    beside_s = report["total_s"] - paused_s
    steps = f"{lost} steps lost: {report.get('steps_lost_why')}" if lost else "no step lost"
    return (
        f"event=resized {report['reason']}: {'back ' * (report.get('kind') == 'recovery')}on "
        f"{ranks} ranks, {layouts}; paused {paused_s:.2f} s"
        f"{f', {beside_s:.1f} s beside the training' if beside_s >= 0.1 else ''}; {steps}"
    )


class ReportFolder:
    """Writes reports in a thread of its own.

    Args:
        folder: Place of the reports, made on demand.
        say: Takes log lines; any thread calls it.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._last = -1
        self._files = PatientWriter("reports", REPORT_S, self._say_late, self._say_back)
        self._files.do(self._try)

    def write(self, number: int, report: Mapping[str, Any]) -> None:
        """Write a report to the file of this number or the next free one: reports of earlier runs
        stay. It is there on return, unless the log says otherwise."""
        self._files.do(partial(self._write, number, _content(report)))

    def write_again(self, report: Mapping[str, Any]) -> None:
        """Replace the last report."""
        self._files.do(partial(self._replace, _content(report)))

    def _say_late(self) -> None:
        self._say(
            f"event=report_late --report-dir {self._folder} has not answered for {REPORT_S:.0f} s: "
            "the job goes on, and its reports are written once it does"
        )

    def _say_back(self, left_out: int) -> None:
        lost = f"; {left_out} reports are left out" if left_out else ""
        self._say(f"event=report_back --report-dir {self._folder} answers again{lost}")

    def _try(self) -> None:
        """Log early if the folder is not writable."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            self._say(
                f"event=report_failed --report-dir {self._folder} cannot be written ({error}): "
                "there will be no reports"
            )

    def _replace(self, content: bytes) -> None:
        try:
            if self._last >= 0:
                replace_file(self._path(self._last), content, is_durable=False)
        except OSError as error:
            self._say(f"event=report_failed {error}: the newest report is not amended")

    def _write(self, number: int, content: bytes) -> None:
        path = self._path(number := max(number, self._last + 1))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while path.exists():
                path = self._path(number := number + 1)
            self._last = number
            replace_file(path, content, is_durable=False)
        except OSError as error:
            self._say(f"event=report_failed path={path} {error}: the job goes on without it")

    def _path(self, number: int) -> Path:
        return self._folder / f"resize-{number:04d}.json"


def _content(report: Mapping[str, Any]) -> bytes:
    return (json.dumps(report, indent=1) + "\n").encode()
