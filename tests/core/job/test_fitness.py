"""Hosts that run no workers: those that fail their health check, and those that hear the
coordinator and not each other."""

from dataclasses import replace
from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.core.job.assigning import members_of, next_assignment
from scalai.core.job.deadlines import ANSWER_S
from scalai.core.job.fitness import MOST_EXACT, Links, all_hear, largest_hearing
from scalai.core.job.membership import Phase, active
from scalai.core.messages import actions, commands, events, reports
from scalai.core.messages.reports import HealthChecked
from support.laws import (
    advance_all,
    assign_all,
    at,
    but,
    generations,
    joined,
    kinds,
    lines,
    made,
    ordered,
    ticked,
    told,
    training,
    until,
)
from support.two_laws import Train

pytestmark = pytest.mark.fault


def pairs(text: str) -> frozenset[frozenset[str]]:
    return frozenset(frozenset(pair) for pair in text.split())


@pytest.mark.parametrize(
    ("hosts", "unheard", "kept"),
    [
        ("a2 b2 c2", "", "abc"),
        ("a2 b2 c2", "bc", "ab"),
        ("a2 b2 c4", "bc", "ac"),
        ("a2 b2 c2 d2", "ab ac ad", "bcd"),
        ("a2 b2 c2 d2", "ab bc cd", "ac"),
        ("a2 b2 c2 d2", "ac ad bc bd", "ab"),
        ("a2 b2 c2", "ab ac bc", "a"),
        ("a2 b2", "ab bx", "a"),
    ],
)
def test_the_largest_set_of_hosts_that_all_hear_each_other(
    hosts: str, unheard: str, kept: str
) -> None:
    slots = tuple((text[0], int(text[1:])) for text in hosts.split())
    assert "".join(name for name, _ in largest_hearing(slots, pairs(unheard))) == kept


def test_of_many_broken_links_the_hosts_with_the_most_are_left_out() -> None:
    """Two halves that hear only themselves, and one host that nobody hears."""
    slots = tuple((f"h{number}", 1) for number in range(2 * MOST_EXACT + 1))
    names = [name for name, _ in slots]
    left, right, alone = names[:MOST_EXACT], names[MOST_EXACT:-1], names[-1]
    unheard = frozenset(frozenset((one, other)) for one in left for other in right)
    unheard |= frozenset(frozenset((alone, name)) for name in names[:-1])
    kept = [name for name, _ in largest_hearing(slots, unheard)]
    assert all_hear(kept, unheard) and kept == left


def with_cut(job: m.Job, *unheard: str, **links: Any) -> m.Job:
    """Return the job once it knows pairs of hosts that do not hear each other."""
    return but(job, links=replace(Links(pairs(" ".join(unheard))), **links))


def stalled(job: m.Job) -> tuple[m.Job, actions.TryLinks]:
    """Return a start that stands still, and the order to knock at each other."""
    job, due = ticked(ticked(job)[0], 61.0)
    (tried,) = [each for each in due if isinstance(each, actions.TryLinks)]
    return job, tried


def starting(hosts: str = "abc", **facts: Any) -> m.Job:
    """Return a job whose workers start again after a failure."""
    job = training(hosts, **{"is_loss_free": True, **facts})
    job, _ = advance_all(job, *told("b", reports.WorkersFailed(1, "connection reset")))
    return until(job, Phase.STARTING)


def test_where_two_hosts_do_not_hear_each_other_the_others_and_one_of_them_go_on() -> None:
    """The other one serves its store, and no restart is paid for it."""
    job, tried = stalled(starting())
    assert tried.hosts == ("a", "b", "c")
    left = job.budget.left
    answered = told("a", reports.Knocked(tried.order, ()))
    answered += told("b", reports.Knocked(tried.order, ("c",)))
    answered += told("c", reports.Knocked(tried.order, ("b",)))
    job, due = advance_all(job, *answered)
    assert "event=unheard b and c do not hear each other" in lines(due)
    assert job.phase is Phase.STOPPING and job.budget.left == left
    job = until(job, Phase.RUNNING)
    assert active(job) == {"a", "b"} and set(job.hosts) == {"a", "b", "c"}


