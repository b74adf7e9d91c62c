"""What a snapshot costs a training, by the times of its steps alone."""

import pytest

from scalai.core.job.spacing import KEPT_STEPS, StepTimes


def after(times: StepTimes, *steps: tuple[float, bool]) -> StepTimes:
    """Return it after steps that took so long, with a snapshot beside them or without."""
    for took_s, is_beside in steps:
        assert times.since is not None
        times = times.ended(times.since + took_s, is_beside=is_beside)
    return times


def usual(step_s: float = 2.0, count: int = 8) -> StepTimes:
    return after(StepTimes().ended(100.0, is_beside=False), *[(step_s, False)] * count)


def test_nothing_is_known_before_steps_were_made() -> None:
    assert StepTimes().step_s is None and usual(count=2).step_s is None
    assert usual().step_s == 2.0 and usual().cost_s is None


def test_a_snapshot_costs_what_the_steps_beside_it_take_longer() -> None:
    times = after(usual(), (2.5, True), (2.25, True))
    assert times.cost_s is None, "it is not over"
    times = after(times, (2.0, False))
    assert times.cost_s == pytest.approx(0.75) and times.step_s == 2.0


def test_one_that_is_not_felt_costs_nothing_and_not_less() -> None:
    assert after(usual(), (1.5, True), (2.0, False)).cost_s == 0.0


def test_each_snapshot_has_its_own_cost() -> None:
    times = after(usual(), (3.0, True), (2.0, False), (2.5, True), (2.0, False))
    assert times.cost_s == pytest.approx(0.5)


def test_where_each_step_has_a_snapshot_the_usual_one_is_that_of_before() -> None:
    times = after(usual(), *[(2.5, True)] * 40)
    assert times.step_s == 2.0 and times.cost_s is None


def test_what_is_beside_a_snapshot_before_a_step_is_known_is_not_judged() -> None:
    times = after(StepTimes().ended(0.0, is_beside=False), (60.0, True), *[(2.0, False)] * 8)
    assert times.cost_s is None and times.step_s == 2.0


def test_an_evaluation_is_no_usual_step_and_a_slower_training_becomes_one() -> None:
    times = after(usual(), (300.0, False), *[(2.0, False)] * 4)
    assert times.step_s == 2.0
    assert after(times, *[(5.0, False)] * KEPT_STEPS).step_s == 5.0
