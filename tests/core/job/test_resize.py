"""The rules of membership: changes that were asked for."""

from dataclasses import replace
from itertools import pairwise

import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.job import membership as m
from scalai.core.job.membership import active, staying
from scalai.core.job.resize import advance
from scalai.core.messages import actions, commands, events, reports
from support.membership_choice import assign_all
from support.membership_jobs import rounds, two_hosts, until
from support.membership_simulation import Simulation, job


def test_a_full_job_starts_at_once_and_a_smaller_one_once_it_has_settled() -> None:
    simulation = Simulation(job(max_hosts=2))
    simulation.join("a", 2)
    assert simulation.job.phase is m.Phase.WAITING
    simulation.join("b", 2)
    assert simulation.job.phase is m.Phase.STARTING
    alone = Simulation(job(max_hosts=2))
    alone.join("a", 2)
    alone.tick(0.5)
    assert alone.job.phase is m.Phase.WAITING
    alone.tick(0.6)
    assert alone.job.phase is m.Phase.STARTING


def test_two_joins_within_the_settling_time_are_one_change() -> None:
    simulation = Simulation(job(max_hosts=4))
    simulation.join("a", 2)
    simulation.settle()
    simulation.join("b", 1)
    simulation.tick(0.5)
    simulation.join("c", 1)
    simulation.tick(0.8)
    assert simulation.job.phase is m.Phase.RUNNING
    simulation.settle()
    assert [r.assignment.degrees.world_size for r in rounds(simulation)] == [2, 4]


def test_the_first_host_may_drain_and_nothing_is_lost() -> None:
    simulation = two_hosts()
    simulation.train(7)
    simulation.feed(events.HostLeaving("a", simulation.now))
    simulation.settle()
    assert set(simulation.hosts) == {"b"} and simulation.job.phase is m.Phase.RUNNING
    last = rounds(simulation)[-1]
    assert last.assignment.active == ("b",) and last.steps_lost == 0
    assert simulation.job.budget.left == 3


def test_hosts_that_stay_keep_their_order() -> None:
    simulation = Simulation(job(max_hosts=3))
    for name in "cab":
        simulation.join(name, 2)
    simulation.settle()
    simulation.feed(events.HostLeaving("c", simulation.now))
    simulation.settle()
    simulation.join("c", 2)
    simulation.settle()
    assert [name for name, _ in staying(simulation.job)] == ["a", "b", "c"]


def test_an_idle_host_comes_and_goes_without_a_resize() -> None:
    simulation = Simulation(job(max_hosts=2, assign=assign_all(allowed=(2, 4))))
    simulation.join("a", 2)
    simulation.join("b", 1)
    simulation.settle()
    assert simulation.job.current is not None
    assert simulation.job.current.workers == (("a", 2), ("b", 0))
    simulation.feed(events.HostLeaving("b", simulation.now))
    simulation.settle()
    simulation.join("c", 1)
    simulation.settle()
    assert len(rounds(simulation)) == 1 and set(simulation.hosts) == {"a", "c"}


def test_a_stop_that_comes_too_late_is_taken_back_and_tried_with_more_margin() -> None:
    simulation = two_hosts()
    simulation.feed(events.HostLeaving("b", simulation.now))
    stops = [simulation.job.stop.step]
    for _ in range(3):
        for name in ("a", "b"):
            simulation.hosts[name].step = simulation.job.stop.step
            for _ in range(len(simulation.commands[name])):
                simulation.answer(name)
        stops.append(simulation.job.stop.step)
        # The hosts forget the old stop before they hear of the new one.
        assert isinstance(simulation.logged[-2], commands.Withdraw)
    assert [later - sooner for sooner, later in pairwise(stops)] == [2, 4, 8]
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and simulation.job.stop.margin == 1


def test_the_last_host_saves_to_the_durable_directory_and_the_job_is_resumable() -> None:
    simulation = two_hosts(has_durable_dir=True)
    simulation.feed(events.HostLeaving("a", simulation.now))
    simulation.feed(events.HostLeaving("b", simulation.now))
    simulation.settle()
    assert [(e.hosts, e.code) for e in simulation.exits] == [(("a", "b"), 75)]