@pytest.mark.parametrize("is_hang", [True, False], ids=["it hangs", "a worker dies of it"])
def test_a_broken_link_costs_at_most_two_rounds(begin: Train, is_hang: bool) -> None:
    world = begin("abc", law={"left": 2, "hang_s": 300.0 if is_hang else 0.0})
    begun = len(world.rounds)
    world.broken.add(frozenset("bc"))
    if not is_hang:
        world.kill_worker("b", 2)
    world.settle(900.0)
    assert world.is_training() and len(world.active) == 2 and "a" in world.active
    assert len(world.rounds) - begun <= 2 and world.logged("b and c do not hear each other")


def test_hosts_that_do_not_answer_hold_up_nobody() -> None:
    job, tried = stalled(starting())
    job, _ = advance_all(job, *told("b", reports.Knocked(tried.order, ("c",))))
    job, _ = advance_all(job, *told("b", reports.Knocked(tried.order - 1, ("a",))))
    assert job.phase is Phase.STARTING
    job, _ = ticked(job, ANSWER_S + 1.0)
    assert job.phase is Phase.STOPPING and job.health.links.unheard == pairs("bc")


def test_nobody_waits_for_replicas_of_who_is_not_heard() -> None:
    """The next snapshot would wait for them, and the training for that."""
    job = but(training("ab", idle="c", replicas=1), assign=assign_all(allowed=(2, 3)))
    for unheard, hosts in ((("bc",), ("a", "b")), ((), ("a", "b", "c"))):
        _, due = ticked(with_cut(job, *unheard, again_at=1e9))
        made = [each.hosts for each in due if isinstance(each, actions.MakeReplicas)]
        assert made == [hosts]


def test_who_is_heard_again_takes_part_again() -> None:
    job = with_cut(training("ab", "c", max_hosts=3), "bc", again_at=200.0)
    job = but(job, assign=assign_all(allowed=(2, 3)))
    assert not kinds(ticked(job, 99.0)[1]), "it is not tried before it is heard"
    job, due = ticked(job, 100.0)
    assert due == [actions.TryLinks(("b", "c"), 1)]
    pauses = []
    for order in (1, 2, 3):
        job, _ = advance_all(job, *told("b", reports.Knocked(order, ("c",))))
        job, _ = advance_all(job, *told("c", reports.Knocked(order, ())))
        assert job.phase is Phase.RUNNING and job.health.links.unheard
        pauses.append(job.health.links.again_at - job.now)
        job, _ = ticked(job, pauses[-1])
    assert pauses == [60.0, 120.0, 240.0]
    job, due = advance_all(job, *told("bc", reports.Knocked(4, ())))
    assert "event=heard_again b and c hear each other again" in lines(due)
    assert active(until(job, Phase.RUNNING)) == {"a", "b", "c"}


def test_a_host_that_comes_and_is_not_heard_by_all_costs_no_step() -> None:
    """It is found out while the present workers train."""
    job = training("abc", max_hosts=4, build_timeout_s=300.0)
    job = but(job, assign=assign_all(allowed=(3, 4)))
    job, _ = advance_all(job, joined(job, "d"))
    job, tried = stalled(job)
    assert job.phase is Phase.BUILDING and tried.hosts == ("a", "b", "c", "d")
    job, due = advance_all(job, *told("d", reports.Knocked(tried.order, ("b",))))
    job, more = advance_all(job, *told("abc", reports.Knocked(tried.order, ())))
    assert job.phase is Phase.RUNNING and active(job) == {"a", "b", "c"}
    assert kinds([*due, *more]) == [commands.GiveUp]
    assert not kinds(ticked(with_cut(job, "bd", again_at=1e9), 900.0)[1])


def test_no_larger_host_takes_the_place_of_one_that_trains_and_does_not_hear_it() -> None:
    """It could not fetch the state."""
    job = training("a", max_hosts=2)
    job, _ = advance_all(job, joined(job, "b", 4))
    target = next_assignment(with_cut(job, "ab"))
    assert target is not None and target.active == ("a",)


def test_such_a_host_costs_no_restart_where_nothing_is_built_beside_the_training() -> None:
    job = training("abc", max_hosts=4, left=0)
    job, _ = advance_all(job, joined(job, "d"))
    job, tried = stalled(until(job, Phase.STARTING))
    job, _ = advance_all(job, *told("b", reports.Knocked(tried.order, ("d",))))
    job, _ = advance_all(job, *told("acd", reports.Knocked(tried.order, ())))
    job = until(job, Phase.RUNNING)
    assert active(job) == {"a", "b", "c"} and not job.change.failed and job.budget.left == 0


