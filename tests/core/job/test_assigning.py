"""The next assignment: hosts change places at a change and at nothing else, and what would run if
hosts came or went is known ahead."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from scalai.core.degrees.assignment import make_assign
from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits
from scalai.core.degrees.policy import DegreePolicy
from scalai.core.job import membership as m
from scalai.core.job.assigning import NEWCOMER, changes_ahead, next_assignment, plans_ahead
from scalai.core.job.membership import Phase
from scalai.core.messages import commands, events, reports
from scalai.core.planner.columns import OPTIMIZER
from scalai.core.planner.placement import make_place
from support.laws import (
    advance_all,
    assign_all,
    generations,
    joined,
    kinds,
    made,
    ran,
    ticked,
    told,
    training,
    until,
)


@dataclass
class Placing:
    """Puts hosts in the order of their names, last ones first, and notes what it was asked."""

    asked: list[tuple[m.Assignment, m.Assignment]] = field(default_factory=list)
    is_reversed: bool = True

    def __call__(
        self, target: m.Assignment, ran: m.Assignment, slots: tuple[tuple[str, int], ...]
    ) -> m.Assignment:
        self.asked.append((target, ran))
        workers = tuple(sorted(target.workers, reverse=self.is_reversed))
        return replace(target, workers=workers, reason="placed")


def grown(place: m.Place, **facts: Any) -> m.Job:
    """Return the job on a and b once it stops, to grow by c."""
    job = training("ab", **{"max_hosts": 3, "place": place, **facts})
    return until(advance_all(job, joined(job, "c"))[0], Phase.STARTING)


def hosts_of(job: m.Job) -> tuple[str, ...]:
    assert job.current is not None
    return job.current.active


def test_a_job_begins_in_the_order_of_joining_and_changes_to_the_better_one() -> None:
    place = Placing()
    job = made(assign=assign_all(), max_hosts=2, place=place)
    job, _ = advance_all(job, joined(job, "b"), joined(job, "a"))
    assert hosts_of(job) == ("b", "a") and not place.asked, "without a state"
    job = grown(place)
    assert hosts_of(job) == ("c", "b", "a")
    assert job.current is not None and job.current.reason == "placed"
    target, before = place.asked[-1]
    assert [name for name, _ in target.workers] == ["a", "b", "c"]
    assert before.workers == (("a", 1), ("b", 1))


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_job_that_runs_or_what_has_failed_is_not_tried_again_in_another_order(
    has_failed: bool,
) -> None:
    place = Placing()
    job = grown(place, left=3)
    if has_failed:
        job, _ = advance_all(job, *told("c", reports.WorkersFailed(job.round, "KeyError")))
    job = until(job, Phase.RUNNING)
    assert hosts_of(job) == (("a", "b") if has_failed else ("c", "b", "a")), "or what ran"
    place.is_reversed = False
    job, due = advance_all(job, events.Rescaled(job.settings.assign, job.now))
    assert job.phase is Phase.RUNNING and not kinds(due)


def test_workers_that_stand_by_begin_where_they_were_built() -> None:
    place = Placing()
    job = training("ab", max_hosts=3, place=place, build_timeout_s=30.0)
    job, _ = advance_all(job, joined(job, "c"))
    assert job.phase is Phase.BUILDING
    place.is_reversed = False  # more is known of the state by the time of the stop
    job = until(job, Phase.STARTING)
    assert job.attempt.was_standby and hosts_of(job) == ("c", "b", "a")
    assert job.current is not None and job.current.reason == "placed"


def test_a_host_that_has_lost_its_memory_holds_nothing() -> None:
    place = Placing()
    job = training("ab", max_hosts=3, place=place)
    job, _ = advance_all(job, events.HostLost("a", generations("b", 2), job.now))
    again = events.HostJoined("a", 1, generations("b", 2), False, job.now)
    job, _ = advance_all(job, again, joined(job, "c"))  # a new machine of that name
    place.asked.clear()
    assert next_assignment(job) is not None
    assert [before.workers for _, before in place.asked] == [((m.LOST, 1), ("b", 1))]


def test_the_host_that_stays_keeps_its_ranks() -> None:
    place, two = make_place(None, lambda world_size: OPTIMIZER), assign_all(2, (2,))
    job = training("ab", max_hosts=3, place=place, assign=two)
    job, due = advance_all(job, joined(job, "c"))
    assert commands.Prepare not in kinds([*due, *ticked(job)[1]])
    job = until(advance_all(job, events.HostLeaving("a", job.now))[0], Phase.STARTING)
    assert hosts_of(job) == ("c", "b")
    assert job.current is not None and "of what is wanted crosses" in job.current.reason


# ---------------------------------------------------------------------- what would run

FOUR = tuple((name, 2) for name in "abcd")


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (0, []),
        (1, ["one more"]),
        (2, ["one less", "one more"]),
        (3, ["one less", "two less", "one more"]),
        (4, ["one less", "two less", "one more"]),
        (8, ["one less", "two less", "half", "one more"]),
    ],
)
def test_each_number_of_hosts_is_looked_at_once(count: int, names: list[str]) -> None:
    hosts = tuple((str(number), 2) for number in range(count))
    found = list(changes_ahead(hosts))
    assert [name for name, _ in found] == names
    assert len({len(there) for _, there in found}) == len(found)


def test_where_nothing_is_valid_it_says_so() -> None:
    assign = make_assign(
        ModelLimits(num_attention_heads=8, global_batch_size=8, micro_batch_size=1),
        DegreePolicy(initial=DegreeRequest(4, 1)), min_hosts=1, max_hosts=8,
    )  # fmt: skip
    plans = dict(plans_ahead(assign, FOUR[:2], ran(Degrees(4, 1, 1))))
    assert plans["one less"] is None
    more = plans["one more"]
    assert more is not None
    assert more.workers[-1] == (NEWCOMER, 0), "six ranks hold one replica of four"
    assert more.degrees == Degrees(4, 1, 1)


def test_what_is_looked_at_ahead_may_have_uneven_shares_and_stages() -> None:
    limits = ModelLimits(
        num_layers=7, global_batch_size=8, micro_batch_size=1, has_uneven_shares=True,
        has_uneven_stages=True,
    )  # fmt: skip
    policy = DegreePolicy(initial=DegreeRequest(1, 2))
    assign = make_assign(limits, policy, min_hosts=1, max_hosts=8)
    plans = dict(plans_ahead(assign, FOUR, ran(Degrees(1, 2, 4))))
    assert {name: plan and plan.degrees for name, plan in plans.items()} == {
        "one less": Degrees(1, 2, 3), "two less": Degrees(1, 2, 2), "one more": Degrees(1, 2, 4),
    }  # fmt: skip


def test_what_was_chosen_is_known_when_another_host_of_its_kind_goes() -> None:
    asked = []

    class Counting(DegreePolicy):
        def rule(self, world_size: int, from_world_size: int | None) -> None:
            asked.append(world_size)

    assign = make_assign(
        ModelLimits(), Counting(initial=DegreeRequest(1, 1)), min_hosts=1, max_hosts=8
    )
    present = ran(Degrees(1, 1, 8))
    list(plans_ahead(assign, FOUR, present))
    before = len(asked)
    assert assign(tuple(host for host in FOUR if host[0] != "b"), present) is not None
    assert len(asked) == before
