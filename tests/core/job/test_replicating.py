"""The rules of membership: how long an older generation stays for a newer one that has no replicas
yet, whoever comes and goes meanwhile."""

from dataclasses import replace

import pytest

from scalai.core.job import membership as m
from scalai.core.job.resize import advance
from scalai.core.messages import actions, events, reports
from scalai.core.messages.actions import Action
from support.law_jobs import but, made
from support.membership_choice import assign_all


def training(workers: str, idle: str) -> m.Job:
    """Return a job whose hosts with workers have just committed generation 2; of generation 1 there
    are replicas."""
    hosts = {name: m.Host(name, 1, number) for number, name in enumerate(workers + idle)}
    assign = assign_all(allowed=(len(workers),))
    current = assign(tuple((name, 1) for name in hosts), None)
    older, newest = (m.Generation(n, 10 * n, frozenset(workers)) for n in (1, 2))
    return made(
        assign=assign,
        max_hosts=len(hosts),
        replicas=1,
        phase=m.Phase.RUNNING,
        hosts=hosts,
        joined=len(hosts),
        round=1,
        last_round=1,
        current=current,
        ran=current,
        has_state=True,
        generations=(older, newest),
        committing=2,
        newest=25,
        now=100.0,
        replicated=(1, frozenset(hosts)),
        has_durable_dir=True,
    )


def ticked(job: m.Job, seconds: float = 1.0) -> tuple[m.Job, tuple[Action, ...]]:
    return advance(job, events.Ticked(job.now + seconds, 25))


def replicas(due: tuple[Action, ...]) -> actions.MakeReplicas:
    """Return the one order to make replicas."""
    (found,) = [action for action in due if isinstance(action, actions.MakeReplicas)]
    return found


def test_a_host_that_is_released_while_it_makes_replicas_is_not_waited_for() -> None:
    job, due = ticked(training("ab", "c"))
    first = replicas(due)
    assert first.hosts == ("a", "b", "c")
    job, due = advance(job, events.HostLeaving("c", job.now))
    assert any(isinstance(a, actions.Release) and a.leaving == ("c",) for a in due)
    job, due = ticked(job)
    again = replicas(due)
    assert again.hosts == ("a", "b") and again.order > first.order
    for host in again.hosts:
        job, due = advance(job, events.Reported(host, reports.Replicated(again.order, 16)))
    assert actions.Release(1, 2, ()) in due and [g.number for g in job.states.generations] == [2]


def test_a_host_that_is_released_takes_no_generation_along_that_alone_has_replicas() -> None:
    job, due = ticked(training("ab", "c"))
    job, due = advance(job, events.HostLeaving("c", job.now))
    assert actions.Release(1, None, ("c",)) in due
    assert [generation.number for generation in job.states.generations] == [1, 2]


def test_where_nobody_is_left_to_keep_replicas_an_older_generation_goes() -> None:
    """The next snapshot needs its room: workers would wait for it."""
    job, _ = ticked(training("a", "b"))
    covered = tuple(replace(g, hosts=g.hosts - {"b"}) for g in job.states.generations)
    job, due = advance(job, events.HostLost("b", covered, job.now))
    assert job.phase is m.Phase.RUNNING
    job, _ = ticked(job)  # the loss of a host without workers changes no degrees
    job, due = ticked(job)
    assert actions.Release(1, 2, ()) in due
    assert [generation.number for generation in job.states.generations] == [2]


def with_a_newer_one(job: m.Job) -> m.Job:
    """Return the job with one more generation, which all hosts have renamed."""
    newest = job.states.generations[-1]
    newer = m.Generation(newest.number + 1, newest.step + 10, newest.hosts)
    return but(job, generations=(*job.states.generations, newer), committing=newer.number)


@pytest.mark.fault
def test_replicas_that_are_late_are_skipped_for_those_of_a_newer_generation_once() -> None:
    """They do not queue up, and there are some in the end."""
    job, due = ticked(training("ab", ""))
    first = replicas(due)
    job, due = ticked(with_a_newer_one(job))
    second = replicas(due)
    assert (first.generation, second.generation) == (2, 3) and second.order > first.order
    (line,) = [a.text for a in due if isinstance(a, actions.Say)]
    assert "event=replicas_skipped generation=2 newest=3 awaited=a,b" in line
    assert [g.number for g in job.states.generations] == [1, 2, 3], "an older one has replicas"
    for host in first.hosts:
        job, due = advance(job, events.Reported(host, reports.Replicated(first.order, 16)))
        assert not due, "what was skipped says nothing any more"
    job, due = ticked(with_a_newer_one(job))
    assert not due, "these are made, however late"
    for host in second.hosts:
        job, due = advance(
            job, events.Reported(host, reports.Replicated(second.order, 16, unchanged_bytes=8))
        )
    (line,) = [a.text for a in due if isinstance(a, actions.Say)]
    assert "event=replicated generation=3 bytes=32 unchanged_bytes=16" in line
    job, due = ticked(job)
    assert replicas(due).generation == 4


def test_replicas_are_not_skipped_for_a_generation_that_hosts_have_yet_to_rename() -> None:
    job, _ = ticked(training("ab", ""))
    job, due = ticked(but(with_a_newer_one(job), uncommitted=frozenset("b")))
    assert not due
