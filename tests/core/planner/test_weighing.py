"""The rule by which what runs is left: one for the running job, for a plan and for a trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.planner.weighing import MARGIN, is_worth_leaving, needed_gain, steps_within


@pytest.mark.parametrize(
    ("steps", "present", "spread", "leaves"),
    [
        (104.9, 100, 0.0, False),
        (105.1, 100, 0.0, True),
        (119.9, 100, 0.2, False),
        (120.1, 100, 0.2, True),
        (1, 0, 0.2, True),
        (0, 0, 0.0, False),
    ],
)
def test_what_runs_is_left_for_more_than_the_margin_and_what_is_uncertain(
    steps: float, present: float, spread: float, leaves: bool
) -> None:
    assert is_worth_leaving(steps, present, spread) == leaves


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 10))
def test_nobody_goes_there_and_back(one: float, other: float, spread: float) -> None:
    assert not (is_worth_leaving(one, other, spread) and is_worth_leaving(other, one, spread))
    assert needed_gain(spread) >= MARGIN


def test_a_change_that_outlasts_the_devices_makes_no_step() -> None:
    assert steps_within(100, 101, 2.0) == 0
    assert steps_within(100, 40, 2.0) == 30
