"""What a job's steps take at its degrees, for its planner: measured while it trains undisturbed."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from scalai.core.job.membership import Job, Phase
from scalai.core.planner.change_time import ChangeTime, Moves, change_time
from scalai.core.planner.meter import Meter
from scalai.core.planner.preference import Measured
from scalai.launch.coordinator.sizing import Sizing


class Calibrating:
    """Watches the steps of a job.

    Args:
        sizing: Knows whether there is a planner.
        clock: Seconds that do not jump.
    """

    def __init__(self, sizing: Sizing, clock: Callable[[], float] = time.monotonic) -> None:
        self._sizing, self._clock = sizing, clock
        self._meter, self._moves = Meter(), Moves()

    def changed(self, report: Mapping[str, Any]) -> None:
        """Take note of what the bytes of a change took, by its report."""
        # Of a stop alone: what a failure left was written while nobody waited for a stop.
        is_stop = "snapshot_proof_s" in report
        self._moves = self._moves.reported(report["seconds"], is_stop=is_stop)

    def look(self, job: Job) -> tuple[Measured, ChangeTime | None] | None:
        """Take note of how far the job is. Returns what a step takes where that is known now, with
        those of a change (None: none was made)."""
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
            current.degrees, micro, reading.steps, reading.seconds, current.recompute
        )
        return measured, change_time(job.change.pace, self._moves)
