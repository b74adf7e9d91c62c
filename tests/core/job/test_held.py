"""The rules of membership: a change waits for a save of the training's own that is in flight."""

import pytest

from scalai.core.job import membership as m
from scalai.core.job.deadlines import ANSWER_S
from scalai.core.messages import actions, events, reports
from support.membership_choice import assign_all
from support.membership_jobs import rounds, two_hosts, until
from support.membership_simulation import Simulation


def texts(simulation: Simulation) -> list[str]:
    kinds = actions.Say
    return [action.text for action in simulation.logged if isinstance(action, kinds)]


def saving(silent: str = "") -> Simulation:
    """Return a job of two hosts that saves, and that was asked for another size."""
    simulation = two_hosts(build_timeout_s=0.0)
    simulation.train(5)
    for host in simulation.hosts.values():
        host.is_silent = host.name == silent
    simulation.begin_save()
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    simulation.deliver()
    return simulation


@pytest.mark.fault
def test_a_change_waits_for_a_save_however_long_it_takes_and_loses_nobody() -> None:
    simulation = saving()
    for _ in range(40):
        simulation.tick(ANSWER_S / 2)
        simulation.deliver()
    assert simulation.job.phase is m.Phase.PREPARING and set(simulation.hosts) == {"a", "b"}
    assert set(simulation.job.stop.held) == {"a", "b"}, "a person can see for what it waits"
    simulation.end_save()
    simulation.settle()
    last = rounds(simulation)[-1]
    assert last.assignment.degrees.world_size == 2 and last.steps_lost == 0
    assert not simulation.job.stop.held and simulation.job.budget.left == 3


@pytest.mark.fault
def test_a_host_that_does_not_answer_is_lost_all_the_same() -> None:
    simulation = saving(silent="b")
    simulation.pass_time(4 * ANSWER_S, ANSWER_S / 2)
    assert set(simulation.hosts) == {"a"}


@pytest.mark.fault
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_save_that_begins_on_the_way_to_a_stop_puts_it_off(first: str) -> None:
    simulation = two_hosts(build_timeout_s=0.0)
    simulation.train(5)
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.DRAINING)
    stop = simulation.job.stop.step
    simulation.begin_save()
    simulation.answer(first)
    assert simulation.job.phase is m.Phase.PREPARING and simulation.job.stop.step > stop
    assert f"the stop at step {stop} is put off" in texts(simulation)[-1]
    simulation.deliver()
    assert not any(host.stands for host in simulation.hosts.values()), "they train on"
    assert simulation.job.change.withdrawn == 0 and not simulation.snapshots
    simulation.end_save()
    simulation.settle()
    last = rounds(simulation)[-1]
    assert last.assignment.degrees.world_size == 2 and last.steps_lost == 0


def test_workers_that_die_while_a_change_waits_are_a_failure_as_ever() -> None:
    simulation = saving()
    simulation.feed(events.Reported("a", reports.WorkersFailed(simulation.job.round, "killed")))
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and not simulation.job.stop.held
    assert simulation.job.budget.left == 2


def test_what_is_told_of_another_stop_is_no_news() -> None:
    simulation = saving()
    before = simulation.job
    simulation.feed(
        events.Reported("a", reports.Held(before.round, before.stop.step + 1, "of another"))
    )
    simulation.feed(
        events.Reported("a", reports.Held(before.round + 1, before.stop.step, "of another"))
    )
    assert simulation.job == before


def test_a_request_that_is_taken_back_while_the_change_waits_for_a_save_costs_no_round() -> None:
    simulation = saving()
    assert simulation.job.phase is m.Phase.PREPARING and simulation.job.stop.held
    before = len(rounds(simulation))
    simulation.feed(events.Rescaled(assign_all(), simulation.now))
    assert simulation.job.phase is m.Phase.RUNNING and not simulation.job.stop.held
    simulation.settle()
    simulation.end_save()
    simulation.settle()
    simulation.pass_time(2 * ANSWER_S, ANSWER_S / 2)
    assert len(rounds(simulation)) == before and simulation.job.phase is m.Phase.RUNNING
    simulation.train(5)
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    simulation.settle()
    last = rounds(simulation)[-1]
    assert last.assignment.degrees.world_size == 2 and last.steps_lost == 0, "a later one is met"


def test_an_idle_host_that_leaves_again_while_its_change_waits_for_a_save_is_let_go() -> None:
    simulation = two_hosts(build_timeout_s=0.0, max_hosts=3)
    simulation.train(5)
    simulation.begin_save()
    simulation.join("c", 2)
    simulation.pass_time(ANSWER_S, ANSWER_S / 2)
    assert simulation.job.phase is m.Phase.PREPARING and simulation.job.stop.held
    before = len(rounds(simulation))
    simulation.feed(events.HostLeaving("c", simulation.now))
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and set(simulation.job.hosts) == {"a", "b"}
    assert len(rounds(simulation)) == before
