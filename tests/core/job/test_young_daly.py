"""How often a training is saved: the interval loses the least time, and nothing that is measured
badly makes it absurd."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.job.spacing import (
    LEAST_DURATIONS,
    LEAST_S,
    MOST_S,
    MOST_STEPS,
    MTBF_HOURS,
    interval_s,
    mtbf_s,
    steps_of,
)

COSTS = st.floats(0.0, 1e4)
TIMES = st.floats(1.0, 1e10)
ANYTHING = st.floats(allow_nan=True, allow_infinity=True)


def lost(apart_s: float, cost_s: float, between_s: float) -> float:
    """Return the share of its time that a training loses: to snapshots, and to steps made anew."""
    return cost_s / apart_s + apart_s / 2 / between_s


@given(COSTS, TIMES)
def test_no_other_interval_within_the_bounds_loses_less(cost_s: float, between_s: float) -> None:
    apart_s = interval_s(cost_s, between_s)
    assert LEAST_S <= apart_s <= MOST_S
    for other in (apart_s / 1.5, apart_s * 1.5):
        if LEAST_S <= other <= MOST_S:
            least = lost(apart_s, cost_s, between_s)
            assert lost(other, cost_s, between_s) >= least * (1 - 1e-9)


@given(ANYTHING, TIMES, ANYTHING)
def test_what_is_no_number_costs_nothing(cost_s: float, between_s: float, write_s: float) -> None:
    assert LEAST_S <= interval_s(cost_s, between_s, write_s) <= MOST_S
    for bad in (nan, inf, -inf, -1.0):
        assert interval_s(bad, between_s) == interval_s(0.0, between_s) == LEAST_S


@given(COSTS, TIMES, st.floats(0.0, 1e5))
def test_a_snapshot_has_time_to_be_written(cost_s: float, between_s: float, write_s: float) -> None:
    assert interval_s(cost_s, between_s, write_s) >= min(MOST_S, LEAST_DURATIONS * write_s)


@given(COSTS, COSTS, TIMES, TIMES)
def test_what_costs_more_is_done_less_and_what_fails_more_is_saved_more(
    cost_s: float, other_s: float, between_s: float, later_s: float
) -> None:
    low, high = sorted((cost_s, other_s))
    assert interval_s(low, between_s) <= interval_s(high, between_s)
    soon, late = sorted((between_s, later_s))
    assert interval_s(cost_s, soon) <= interval_s(cost_s, late)


@given(st.floats(LEAST_S, MOST_S), st.floats(1e-12, 1e9))
def test_steps_are_the_nearest_to_an_interval(apart_s: float, step_s: float) -> None:
    every = steps_of(apart_s, step_s)
    assert 1 <= every <= MOST_STEPS
    if 1 < every < MOST_STEPS:
        assert abs(every * step_s - apart_s) <= 0.5001 * step_s


@given(st.integers(1, 10**6), st.floats(1.0, 1e7), st.integers(0, 1000), st.floats(0.0, 1e12))
def test_more_workers_and_more_failures_leave_less_time_between_two(
    workers: int, hours: float, failures: int, worker_s: float
) -> None:
    between_s = mtbf_s(workers, hours, failures, worker_s)
    assert between_s > 0
    assert mtbf_s(workers + 1, hours, failures, worker_s) <= between_s * (1 + 1e-9)
    assert mtbf_s(workers, hours, failures + 1, worker_s) < between_s


@pytest.mark.parametrize(
    ("workers", "failures", "trained_h", "hours"),
    [
        (1, 0, 0.0, MTBF_HOURS),
        (16_384, 0, 0.0, MTBF_HOURS / 16_384),
        (8, 1, 0.0, 1.0),  # one at once is no rate: it counts as one in an hour
        (8, 5, 10.0, 2.0),  # a cluster that fails every two hours does so whatever is assumed
        (1000, 0, 50.0, 100.0),  # and one that has not failed fails less than was assumed
    ],
)
def test_what_is_assumed_and_what_was_seen(
    workers: int, failures: int, trained_h: float, hours: float
) -> None:
    worker_s = trained_h * 3600 * workers
    found = mtbf_s(workers, MTBF_HOURS, failures, worker_s)
    assert found == pytest.approx(hours * 3600, rel=1e-6)