def test_a_link_that_comes_and_goes_holds_the_others_up_less_and_less() -> None:
    job = but(starting(), strikes={"c": (90.0, 95.0)}, quarantine_s=60.0)
    job, tried = stalled(job)
    job, due = advance_all(job, *told("b", reports.Knocked(tried.order, ("c",))))
    job, due = advance_all(job, *told("ac", reports.Knocked(tried.order, ())))
    assert "host c was lost or failed to join 3 times" in lines(due)
    assert "the others go on without it for 60 s" in lines(due)
    assert job.health.barred.keys() == {"c"}


def test_a_first_start_goes_on_without_who_is_not_heard() -> None:
    job = made(assign=assign_all(), max_hosts=3, is_loss_free=True)
    for name in "abc":
        job, _ = advance_all(job, joined(job, name))
    job, tried = stalled(job)
    job, _ = advance_all(job, *told("a", reports.Knocked(tried.order, ("b",))))
    job, _ = advance_all(job, *told("bc", reports.Knocked(tried.order, ())))
    job = until(but(job, generations=generations("abc", 1)), Phase.STARTING)
    assert active(job) == {"a", "c"}


def test_where_nothing_fits_without_one_of_them_it_is_tried_and_its_end_names_them() -> None:
    job = starting("ab", assign=assign_all(minimum=2), start_timeout_s=100.0, left=1)
    job, tried = stalled(job)
    job, _ = advance_all(job, *told("a", reports.Knocked(tried.order, ("b",))))
    job, _ = advance_all(job, *told("b", reports.Knocked(tried.order, ())))
    assert job.phase is Phase.STARTING
    _, due = ticked(job, 101.0)
    (ended,) = [each for each in due if isinstance(each, actions.EndJob)]
    assert ended.code == 1 and "a and b do not hear each other" in ended.reason


def test_where_one_needs_what_only_the_other_holds_who_hears_both_goes_on() -> None:
    """Its rounds fail with any host that does not hear the holder, and none is tried twice."""
    job = with_cut(training("abc"), "ac")
    for names in ("ab", "a"):
        target = next_assignment(job)
        assert target is not None and "".join(sorted(target.active)) == names
        failed = m.FailedChange(target, members_of(job, target), "nobody holds it")
        job = but(job, failed=(*job.change.failed, failed))
    target = next_assignment(job)
    assert target is not None and target.active == ("b",)


def test_a_start_that_stands_still_twice_is_not_tried_again_where_fewer_can_go_on() -> None:
    """Nobody knows why: all hear each other."""
    job, done = starting(start_timeout_s=50.0, left=3), list[actions.Action]()
    for _ in range(2):
        job, _ = ticked(ticked(job)[0], 51.0)
        job = until(job, Phase.STARTING, done)
    worlds = [a.assignment.degrees.world_size for a in done if isinstance(a, actions.StartRound)]
    assert worlds == [3, 2] and active(job) == {"a", "b"} and job.budget.left == 1


def test_what_a_host_does_not_hear_is_forgotten_with_its_agent() -> None:
    job = with_cut(at(Phase.STARTING), "ab")
    assert not advance_all(job, joined(job, "b"))[0].health.links.unheard
    lost = events.HostLost("b", job.states.generations, job.now)
    assert not advance_all(job, lost)[0].health.links.unheard


# ---------------------------------------------------------------------- health checks


def checked(hosts: str = "ab", **facts: Any) -> m.Job:
    """Return a job that trains on hosts of which b has a check."""
    job = training(hosts, **{"max_hosts": 2, "is_loss_free": True, **facts})
    return but(job, hosts={
        name: m.Host(name, 1, host.order, has_check=name == "b") for name, host in job.hosts.items()
    })  # fmt: skip


def asked(due: list[actions.Action]) -> list[commands.CheckHealth]:
    return [each for each in map(ordered, due) if isinstance(each, commands.CheckHealth)]


def failed() -> m.Job:
    """Return the job whose workers on b have failed, once they are gone."""
    job, due = advance_all(
        checked(), *told("b", reports.WorkersFailed(1, "killed", is_chance=True))
    )
    (order,) = asked(due)
    assert order.order == 1 and "killed" in order.reason
    return advance_all(job, *told("ab", reports.Stopped(1, 25)))[0]


