"""What a job's steps take at its degrees, for its planner: measured while it trains undisturbed."""

import time
from collections.abc import Callable

from scalai.core.membership import Job, Phase
from scalai.core.planner.meter import Meter
from scalai.core.planner.preference import Measured
from scalai.launch.coordinator.sizing import Sizing


class Calibrating:
    """Tells the sizing of a job what its steps take.

    Args:
        sizing: Knows the planner.
        say: Takes log lines.
        clock: Seconds that do not jump.
    """

    def __init__(
        self,
        sizing: Sizing,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sizing, self._say, self._clock = sizing, say, clock
        self._meter = Meter()

    def look(self, job: Job) -> bool:
        """Take note of how far the job is. Returns whether the planner has learned something."""
        current = job.current
        if current is None or not self._sizing.has_planner:
            return False
        if job.phase is not Phase.RUNNING:
            self._meter = self._meter.interrupted()
            return False
        self._meter, reading = self._meter.look(
            job.round, job.newest, self._clock(), self._sizing.trial_steps
        )
        if reading is None:
            return False
        micro = current.micro_batch_size or self._sizing.micro_batch_size
        if micro is None:
            return False
        pace, parts = job.pace, (job.pace.write_s, job.pace.start_s)
        change_s = None if None in parts else sum(filter(None, (*parts, pace.step_s)))
        found = Measured(current.degrees, micro, reading.steps, reading.seconds)
        self._say(self._sizing.measured(found, change_s))
        return True
