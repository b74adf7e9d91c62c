"""A host with a health check runs workers once it has passed it, and the others do not wait."""

from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.core.job.membership import Phase, active
from scalai.core.messages import actions, commands, events, reports
from scalai.core.messages.reports import HealthChecked
from support.laws import advance_all, but, joined, lines, ordered, ticked, told, training, until

pytestmark = pytest.mark.fault


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
        assert "host b fails its health check (no device)" in lines(due)
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
    stalled = {"a": reports.Stalled((0,), 25, 200.0), "b": reports.Stalled((1,), 24, 200.0)}
    _, due = advance_all(checked(hang_s=100.0), events.Ticked(101.0, 25, stalled))
    (order,) = asked(due)
    assert "waited for its workers" in order.reason


def test_a_job_that_trains_does_not_stand_still_for_the_check_of_a_host_that_joins() -> None:
    job = checked("a", max_hosts=3)
    job, _ = advance_all(job, joined(job, "b", has_check=True), joined(job, "c"))
    job = until(ticked(job)[0], Phase.RUNNING)
    assert active(job) == {"a", "c"} and "b" in job.health.checks
