"""What a change has taken is told apart into what any change takes and what its bytes took."""

from dataclasses import replace

import pytest

from scalai.core.job.spacing import Pace
from scalai.core.planner.meter import ChangeTime, Moves, change_time

PACE = Pace(step_s=1.0, write_s=10.0, start_s=30.0)
REPORT = {
    "detect": 3.0, "build": 50.0, "drain": 1.0, "snapshot": 8.0, "commit": 2.0, "relaunch": 6.0,
    "plan": 1.0, "move": 12.0, "restore": 5.0, "proof": 2.0, "first_step": 4.0,
}  # fmt: skip


def test_snapshot_move_and_restore_are_of_the_bytes_and_the_rest_of_any_change() -> None:
    found = change_time(PACE, Moves().reported(REPORT, is_stop=True))
    assert found == ChangeTime(fixed_s=16.0, moves_s=25.0)
    assert found.total_s == 41.0


def test_after_a_failure_the_snapshot_of_the_last_stop_counts() -> None:
    """The pace keeps how long that stop's was written."""
    moves = Moves().reported(REPORT, is_stop=True)
    failure = {**REPORT, "snapshot": 4.0, "move": 2.0, "restore": 1.0}
    assert moves.reported(failure, is_stop=False) == Moves(snapshot_s=8.0, arrival_s=3.0)


def test_bytes_do_not_take_longer_than_the_part_in_which_they_move() -> None:
    long = Moves(snapshot_s=99.0, arrival_s=99.0)
    assert change_time(PACE, long) == ChangeTime(fixed_s=1.0, moves_s=40.0)


@pytest.mark.parametrize("pace", [replace(PACE, write_s=None), replace(PACE, start_s=None)])
def test_nothing_is_said_before_a_change_was_made(pace: Pace) -> None:
    assert change_time(pace, Moves()) is None


@pytest.mark.parametrize(
    ("fixed_s", "moves_s"), [(-1.0, 2.0), (1.0, -1.0), (0.0, 0.0), (float("nan"), 1.0)]
)
def test_what_is_no_time_is_refused(fixed_s: float, moves_s: float) -> None:
    with pytest.raises(ValueError, match="no time of a change"):
        ChangeTime(fixed_s, moves_s)
