"""How many steps lie between the snapshots of a job that chooses them: from what it measures, for
all workers alike, through failures and changes."""

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
    MOST_STEPS,
    SnapshotCost,
    Spacing,
    is_noticeable,
)
from scalai.core.messages import actions, commands, events, reports
from support.law_words import ordered
from support.membership_jobs import rounds
from support.membership_simulation import Simulation, job

HOURS = 1000.0
ANYTHING = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


def trained(is_auto: bool = True, **settings: Any) -> Simulation:
    """Return a job that trains with two workers on each of the hosts a and b."""
    spacing = Spacing(FIRST_STEPS, is_auto, HOURS, lead_s=6.0)
    simulation = Simulation(job(max_hosts=2, left=9, spacing=spacing, **settings))
    for name in "ab":
        simulation.join(name, 2)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    # What was counted and said on the way there is of no interest.
    simulation.job = replace(simulation.job, spacing=replace(spacing, told=FIRST_STEPS))
    return simulation


def made(job: m.Job, measured: SnapshotCost | None, number: int = 7) -> tuple[m.Job, list[str]]:
    """Return the job behind a snapshot on the way, and what is said."""
    job, due = advance(job, events.SnapshotJudged(("a", "b"), 50, number, measured))
    return job, [action.text for action in due if isinstance(action, actions.Say)]


def ticked(job: m.Job, at: float, newest: int) -> tuple[m.Job, list[Any]]:
    job, due = advance(job, events.Ticked(at, newest, {}))
    return job, [e for e in map(ordered, due) if isinstance(e, commands.Space | actions.Say)]


def test_until_one_is_measured_a_default_holds_and_is_said() -> None:
    found, due = ticked(trained().job, 10.0, 1)
    assert [each.text for each in due] == [
        "event=snapshot_every k=50 is assumed: what a snapshot costs is not measured yet"
    ]
    assert not ticked(found, 11.0, 2)[1], "once"


def test_what_is_measured_is_said_with_the_number_and_told_ahead_of_time() -> None:
    found, said = made(trained().job, SnapshotCost(2.0, 3.0, 1.0))
    assert said == [
        "event=snapshot_every k=632 cost_s=2.000 step_s=3 mtbf_s=900000 interval_s=1897"
    ]
    found, due = ticked(found, 10.0, 60)
    assert due == [commands.Space(1, 60 + 2 + 2, 632)], "6 s are two steps"
    assert not ticked(found, 11.0, 61)[1], "once"


def test_a_little_change_is_neither_told_nor_said() -> None:
    found, _ = made(trained().job, SnapshotCost(2.0, 3.0, 1.0))
    found, _ = ticked(found, 10.0, 60)
    found, said = made(found, SnapshotCost(2.2, 3.1, 1.0), 8)
    assert not said and found.spacing.every == 632 and not ticked(found, 11.0, 61)[1]


def test_what_stays_as_it_was_is_said_once_with_its_reasons() -> None:
    found, said = made(trained().job, SnapshotCost(0.02, 4.0, 1.0))
    assert said and "k=50 " in said[0] and not ticked(found, 10.0, 60)[1]
    assert not made(found, SnapshotCost(0.02, 4.0, 1.0), 8)[1]


def test_who_said_a_number_keeps_it() -> None:
    found, said = made(trained(is_auto=False).job, SnapshotCost(2.0, 3.0, 1.0))
    assert not said and not ticked(found, 10.0, 60)[1] and found.spacing.every == FIRST_STEPS


@pytest.mark.fault
@pytest.mark.parametrize("bad", [nan, inf, -1.0, None])
def test_what_is_no_number_is_not_believed(bad: float | None) -> None:
    found, _ = made(trained().job, SnapshotCost(2.0, 3.0, 1.0))
    before = found.spacing
    found, said = made(found, SnapshotCost(bad, bad, bad), 8)
    assert not said and found.spacing == before
    first, said = made(trained().job, SnapshotCost(bad, bad, bad))
    assert not said and first.spacing.every == FIRST_STEPS


@pytest.mark.fault
def test_a_cost_of_nothing_leaves_time_between_snapshots() -> None:
    found, _ = made(trained().job, SnapshotCost(0.0, 0.5, 0.1))
    assert found.spacing.every == 20, "10 s"


def test_a_snapshot_has_time_for_its_replicas() -> None:
    before = respacing.replicated(trained().job, 30.0)
    found, _ = made(before, SnapshotCost(0.0, 1.0, 2.0))
    assert found.spacing.every == 4 * 32


@pytest.mark.fault
def test_one_that_is_far_off_changes_nothing_and_a_lasting_change_does() -> None:
    found, _ = made(trained().job, SnapshotCost(2.0, 3.0, 1.0))
    for number in (8, 9):
        found, _ = made(found, SnapshotCost(2.0, 3.0, 1.0), number)
    found, said = made(found, SnapshotCost(900.0, 90.0, 1.0), 10)
    assert not said
    for number in range(11, 11 + KEPT):
        found, _ = made(found, SnapshotCost(2.0, 30.0, 1.0), number)
    assert found.spacing.every == 63


@pytest.mark.fault
def test_a_round_that_starts_again_keeps_what_was_learned_and_counts_the_failure() -> None:
    simulation = trained()
    learned, _ = respacing.measured(simulation.job, SnapshotCost(2.0, 3.0, 1.0))
    every = learned.spacing.every
    learned, _ = ticked(learned, simulation.now + 1.0, 60)
    learned, _ = ticked(learned, simulation.now + 3601.0, 70)
    assert learned.spacing.worker_s == pytest.approx(3600 * 4)
    simulation.job, simulation.now = learned, simulation.now + 3601.0
    simulation.feed(
        events.Reported("a", reports.WorkersFailed(simulation.job.round, "rank 1 died"))
    )
    simulation.settle()
    after = simulation.job
    assert after.phase is m.Phase.RUNNING and after.spacing.failures == 1
    assert after.spacing.costs == (2.0,) and after.spacing.every < every
    assert rounds(simulation)[-1].every == after.spacing.every == after.spacing.told


def test_workers_that_were_built_before_a_choice_are_told() -> None:
    before = trained().job
    standing_by = respacing.built(before)
    learned, _ = made(standing_by, SnapshotCost(2.0, 3.0, 1.0))
    begun = respacing.started(learned, is_built=True)
    assert begun.spacing.told == FIRST_STEPS
    assert any(isinstance(ordered(each), commands.Space) for each in ticked(begun, 10.0, 60)[1])
    assert respacing.started(learned, is_built=False).spacing.told == learned.spacing.every


def test_nobody_is_told_during_a_stop() -> None:
    found, _ = made(trained().job, SnapshotCost(2.0, 3.0, 1.0))
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
