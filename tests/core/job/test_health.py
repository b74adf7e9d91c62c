"""A host with a health check runs workers once it has passed it, and the others do not wait."""

import pytest

from scalai.core.job import membership as m
from scalai.core.job.membership import active
from scalai.core.messages import actions, commands, events, reports
from support.membership_jobs import rounds
from support.membership_simulation import Simulation, job

pytestmark = pytest.mark.fault


def checked(*healthy: str, **settings: object) -> Simulation:
    """Return a job that trains on these hosts, of which b has a check; c may come too."""
    simulation = Simulation(job(**{"max_hosts": 2, "is_loss_free": True, **settings}))
    simulation.has_check = {"b"}
    for name in healthy:
        simulation.join(name, 2)
    simulation.settle()
    simulation.snapshot()
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    return simulation


def asked(simulation: Simulation) -> list[commands.CheckHealth]:
    return [action for action in simulation.logged if isinstance(action, commands.CheckHealth)]


def said(simulation: Simulation, words: str) -> bool:
    return any(words in each.text for each in simulation.logged if isinstance(each, actions.Say))


def test_who_passes_is_used_from_the_start_and_asked_once() -> None:
    simulation = checked("a", "b")
    assert active(simulation.job) == {"a", "b"} and len(rounds(simulation)) == 1
    assert len(asked(simulation)) == 1 and not simulation.job.health.checks


def test_who_fails_stays_idle_and_is_asked_again_later_each_time() -> None:
    simulation = checked("a")
    simulation.sick = {"b"}
    simulation.join("b", 2)
    simulation.pass_time(300.0, 10.0)
    assert active(simulation.job) == {"a"} and len(rounds(simulation)) == 1
    assert said(simulation, "host b fails its health check (no device)")
    assert 3 <= len(asked(simulation)) <= 5
    simulation.sick.clear()
    simulation.pass_time(300.0, 10.0)
    assert active(simulation.job) == {"a", "b"} and not simulation.job.health.checks


def test_a_host_whose_workers_failed_is_asked_and_used_again_where_it_passes_at_once() -> None:
    simulation = checked("a", "b")
    simulation.feed(
        events.Reported("b", reports.WorkersFailed(simulation.job.round, "killed", is_chance=True))
    )
    assert simulation.job.health.checks.keys() == {"b"} and "killed" in asked(simulation)[-1].reason
    simulation.settle()
    assert len(rounds(simulation)) == 2 and active(simulation.job) == {"a", "b"}


def test_where_it_fails_the_others_train_on_without_it() -> None:
    simulation = checked("a", "b")
    simulation.sick = {"b"}
    simulation.feed(
        events.Reported("b", reports.WorkersFailed(simulation.job.round, "killed", is_chance=True))
    )
    simulation.settle()
    assert active(simulation.job) == {"a"} and len(rounds(simulation)) == 2
    assert simulation.job.phase is m.Phase.RUNNING and "b" in simulation.job.hosts


def test_who_gives_no_answer_is_waited_for_for_a_moment_only() -> None:
    simulation = checked("a", "b")
    simulation.feed(
        events.Reported("b", reports.WorkersFailed(simulation.job.round, "killed", is_chance=True))
    )
    order = asked(simulation)[-1].order
    simulation.commands["b"].pop(0)  # the command runs on
    simulation.deliver()
    assert simulation.job.phase is m.Phase.WAITING
    simulation.pass_time(30.0, 2.0)
    assert active(simulation.job) == {"a"} and simulation.job.phase is m.Phase.RUNNING
    simulation.feed(events.Reported("b", reports.HealthChecked(order - 1, is_healthy=True)))
    assert "b" in simulation.job.health.checks, "that was the answer to an earlier check"
    simulation.feed(events.Reported("b", reports.HealthChecked(order, is_healthy=True)))
    simulation.settle()
    assert active(simulation.job) == {"a", "b"}


def test_a_job_whose_only_host_fails_waits_for_it_and_says_so() -> None:
    simulation = checked("b", max_hosts=1, has_durable_dir=True)
    simulation.sick = {"b"}
    simulation.feed(
        events.Reported("b", reports.WorkersFailed(simulation.job.round, "killed", is_chance=True))
    )
    simulation.pass_time(200.0, 10.0)
    assert simulation.job.phase is m.Phase.WAITING and not simulation.exits
    assert said(simulation, "host b fails its health check: no device")
    simulation.sick.clear()
    simulation.pass_time(4000.0, 10.0)
    assert simulation.job.phase is m.Phase.RUNNING and rounds(simulation)[-1].steps_lost == 0


def test_the_hosts_that_others_have_waited_for_in_a_hang_are_asked() -> None:
    simulation = checked("a", "b", hang_s=100.0)
    simulation.hosts["b"].is_hung = True
    simulation.sick = {"b"}
    simulation.pass_time(300.0, 10.0)
    simulation.settle()
    assert active(simulation.job) == {"a"} and simulation.job.phase is m.Phase.RUNNING
    assert "waited for its workers" in asked(simulation)[1].reason


def test_a_job_that_trains_does_not_stand_still_for_the_check_of_a_host_that_joins() -> None:
    simulation = checked("a", max_hosts=3, build_timeout_s=0.0)
    simulation.join("b", 2)
    simulation.commands["b"].pop(0)  # its command takes its time
    simulation.join("c", 2)
    simulation.tick(2.0)
    simulation.deliver()
    assert active(simulation.job) == {"a", "c"} and simulation.job.phase is m.Phase.RUNNING
