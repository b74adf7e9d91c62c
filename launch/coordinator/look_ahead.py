"""Planning beside the job: lessons of measured steps, and layouts for more or fewer hosts.

Nothing waits for it. It holds the job's lock only to read and adopt.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from scalai.core.degrees.passes import AS_GIVEN
from scalai.core.job.assigning import plans_ahead
from scalai.core.job.membership import Assign, Job, Phase, present, staying
from scalai.core.planner.meter import ChangeTime, Meter, Moves, change_time
from scalai.core.planner.preference import Measured, Preference
from scalai.launch.coordinator.sizing import Sizing


class Calibrating:
    """Measures the steps and changes of a job."""

    def __init__(self, sizing: Sizing, clock: Callable[[], float] = time.monotonic) -> None:
        self._sizing, self._clock = sizing, clock
        self._meter, self._moves = Meter(), Moves()

    def changed(self, report: Mapping[str, Any]) -> None:
        """Measure the bytes of a change from its report."""
        # Only a stop counts: a write after a failure delays no stop.
        is_stop = "snapshot_proof_s" in report
        self._moves = self._moves.reported(report["seconds"], is_stop=is_stop)

    def look(self, job: Job) -> tuple[Measured, ChangeTime | None] | None:
        """Measure the job's progress. Returns the duration of a step once known, with that of a
        change (None: no change yet)."""
        current = job.current
        if current is None or not self._sizing.has_planner:
            return None
        if job.phase is not Phase.RUNNING:
            self._meter = self._meter.interrupted()
            return None
        self._meter, reading = self._meter.look(job.round, job.newest, self._clock())
        if reading is None:
            return None
        micro = current.micro_batch_size or self._sizing.micro_batch_size
        if micro is None:
            return None
        measured = Measured(
            current.degrees, micro, reading.steps, reading.seconds, current.recompute,
            current.offload,
        )  # fmt: skip
        return measured, change_time(job.change.pace, self._moves)


Learned = tuple[Measured, ChangeTime | None]
"""Duration of a step, and of a change."""


class Planned(Protocol):
    """The job to plan for. Its lock is held for each read and change."""

    state: Job
    sizing: Sizing

    def learned(self, preference: Preference, assign: Assign) -> None: ...


class LookAhead:
    """Runs one computation at a time; of later requests only the newest waits."""

    def __init__(
        self,
        live: Planned,
        lock: threading.RLock,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calibrating = Calibrating(live.sizing, clock)
        self._live, self._job_lock, self._say = live, lock, say
        self._lock = threading.Lock()
        self._is_wanted = self._is_busy = False
        self._found: Learned | None = None
        self._said = ""

    def look(self, job: Job) -> None:
        """Measure the job's progress, and compute with new measurements."""
        if (found := self._calibrating.look(job)) is not None:
            self.begin(found)

    def changed(self, report: Mapping[str, Any]) -> None:
        """Measure a change by its report."""
        self._calibrating.changed(report)

    def begin(self, found: Learned | None = None) -> None:
        """Compute the layouts ahead, with new measurements; returns at once. Without a planner it
        does nothing."""
        if not self._live.sizing.has_planner:
            return
        with self._lock:
            self._is_wanted, self._found = True, found or self._found
            if self._is_busy:
                return
            self._is_busy = True
        threading.Thread(target=self._work, name="look-ahead", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._is_wanted:
                    self._is_busy = False
                    return
                found, self._found, self._is_wanted = self._found, None, False
            try:
                self._plan(found)
            except Exception as error:  # our own slip: nothing depends on this
                self._say(f"event=ahead failed: {error!r}")

    def _plan(self, found: Learned | None) -> None:
        with self._job_lock:
            job, sizing = self._live.state, self._live.sizing
            assign = job.settings.assign
        learned = sizing.recalibrated() if found is None else sizing.with_measured(*found)
        if learned is not None:
            assign = learned[1]
        line = plans_line(assign, job)  # fills the cache of assignments
        assign(staying(job), present(job))
        with self._job_lock:
            if learned is not None:
                self._say(_learned_line(found, learned[0]))
                self._live.learned(*learned)
            if line != self._said:
                self._said = line
                self._say(line)


def _learned_line(found: Learned | None, preference: Preference) -> str:
    layouts = f"layouts={len(preference.measured)}"
    if found is None:
        return f"event=recalled {layouts}"
    steps = found[0]
    return (
        f"event=measured degrees={steps.degrees} micro_batch={steps.micro_batch} "
        f"recompute={steps.recompute or preference.recompute} "
        f"offload={steps.offload or preference.offload} "
        f"step_s={steps.seconds:.4g} steps={steps.steps} {layouts}"
    )


def plans_line(assign: Assign, job: Job) -> str:
    """Log line of the layouts after each possible change of hosts."""
    ran = present(job)
    passes = AS_GIVEN if ran is None else ran.passes
    plans = plans_ahead(assign, staying(job), ran)
    parts = (
        f"{name.replace(' ', '_')}="
        + ("none" if plan is None else f"{plan.degrees}{plan.passes.beside(passes)}")
        for name, plan in plans
    )
    return " ".join(("event=ahead", *parts))
