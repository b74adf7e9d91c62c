"""A planner learns what a change takes from the pace of a job and the reports of its changes."""

from types import SimpleNamespace
from typing import Any, cast

from scalai.core.degrees.degrees import Degrees
from scalai.core.job.membership import Assignment, Job, Phase
from scalai.core.job.spacing import Pace
from scalai.core.planner.meter import ChangeTime
from scalai.core.planner.preference import Measured
from scalai.launch.coordinator.look_ahead import Calibrating
from scalai.launch.coordinator.sizing import Sizing

DEGREES = Degrees(2, 1, 2)
PACE = Pace(step_s=1.0, write_s=10.0, start_s=30.0)


def read(reports: list[dict[str, Any]]) -> tuple[Measured, ChangeTime | None]:
    """Return what is learned of a job that makes a step a second after changes of these reports."""
    seconds = iter(range(1000))
    sizing = SimpleNamespace(has_planner=True, micro_batch_size=1)
    watch = Calibrating(cast(Sizing, sizing), clock=lambda: float(next(seconds)))
    for report in reports:
        watch.changed(report)
    current = Assignment((("a", 4),), DEGREES, None, "")
    for step in range(1000):
        job = SimpleNamespace(
            current=current, phase=Phase.RUNNING, round=1, newest=step,
            change=SimpleNamespace(pace=PACE),
        )  # fmt: skip
        if (found := watch.look(cast(Job, job))) is not None:
            return found
    raise AssertionError("nothing was measured")


def test_the_bytes_of_the_last_change_are_told_apart() -> None:
    stop = {
        "seconds": {"snapshot": 8.0, "move": 12.0, "restore": 5.0, "relaunch": 6.0},
        "snapshot_proof_s": 0.1,
    }
    measured, change = read([stop])
    assert measured.degrees == DEGREES and measured.seconds == 1.0
    assert change == ChangeTime(fixed_s=16.0, moves_s=25.0)
    failure = {"seconds": {"snapshot": 3.0, "move": 1.0, "restore": 1.0}, "is_emergency": True}
    assert read([stop, failure])[1] == ChangeTime(fixed_s=31.0, moves_s=10.0)
    assert read([])[1] == ChangeTime(fixed_s=41.0)