def test_who_joins_and_passes_is_used_and_asked_once() -> None:
    job, due = advance_all(checked("a"), joined(checked("a"), "b", has_check=True))
    (order,) = asked(due)
    assert active(job) == {"a"} and "b" in job.health.checks
    job, due = advance_all(job, *told("b", HealthChecked(order.order, is_healthy=True)))
    job, more = ticked(job)
    assert not job.health.checks and not asked([*due, *more])
    assert active(until(job, Phase.RUNNING)) == {"a", "b"}


def test_who_fails_stays_idle_and_is_asked_again_later_each_time() -> None:
    job, due = advance_all(checked("a"), joined(checked("a"), "b", has_check=True))
    pauses = []
    for number in (1, 2, 3):
        sick = HealthChecked(number, is_healthy=False, reason="no device")
        job, due = advance_all(job, *told("b", sick))
        assert "host=b fails its health check (no device)" in lines(due)
        assert job.phase is Phase.RUNNING and active(job) == {"a"}
        pauses.append(job.health.checks["b"].again_at - job.now)
        assert not asked(ticked(job, pauses[-1] - 1.0)[1])
        job, due = ticked(job, pauses[-1])
        assert [each.order for each in asked(due)] == [number + 1]
    assert pauses == [30.0, 60.0, 120.0]
    job, _ = advance_all(job, *told("b", HealthChecked(4, is_healthy=True)))
    assert active(until(job, Phase.RUNNING)) == {"a", "b"}


@pytest.mark.parametrize(("is_healthy", "used"), [(True, "ab"), (False, "a")])
def test_a_host_whose_workers_failed_is_asked_and_used_again_where_it_passes_at_once(
    is_healthy: bool, used: str
) -> None:
    """Where it fails, the others train on without it, and it serves its store."""
    job, due = advance_all(failed(), *told("b", HealthChecked(1, is_healthy, "no device")))
    assert active(until(job, Phase.RUNNING)) == set(used) and "b" in job.hosts
    assert len([each for each in due if isinstance(each, actions.StartRound)]) == 1


def test_who_gives_no_answer_is_waited_for_for_a_moment_only() -> None:
    job = failed()
    assert job.phase is Phase.WAITING and ticked(job, 9.0)[0].phase is Phase.WAITING
    job = until(ticked(job, 11.0)[0], Phase.RUNNING)
    assert active(job) == {"a"}
    job, _ = advance_all(job, *told("b", HealthChecked(0, is_healthy=True)))
    assert "b" in job.health.checks, "that was the answer to an earlier check"
    job, _ = advance_all(job, *told("b", HealthChecked(1, is_healthy=True)))
    assert active(until(job, Phase.RUNNING)) == {"a", "b"}


def test_a_job_whose_only_host_fails_waits_for_it_and_says_so() -> None:
    job, _ = advance_all(
        checked("b", max_hosts=1), *told("b", reports.WorkersFailed(1, "killed", is_chance=True))
    )
    job, _ = advance_all(job, *told("b", reports.Stopped(1, 25)))
    job, due = advance_all(job, *told("b", HealthChecked(1, False, "no device")))
    assert job.phase is Phase.WAITING
    assert "host b fails its health check: no device" in lines(due)
    job, due = ticked(job, 31.0)
    job, _ = advance_all(job, *told("b", HealthChecked(2, is_healthy=True)))
    assert active(until(job, Phase.RUNNING)) == {"b"}


def test_the_hosts_that_others_have_waited_for_in_a_hang_are_asked() -> None:
    hung = {"a": reports.Stalled((0,), 25, 200.0), "b": reports.Stalled((1,), 24, 200.0)}
    _, due = advance_all(checked(hang_s=100.0), events.Ticked(101.0, 25, hung))
    (order,) = asked(due)
    assert "waited for its workers" in order.reason


def test_a_job_that_trains_does_not_stand_still_for_the_check_of_a_host_that_joins() -> None:
    job = checked("a", max_hosts=3)
    job, _ = advance_all(job, joined(job, "b", has_check=True), joined(job, "c"))
    job = until(ticked(job)[0], Phase.RUNNING)
    assert active(job) == {"a", "c"} and "b" in job.health.checks
