"""How often a training is saved: at which steps snapshots are, what one costs by the times of steps
alone, the interval that loses least, and how a job that chooses it tells all workers alike."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.job import membership as m
from scalai.core.job import respacing
from scalai.core.job.resize import advance
from scalai.core.job.spacing import (
    FIRST_STEPS,
    KEPT,
    KEPT_STEPS,
    LEAST_DURATIONS,
    LEAST_S,
    MOST_S,
    MOST_STEPS,
    MTBF_HOURS,
    Schedule,
    SnapshotCost,
    Spacing,
    StepTimes,
    interval_s,
    is_noticeable,
    longest_s,
    mtbf_s,
    steps_of,
)
from scalai.core.messages import actions, commands, events, reports
from support import laws
from support.laws import advance_all, ordered, told, until

# ---------------------------------------------------------------------- at which steps


def test_snapshots_are_at_multiples_and_not_before_the_first_step() -> None:
    assert [step for step in range(13) if Schedule(4).is_due(step)] == [4, 8, 12]
    assert [step for step in range(13) if Schedule(4, 5).is_due(step)] == [9]
    assert not any(Schedule(0).is_due(step) for step in range(13))


@pytest.mark.fault
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 30), st.integers(0, 60))
def test_who_learns_late_is_where_all_others_are_from_then_on(
    before: int, after: int, begin: int, heard: int
) -> None:
    told = Schedule(after, begin)

    def made(heard: int) -> list[int]:
        schedule, steps = Schedule(before), []
        for step in range(1, 100):
            schedule = schedule.at(step, told if step >= heard else None)
            steps += [step] if schedule.is_due(step) else []
        return steps

    soon, late = made(0), made(heard)
    assert [step for step in soon if step >= heard] == [step for step in late if step >= heard]
    if heard <= begin:
        assert soon == late, "who hears of it in time never differs"


# ---------------------------------------------------------------------- what one costs


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


# ---------------------------------------------------------------------- the interval

COSTS = st.floats(0.0, 1e4)
TIMES = st.floats(1.0, 1e10)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def lost(apart_s: float, cost_s: float, between_s: float) -> float:
    """Return the share of its time that a training loses: to snapshots, and to steps made anew."""
    return cost_s / apart_s + apart_s / 2 / between_s


@given(COSTS, TIMES)
def test_no_other_interval_within_the_bounds_loses_less(cost_s: float, between_s: float) -> None:
    apart_s = interval_s(cost_s, between_s)
    assert LEAST_S <= apart_s <= longest_s(cost_s) <= MOST_S
    for other in (apart_s / 1.5, apart_s * 1.5):
        if LEAST_S <= other <= longest_s(cost_s):
            least = lost(apart_s, cost_s, between_s)
            assert lost(other, cost_s, between_s) >= least * (1 - 1e-9)


@given(COSTS)
def test_ten_minutes_are_passed_only_where_a_thousandth_of_the_training_would_be(
    cost_s: float,
) -> None:
    if longest_s(cost_s) > 600:
        assert cost_s / longest_s(cost_s) >= 1e-3 * (1 - 1e-9)


@given(NUMBERS, TIMES, NUMBERS)
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


# ---------------------------------------------------------------------- a job that chooses it

HOURS = 1000.0
ANYTHING = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


def trained(is_auto: bool = True, **facts: Any) -> m.Job:
    """Return a job that trains with four workers on the hosts a and b, at step 60."""
    spacing = Spacing(FIRST_STEPS, is_auto, HOURS, lead_s=6.0, told=FIRST_STEPS)
    job = laws.training("ab", spacing=spacing, left=9, newest=60, **facts)
    assert job.current is not None
    workers = (("a", 2), ("b", 2))
    return replace(job, current=replace(job.current, workers=workers), now=0.0)


def made(job: m.Job, measured: SnapshotCost | None, number: int = 7) -> tuple[m.Job, list[str]]:
    """Return the job behind a snapshot on the way, and what is said."""
    job, due = advance(job, events.SnapshotJudged(("a", "b"), 50, number, measured))
    return job, [action.text for action in due if isinstance(action, actions.Say)]


def ticked(job: m.Job, at: float, newest: int) -> tuple[m.Job, list[Any]]:
    job, due = advance(job, events.Ticked(at, newest, {}))
    return job, [e for e in map(ordered, due) if isinstance(e, commands.Space | actions.Say)]


def test_until_one_is_measured_a_default_holds_and_is_said() -> None:
    found, due = ticked(trained(), 10.0, 1)
    assert [each.text for each in due] == [
        "event=snapshot_every k=50 is assumed: what a snapshot costs is not measured yet"
    ]
    assert not ticked(found, 11.0, 2)[1], "once"


def test_what_is_measured_is_said_with_the_number_and_told_ahead_of_time() -> None:
    found, said = made(trained(), SnapshotCost(2.0, 3.0, 1.0))
    assert said == [
        "event=snapshot_every k=632 cost_s=2.000 step_s=3 mtbf_s=900000 interval_s=1897"
    ]
    found, due = ticked(found, 10.0, 60)
    assert due == [commands.Space(1, 60 + 2 + 2, 632)], "6 s are two steps"
    assert not ticked(found, 11.0, 61)[1], "once"


def test_a_little_change_is_neither_told_nor_said() -> None:
    found, _ = made(trained(), SnapshotCost(2.0, 3.0, 1.0))
    found, _ = ticked(found, 10.0, 60)
    found, said = made(found, SnapshotCost(2.2, 3.1, 1.0), 8)
    assert not said and found.spacing.every == 632 and not ticked(found, 11.0, 61)[1]


def test_what_stays_as_it_was_is_said_once_with_its_reasons() -> None:
    found, said = made(trained(), SnapshotCost(0.02, 4.0, 1.0))
    assert said and "k=50 " in said[0] and not ticked(found, 10.0, 60)[1]
    assert not made(found, SnapshotCost(0.02, 4.0, 1.0), 8)[1]


def test_who_said_a_number_keeps_it() -> None:
    found, said = made(trained(is_auto=False), SnapshotCost(2.0, 3.0, 1.0))
    assert not said and not ticked(found, 10.0, 60)[1] and found.spacing.every == FIRST_STEPS


@pytest.mark.fault
@pytest.mark.parametrize("bad", [nan, inf, -1.0, None])
def test_what_is_no_number_is_not_believed(bad: float | None) -> None:
    found, _ = made(trained(), SnapshotCost(2.0, 3.0, 1.0))
    before = found.spacing
    found, said = made(found, SnapshotCost(bad, bad, bad), 8)
    assert not said and found.spacing == before
    first, said = made(trained(), SnapshotCost(bad, bad, bad))
    assert not said and first.spacing.every == FIRST_STEPS


@pytest.mark.fault
def test_a_cost_of_nothing_leaves_time_between_snapshots() -> None:
    found, _ = made(trained(), SnapshotCost(0.0, 0.5, 0.1))
    assert found.spacing.every == 20, "10 s"


def test_a_snapshot_has_time_for_its_replicas() -> None:
    before = respacing.replicated(trained(), 30.0)
    found, _ = made(before, SnapshotCost(0.0, 1.0, 2.0))
    assert found.spacing.every == 4 * 32


@pytest.mark.fault
def test_one_that_is_far_off_changes_nothing_and_a_lasting_change_does() -> None:
    found, _ = made(trained(), SnapshotCost(2.0, 3.0, 1.0))
    for number in (8, 9):
        found, _ = made(found, SnapshotCost(2.0, 3.0, 1.0), number)
    found, said = made(found, SnapshotCost(900.0, 90.0, 1.0), 10)
    assert not said
    for number in range(11, 11 + KEPT):
        found, _ = made(found, SnapshotCost(2.0, 30.0, 1.0), number)
    assert found.spacing.every == 63


@pytest.mark.fault
def test_a_round_that_starts_again_keeps_what_was_learned_and_counts_the_failure() -> None:
    learned, _ = respacing.measured(trained(), SnapshotCost(2.0, 3.0, 1.0))
    every = learned.spacing.every
    learned, _ = ticked(learned, 1.0, 60)
    learned, _ = ticked(learned, 3601.0, 70)
    assert learned.spacing.worker_s == pytest.approx(3600 * 4)
    job, _ = advance_all(learned, *told("a", reports.WorkersFailed(1, "rank 1 died")))
    done: list[actions.Action] = []
    job = until(job, m.Phase.RUNNING, done)
    assert job.spacing.failures == 1
    assert job.spacing.costs == (2.0,) and job.spacing.every < every
    (start,) = [each for each in done if isinstance(each, actions.StartRound)]
    assert start.every == job.spacing.every == job.spacing.told


def test_workers_that_were_built_before_a_choice_are_told() -> None:
    before = trained()
    standing_by = respacing.built(before)
    learned, _ = made(standing_by, SnapshotCost(2.0, 3.0, 1.0))
    begun = respacing.started(learned, is_built=True)
    assert begun.spacing.told == FIRST_STEPS
    assert any(isinstance(ordered(each), commands.Space) for each in ticked(begun, 10.0, 60)[1])
    assert respacing.started(learned, is_built=False).spacing.told == learned.spacing.every


@pytest.mark.parametrize("is_auto", [True, False])
def test_who_asks_for_a_snapshot_gets_one_and_the_usual_interval_returns(is_auto: bool) -> None:
    """Also in the durable directory, whose turn would come later."""
    job, _ = ticked(trained(is_auto, archive_every_s=1800.0), 10.0, 60)
    job, due = advance(job, events.SnapshotAsked(11.0))
    orders: list[Any] = [e for e in map(ordered, due) if isinstance(e, commands.Space)]
    (order,) = orders
    assert order.begin > 60 and 0 < order.every < FIRST_STEPS
    assert not advance(job, events.SnapshotAsked(11.5))[1], "one at a time"
    job, said = ticked(job, 12.0, 61)
    assert not said, "the others have yet to hear of it"
    first = events.SnapshotJudged(("a", "b"), order.begin, 7, None)
    assert advance(job, first)[0].spacing.asked is not None, "an earlier one does not count"
    later = events.SnapshotJudged(("a", "b"), order.begin + order.every, 8, None)
    job, _ = advance(job, later)
    assert job.copies.archive_at == job.now
    job, said = ticked(job, 13.0, order.begin + order.every)
    (back,) = [each for each in said if isinstance(each, commands.Space)]
    assert back.every == FIRST_STEPS and back.begin > order.begin
    assert not [e for e in ticked(job, 14.0, 99)[1] if isinstance(e, commands.Space)]


@pytest.mark.fault
def test_a_stop_fulfils_a_request_and_a_new_coordinator_forgets_it() -> None:
    job, _ = advance(trained(is_auto=False), events.SnapshotAsked(11.0))
    assert respacing.started(job, is_built=False).spacing.told == FIRST_STEPS
    begun = respacing.started(job, is_built=False)
    assert begun.spacing.asked is None and begun.copies.archive_at == job.now
    adopted = respacing.adopted(trained(is_auto=False), {job.spacing.told})
    (back,) = [e for e in ticked(adopted, 12.0, 61)[1] if isinstance(e, commands.Space)]
    assert back.every == FIRST_STEPS


def test_nobody_is_told_during_a_stop() -> None:
    found, _ = made(trained(), SnapshotCost(2.0, 3.0, 1.0))
    stopping = replace(found, phase=m.Phase.PREPARING, awaited=frozenset("ab"))
    stopping, due = ticked(stopping, 10.0, 60)
    assert not due and stopping.spacing.counted_at is None
    assert ticked(replace(stopping, phase=m.Phase.RUNNING), 11.0, 60)[1]


@given(
    st.lists(st.builds(SnapshotCost, ANYTHING, ANYTHING, ANYTHING), max_size=8),
    st.integers(0, 5000),
)
def test_whatever_is_measured_the_number_is_sensible(
    found: list[SnapshotCost], workers: int
) -> None:
    spacing = Spacing(FIRST_STEPS, True)
    for each in found:
        spacing = spacing.with_measured(each)
    choice = spacing.chosen(workers)
    assert choice is None or 1 <= choice.every <= MOST_STEPS
    assert 2 <= spacing.lead(0.0) and len(spacing.costs) <= KEPT


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [(50, 50, False), (50, 62, False), (50, 63, True), (1, 2, True), (0, 1, False), (63, 50, True)],
)
def test_near_numbers_are_one(one: int, other: int, differ: bool) -> None:
    assert is_noticeable(one, other) is differ and is_noticeable(other, one) is differ
