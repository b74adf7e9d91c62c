"""The rules of membership: hosts that hear the coordinator, and not each other."""

from dataclasses import replace

import pytest

from scalai.core.job import membership as m
from scalai.core.job.assigning import members_of, next_assignment
from scalai.core.job.fitness import MOST_EXACT, all_hear, largest_hearing
from scalai.core.job.membership import active
from scalai.core.messages import actions, commands, events, reports
from support.law_jobs import but
from support.membership_choice import assign_all
from support.membership_jobs import rounds
from support.membership_simulation import Simulation, job

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


def three_hosts(**settings: object) -> Simulation:
    """Return a running job on hosts a, b and c, whose start is stored."""
    simulation = Simulation(job(**{"start_timeout_s": 1800.0, "left": 1, **settings}))
    for name in "abc":
        simulation.join(name, 2)
    simulation.settle()
    simulation.snapshot()
    simulation.settle()
    assert active(simulation.job) == {"a", "b", "c"}
    return simulation


def cut(simulation: Simulation, *names: str) -> None:
    simulation.cut.add(frozenset(names))


def said(simulation: Simulation, text: str) -> list[str]:
    lines = (a.text for a in simulation.logged if isinstance(a, actions.Say))
    return [line for line in lines if text in line]


@pytest.mark.parametrize("is_hang", [True, False], ids=["it hangs", "a worker dies of it"])
def test_where_two_hosts_do_not_hear_each_other_the_others_and_one_of_them_go_on(
    is_hang: bool,
) -> None:
    """The assignment that ran is not tried until the restarts are used up."""
    simulation = three_hosts(hang_s=300.0 if is_hang else 0.0, left=2)
    cut(simulation, "b", "c")
    begun = len(rounds(simulation))
    if not is_hang:
        simulation.feed(
            events.Reported("b", reports.WorkersFailed(simulation.job.round, "connection reset"))
        )
    simulation.pass_time(900.0, 10.0)
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a", "b"}
    assert len(rounds(simulation)) - begun <= 2 and simulation.job.budget.left >= 0
    assert said(simulation, "event=unheard b and c do not hear each other")
    assert set(simulation.job.hosts) == {"a", "b", "c"}, "the other one serves its store"


def test_nobody_waits_for_replicas_of_who_is_not_heard() -> None:
    """The next snapshot would wait for them, and the training for that."""
    simulation = three_hosts(replicas=1)
    cut(simulation, "b", "c")
    simulation.feed(
        events.Reported("b", reports.WorkersFailed(simulation.job.round, "connection reset"))
    )
    simulation.pass_time(200.0, 10.0)
    for taking_part in (("a", "b"), ("a", "b", "c")):
        simulation.train(3)
        simulation.snapshot()
        simulation.pass_time(60.0, 10.0)
        made = [a.hosts for a in simulation.logged if isinstance(a, actions.MakeReplicas)]
        assert made[-1] == taking_part
        simulation.join_links()
        simulation.pass_time(3600.0, 10.0)


def test_who_is_heard_again_takes_part_again() -> None:
    simulation = three_hosts()
    cut(simulation, "b", "c")
    simulation.feed(
        events.Reported("b", reports.WorkersFailed(simulation.job.round, "connection reset"))
    )
    simulation.pass_time(300.0, 10.0)
    made = len(rounds(simulation))
    simulation.pass_time(3600.0, 10.0)
    assert len(rounds(simulation)) == made, "it is not tried before it is heard"
    simulation.join_links("b", "c")
    simulation.pass_time(7200.0, 10.0)
    assert active(simulation.job) == {"a", "b", "c"} and not simulation.job.health.links.unheard


def test_a_host_that_comes_and_is_not_heard_by_all_costs_no_step() -> None:
    """It is found out while the present workers train."""
    simulation = three_hosts(max_hosts=4, build_timeout_s=300.0)
    cut(simulation, "d", "b")
    simulation.join("d", 2)
    made = len(rounds(simulation))
    simulation.pass_time(900.0, 10.0)
    assert len(rounds(simulation)) == made and active(simulation.job) == {"a", "b", "c"}
    assert not [action for action in simulation.logged if isinstance(action, commands.Prepare)]
    simulation.join_links()
    simulation.pass_time(3600.0, 10.0)
    assert active(simulation.job) == {"a", "b", "c", "d"}


