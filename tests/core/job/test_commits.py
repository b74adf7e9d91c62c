"""The rules of membership: when what hosts have sealed beside the training is judged."""

import pytest

from scalai.core.job import membership as m
from scalai.core.job.resize import advance
from scalai.core.messages import actions, commands, events, reports
from support.law_jobs import made
from support.membership_choice import assign_all
from support.membership_jobs import two_hosts

NAME = "run-1-5"


def sealed(host: str, round: int, snapshot: str = NAME) -> events.Reported:
    return events.Reported(host, reports.Sealed(round, "snapshot", snapshot, b""))


def test_a_snapshot_is_judged_once_every_host_with_workers_has_sealed_it() -> None:
    job = two_hosts().job
    job, due = advance(job, sealed("b", job.round))
    assert not due
    job, due = advance(job, sealed("b", job.round))
    assert not due, "told twice it is one part"
    job, due = advance(job, sealed("a", job.round))
    assert due == (actions.JudgeSnapshot("snapshot", NAME),) and not job.states.sealed


@pytest.mark.fault
def test_a_snapshot_is_judged_though_a_host_has_nothing_of_it() -> None:
    """What the others have written may be the whole state."""
    job = two_hosts().job
    job, due = advance(job, events.Reported("b", reports.Skipped(99, NAME)))
    assert not due and not job.states.sealed, "of another round"
    job, due = advance(job, events.Reported("b", reports.Skipped(job.round, NAME)))
    assert not due
    job, due = advance(job, sealed("a", job.round))
    assert due == (actions.JudgeSnapshot("snapshot", NAME),) and not job.states.sealed


def test_parts_of_two_snapshots_or_rounds_make_none() -> None:
    job = two_hosts().job
    for event in (sealed("a", job.round, "run-1-9"), sealed("b", job.round), sealed("b", 99)):
        job, due = advance(job, event)
        assert not due


@pytest.mark.fault
def test_who_comes_to_a_later_snapshot_has_nothing_of_an_earlier_one() -> None:
    """It learned too late at which steps they are; the part of the other may be the whole state."""
    job, due = advance(two_hosts().job, sealed("a", 1))
    job, due = advance(job, sealed("b", 1, "run-1-9"))
    assert due == (actions.JudgeSnapshot("snapshot", NAME),)
    assert job.states.sealed == {"run-1-9": frozenset("b")}
    job, due = advance(job, sealed("a", 1, "run-1-9"))
    assert due == (actions.JudgeSnapshot("snapshot", "run-1-9"),) and not job.states.sealed


def test_a_snapshot_that_some_of_several_hosts_have_passed_over_is_judged_with_the_last() -> None:
    job = two_hosts(max_hosts=3).job
    job, _ = advance(job, sealed("a", 1))
    job, due = advance(job, events.Reported("b", reports.Skipped(1, "run-1-12")))
    assert [action.snapshot for action in due if isinstance(action, actions.JudgeSnapshot)] == [
        NAME
    ], "the third host has no workers"


def test_what_is_a_generation_already_waits_for_no_more_parts() -> None:
    """It was recovered when the workers were stopped: a late part of it begins nothing."""
    job, _ = advance(two_hosts().job, sealed("a", 1))
    job = m.forget_sealed(job, NAME)
    assert advance(job, sealed("b", 1))[1] == ()


def test_who_has_sealed_is_forgotten_with_the_round() -> None:
    simulation = two_hosts()
    simulation.train(3)
    simulation.feed(sealed("a", simulation.job.round))
    simulation.feed(events.Reported("a", reports.WorkersFailed(simulation.job.round, "died")))
    simulation.settle()
    assert not simulation.job.states.sealed


def test_hosts_without_workers_need_not_seal() -> None:
    job, _ = advance(two_hosts(max_hosts=3).job, events.HostJoined("c", 2, (), False, 0.0))
    job, _ = advance(job, sealed("a", job.round))
    assert advance(job, sealed("b", job.round))[1] == (actions.JudgeSnapshot("snapshot", NAME),)


def test_what_a_host_brings_goes_or_is_renamed_before_a_round_begins() -> None:
    job = made(assign=assign_all(), max_hosts=1)
    whole = (m.Generation(5, 9, frozenset("a")),)
    joined = events.HostJoined("a", 2, whole, True, 0.0, obsolete=(3, 4), sealed=((5, ("a",)),))
    _, due = advance(job, joined)
    assert due[:3] == (
        *(actions.Send(("a",), commands.Drop(number)) for number in (3, 4)),
        actions.CommitParts(("a",), 5),
    )
    assert isinstance(due[-1], actions.StartRound) and due[-1].generation == 5
