"""The rules of membership: workers that are built while others train."""

from dataclasses import replace

import pytest

from scalai.core.job import membership as m
from scalai.core.job.membership import active
from scalai.core.job.resize import advance
from scalai.core.messages import actions, commands, events, reports
from support.membership_choice import assign_all
from support.membership_jobs import rounds, two_hosts, until
from support.membership_simulation import Simulation


def building(**settings: object) -> Simulation:
    """Return a job on a and b that has begun to build for c as well."""
    simulation = two_hosts(**{"max_hosts": 3, "build_timeout_s": 30.0, **settings})
    simulation.train(5)
    simulation.join("c", 2)
    simulation.tick(1.0)
    assert simulation.job.phase is m.Phase.BUILDING
    return simulation


def test_workers_train_on_while_the_next_ones_build_and_stop_once_all_have_built() -> None:
    simulation = building()
    for name in "abc":
        assert not any(isinstance(action, commands.Prepare) for action in simulation.logged)
        simulation.train(2)
        simulation.answer(name)
    assert simulation.job.phase is m.Phase.PREPARING
    simulation.settle()
    last = rounds(simulation)[-1]
    assert last.is_built and last.steps_lost == 0
    assert last.assignment.active == ("a", "b", "c")
    assert simulation.steps[last.generation or 0] > 10  # of the stop, not of the start


def test_a_host_that_leaves_is_not_kept_by_what_is_built() -> None:
    simulation = two_hosts(build_timeout_s=30.0)
    simulation.feed(events.HostLeaving("a", simulation.now))
    assert [type(action) for action in simulation.logged[-2:]] == [
        actions.BuildRound,
        commands.Prepare,
    ]
    assert simulation.job.phase is m.Phase.PREPARING
    simulation.settle()
    assert rounds(simulation)[-1].is_built and set(simulation.hosts) == {"b"}


def test_where_a_host_cannot_build_the_workers_start_after_the_stop() -> None:
    simulation = two_hosts(max_hosts=3, build_timeout_s=30.0, left=0)
    simulation.cannot_build.add("b")
    simulation.join("c", 2)
    simulation.settle()
    first, last = rounds(simulation)
    assert not last.is_built and last.assignment.active == ("a", "b", "c")
    assert last.round == first.round + 2, "the number of what was given up is not used again"


def test_what_takes_too_long_to_build_is_given_up() -> None:
    simulation = building()
    simulation.tick(29.0)
    assert simulation.job.phase is m.Phase.BUILDING
    simulation.tick(2.0)
    assert [type(action) for action in simulation.logged[-3:]] == [
        commands.GiveUp,
        actions.Say,
        commands.Prepare,
    ]


def test_another_change_while_they_build_builds_anew() -> None:
    simulation = building(max_hosts=4)
    simulation.join("d", 2)
    assert [type(action) for action in simulation.logged[-2:]] == [
        commands.GiveUp,
        actions.BuildRound,
    ]
    simulation.settle()
    assert len(rounds(simulation)) == 2 and rounds(simulation)[-1].is_built
    assert rounds(simulation)[-1].assignment.degrees.world_size == 8


def test_a_change_that_is_taken_back_leaves_the_job_as_it_is() -> None:
    simulation = building()
    simulation.feed(events.Rescaled(assign_all(allowed=(4,)), simulation.now))
    assert simulation.job.phase is m.Phase.RUNNING
    simulation.settle()
    assert len(rounds(simulation)) == 1 and simulation.hosts["a"].built is None


@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_host_that_is_lost_takes_what_was_built_with_it(victim: str) -> None:
    simulation = building()
    simulation.answer("a")
    lives = {"a", "b", "c"} - {victim}
    simulation.lose(victim)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == lives
    # The host of training workers is a failure, the newcomer is none.
    assert simulation.job.budget.left == (2 if victim == "a" else 3)
    assert rounds(simulation)[-1].steps_lost == (0 if victim == "c" else 5)


def test_workers_that_fail_while_others_build_start_again_without_what_was_built() -> None:
    """It expected a state that is newer than any checkpoint."""
    simulation = building()
    simulation.answer("a")
    simulation.feed(
        events.Reported("b", reports.WorkersFailed(simulation.job.round, "rank 3 died"))
    )
    simulation.settle()
    last = rounds(simulation)[-1]
    assert not last.is_built and last.steps_lost == 5 and simulation.job.budget.left == 2


def test_what_was_built_may_fail_once_and_is_not_counted() -> None:
    simulation = building(left=0)
    until(simulation, m.Phase.STARTING)
    simulation.feed(
        events.Reported("c", reports.WorkersFailed(simulation.job.round, "rank 4 died"))
    )
    assert simulation.job.phase is m.Phase.STOPPING
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and not rounds(simulation)[-1].is_built
    until_again = replace(simulation.job, phase=m.Phase.STARTING)
    ended, _ = advance(
        until_again, events.Reported("c", reports.WorkersFailed(until_again.round, "rank 4 died"))
    )
    assert ended.phase is m.Phase.ENDED