@pytest.mark.parametrize("build_timeout_s", [300.0, 0.0])
def test_no_larger_host_takes_the_place_of_one_that_trains_and_does_not_hear_it(
    build_timeout_s: float,
) -> None:
    """It could not fetch the state."""
    simulation = Simulation(job(max_hosts=2, build_timeout_s=build_timeout_s))
    simulation.join("a", 2)
    simulation.pass_time(100.0, 10.0)
    simulation.snapshot()
    simulation.settle()
    assert active(simulation.job) == {"a"}
    cut(simulation, "a", "b")
    simulation.join("b", 4)
    simulation.pass_time(2000.0, 10.0)
    assert simulation.job.health.links.unheard and active(simulation.job) == {"a"}
    assert {each.assignment.active for each in rounds(simulation)} <= {("a",), ("a", "b")}
    simulation.join_links()
    simulation.pass_time(7200.0, 10.0)
    assert active(simulation.job) == {"a", "b"}


def test_such_a_host_costs_no_restart_where_nothing_is_built_beside_the_training() -> None:
    simulation = three_hosts(max_hosts=4, left=0)
    cut(simulation, "d", "b")
    simulation.join("d", 2)
    simulation.pass_time(900.0, 10.0)
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a", "b", "c"}
    assert simulation.job.budget.left == 0 and not simulation.job.change.failed


def test_a_link_that_comes_and_goes_holds_the_others_up_less_and_less() -> None:
    simulation = three_hosts(left=1)
    for _ in range(4):
        cut(simulation, "b", "c")
        simulation.feed(
            events.Reported(
                "b", reports.WorkersFailed(simulation.job.round, "reset", is_chance=True)
            )
        )
        simulation.job = but(simulation.job, left=1)
        simulation.pass_time(200.0, 10.0)
        simulation.join_links()
        simulation.pass_time(120.0, 10.0)
    assert said(simulation, "host c was lost or failed to join 3 times")
    assert said(simulation, "the others go on without it for 120 s")
    simulation.pass_time(3600.0, 10.0)
    assert active(simulation.job) == {"a", "b", "c"}


def test_a_first_start_goes_on_without_who_is_not_heard() -> None:
    simulation = Simulation(job(max_hosts=3, start_timeout_s=100.0, is_loss_free=True))
    cut(simulation, "a", "b")
    for name in "abc":
        simulation.join(name, 2)
    simulation.pass_time(300.0, 10.0)
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a", "c"}


def test_where_nothing_fits_without_one_of_them_it_is_tried_and_its_end_names_them() -> None:
    simulation = Simulation(job(max_hosts=2, start_timeout_s=100.0, assign=assign_all(minimum=2)))
    cut(simulation, "a", "b")
    for name in "ab":
        simulation.join(name, 2)
    simulation.pass_time(3600.0, 10.0)
    (ended,) = simulation.exits
    assert ended.code == 1 and "a and b do not hear each other" in ended.reason
    assert len(rounds(simulation)) == 4


def test_where_one_needs_what_only_the_other_holds_who_hears_both_goes_on() -> None:
    """Its rounds fail with any host that does not hear the holder, and none is tried twice."""
    simulation = three_hosts()
    ran = simulation.job.current
    assert ran is not None
    links = replace(simulation.job.health.links, unheard=pairs("ac"))
    found = but(simulation.job, links=links, ran=ran)
    for names in ("ab", "a"):
        target = next_assignment(found)
        assert target is not None and "".join(sorted(target.active)) == names
        failed = m.FailedChange(target, members_of(found, target), "nobody holds it")
        found = but(found, failed=(*found.change.failed, failed))
    target = next_assignment(found)
    assert target is not None and target.active == ("b",)


def test_hosts_that_do_not_answer_hold_up_nobody() -> None:
    simulation = three_hosts(is_loss_free=True)
    cut(simulation, "b", "c")
    simulation.feed(
        events.Reported("b", reports.WorkersFailed(simulation.job.round, "connection reset"))
    )
    while simulation.job.phase is not m.Phase.STARTING:
        simulation.deliver()
    simulation.hosts["a"].is_silent = True
    simulation.pass_time(200.0, 10.0)
    assert frozenset("bc") in simulation.job.health.links.unheard
    simulation.heal()
    simulation.pass_time(200.0, 10.0)
    assert simulation.job.phase is m.Phase.RUNNING


def test_a_start_that_stands_still_twice_is_not_tried_again_where_fewer_can_go_on() -> None:
    """Nobody knows why: all hear each other."""
    simulation = three_hosts(start_timeout_s=100.0, left=3)
    simulation.cannot_meet.add(6)
    simulation.feed(events.Reported("b", reports.WorkersFailed(simulation.job.round, "died")))
    simulation.pass_time(900.0, 10.0)
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a", "b"}
    assert simulation.job.budget.left == 1