@pytest.mark.parametrize("what", ["lost", "full"])
def test_a_part_that_is_not_saved_is_no_resumable_end(what: str) -> None:
    simulation = two_hosts(has_durable_dir=True)
    simulation.feed(events.HostLeaving("a", simulation.now))
    simulation.feed(events.HostLeaving("b", simulation.now))
    until(simulation, m.Phase.SAVING)
    if what == "lost":
        simulation.lose("b")
    else:
        simulation.feed(events.Reported("b", reports.Saved("no space left")))
    assert [e.code for e in simulation.exits] == [1]


@pytest.mark.fault
def test_a_host_may_leave_a_job_that_has_not_begun() -> None:
    simulation = Simulation(job(assign=assign_all(minimum=3)))
    simulation.join("a", 2)
    simulation.join("b", 2)
    simulation.settle()
    simulation.feed(events.HostLeaving("a", simulation.now))
    assert simulation.logged[-1] == actions.Release(0, None, ("a",))
    simulation.feed(events.HostLeaving("b", simulation.now))
    assert [(e.hosts, e.code) for e in simulation.exits] == [(("b",), 75)]


def test_where_no_world_fits_without_a_leaving_host_the_job_goes_on_with_it() -> None:
    simulation = two_hosts(assign=assign_all(minimum=2))
    simulation.feed(events.HostLeaving("a", simulation.now))
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a", "b"}
    simulation.join("c", 2)
    simulation.settle()
    assert set(simulation.hosts) == {"b", "c"} and rounds(simulation)[-1].steps_lost == 0


def test_a_second_change_during_a_resize_starts_again_from_the_same_generation() -> None:
    simulation = two_hosts(max_hosts=4)
    simulation.train(5)
    simulation.join("c", 2)
    simulation.tick()
    until(simulation, m.Phase.STARTING)
    simulation.join("d", 2)
    simulation.tick()
    assert simulation.job.phase is m.Phase.STOPPING
    simulation.settle()
    first, second = rounds(simulation)[-2:]
    assert first.generation == second.generation and second.steps_lost <= 1
    assert second.assignment.degrees.world_size == 8


def test_an_ended_job_stays_ended() -> None:
    ended = replace(two_hosts().job, phase=m.Phase.ENDED)
    covered = ended.states.generations
    for event in (
        events.HostJoined("z", 8, covered, False, 9.0),
        events.HostLeaving("a", 9.0),
        events.HostLost("a", covered, 9.0),
        events.Ticked(99.0, 3),
        events.Reported("a", reports.WorkersFailed(1, "late")),
        events.Reported("a", reports.Finished(1)),
    ):
        assert advance(ended, event) == (ended, ())


def test_the_job_is_done_when_the_workers_of_every_host_are() -> None:
    simulation = two_hosts()
    simulation.feed(events.Reported("a", reports.Finished(1)))
    assert simulation.job.phase is m.Phase.RUNNING
    simulation.feed(events.Reported("b", reports.Finished(1)))
    assert [(e.hosts, e.code) for e in simulation.exits] == [(("a", "b"), 0)]


def test_idle_hosts_do_not_make_an_assignment_another_one() -> None:
    small = m.Assignment((("a", 2),), Degrees(1, 1, 2), 1, "")
    assert small.is_same_as(m.Assignment((("a", 2), ("b", 0)), Degrees(1, 1, 2), 1, "other"))
    assert not small.is_same_as(m.Assignment((("a", 2),), Degrees(2, 1, 1), 1, ""))


def test_other_passes_make_an_assignment_another_one() -> None:
    small = m.Assignment((("a", 2),), Degrees(1, 1, 2), 1, "")
    assert not small.is_same_as(replace(small, micro_batch_size=2))
    assert not small.is_same_as(replace(small, recompute="full"))
