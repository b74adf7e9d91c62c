"""Generations and their copies: when sealed parts are judged and committed, and how long an older
one stays for a newer one without replicas, whoever comes and goes meanwhile."""

from dataclasses import replace
from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.core.job.membership import Phase
from scalai.core.job.resize import advance
from scalai.core.messages import actions, commands, events, reports
from support.laws import (
    advance_all,
    assign_all,
    but,
    generations,
    lines,
    made,
    ticked,
    told,
    training,
    until,
)

# ---------------------------------------------------------------------- judged and committed

NAME, LATER = "run-1-5", "run-1-9"
JUDGED = actions.JudgeSnapshot("snapshot", NAME)


def sealed(host: str, snapshot: str = NAME, round: int = 1) -> events.Reported:
    return events.Reported(host, reports.Sealed(round, "snapshot", snapshot, b""))


def skipped(host: str, snapshot: str = NAME, round: int = 1) -> events.Reported:
    return events.Reported(host, reports.Skipped(round, snapshot))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("told", "judged", "left"),
    [
        pytest.param([sealed("b"), sealed("b")], [], {NAME: "b"}, id="one part, told twice"),
        pytest.param([sealed("b"), sealed("a")], [JUDGED], {}, id="all have sealed"),
        # What the others have written may be the whole state.
        pytest.param([skipped("b"), sealed("a")], [JUDGED], {}, id="one has nothing of it"),
        pytest.param([skipped("b", round=9), sealed("a")], [], {NAME: "a"}, id="of another round"),
        pytest.param([sealed("a", round=9), sealed("b")], [], {NAME: "b"}, id="sealed in another"),
        pytest.param(
            [sealed("a"), skipped("b", LATER)], [JUDGED], {LATER: "b"}, id="the last has passed it"
        ),
        # It learned too late at which steps they are.
        pytest.param(
            [sealed("a"), sealed("b", LATER)], [JUDGED], {LATER: "b"}, id="one is at a later one"
        ),
        pytest.param(
            [sealed("a"), sealed("b", LATER), sealed("a", LATER)],
            [JUDGED, actions.JudgeSnapshot("snapshot", LATER)], {}, id="and the other comes to it",
        ),
    ],
)  # fmt: skip
def test_a_snapshot_is_judged_once_every_host_with_workers_has_sealed_or_passed_it(
    told: list[events.Event], judged: list[actions.Action], left: dict[str, str]
) -> None:
    job, due = advance_all(training("ab", idle="c"), *told)
    assert due == judged
    assert job.states.sealed == {name: frozenset(hosts) for name, hosts in left.items()}


def test_what_is_a_generation_already_waits_for_no_more_parts() -> None:
    """It was recovered when the workers were stopped: a late part of it begins nothing."""
    job = m.forget_sealed(advance(training("ab"), sealed("a"))[0], NAME)
    assert advance(job, sealed("b"))[1] == ()


def test_who_has_sealed_is_forgotten_with_the_round() -> None:
    job, _ = advance_all(training("ab"), sealed("a"), *told("a", reports.WorkersFailed(1, "died")))
    assert not until(job, Phase.RUNNING).states.sealed


def test_what_a_host_brings_goes_or_is_renamed_before_a_round_begins() -> None:
    job = made(assign=assign_all(), max_hosts=1)
    found = events.HostJoined(
        "a", 2, generations("a", 5), True, 0.0, obsolete=(3, 4), sealed=((5, ("a",)),)
    )
    _, due = advance_all(job, found)
    assert due[:3] == [
        *(actions.Send(("a",), commands.Drop(number)) for number in (3, 4)),
        actions.CommitParts(("a",), 5),
    ]
    assert isinstance(due[-1], actions.StartRound) and due[-1].generation == 5


# ---------------------------------------------------------------------- replicas


def replicated(workers: str = "ab", idle: str = "") -> m.Job:
    """Return a job whose hosts have just committed generation 2; of generation 1 there are
    replicas."""
    return training(
        workers, idle, replicas=1, generations=generations(workers, 1, 2),
        replicated=(1, frozenset(workers + idle)),
    )  # fmt: skip


def replicas(due: list[actions.Action]) -> actions.MakeReplicas:
    """Return the one order to make replicas."""
    (found,) = [action for action in due if isinstance(action, actions.MakeReplicas)]
    return found


def test_a_host_that_is_released_while_it_makes_replicas_is_not_waited_for() -> None:
    """It takes no generation along that alone has replicas."""
    job, due = ticked(replicated(idle="c"))
    first = replicas(due)
    assert first.hosts == ("a", "b", "c")
    job, due = advance_all(job, events.HostLeaving("c", job.now))
    assert actions.Release(1, None, ("c",)) in due
    assert [generation.number for generation in job.states.generations] == [1, 2]
    job, due = ticked(job)
    again = replicas(due)
    assert again.hosts == ("a", "b") and again.order > first.order
    job, due = advance_all(job, *told("ab", reports.Replicated(again.order, 16)))
    assert actions.Release(1, 2, ()) in due and [g.number for g in job.states.generations] == [2]


def test_where_nobody_is_left_to_keep_replicas_an_older_generation_goes() -> None:
    """The next snapshot needs its room: workers would wait for it."""
    job, _ = ticked(replicated("a", "b"))
    job, due = advance_all(job, events.HostLost("b", generations("a", 1, 2), job.now))
    assert job.phase is Phase.RUNNING
    job, _ = ticked(job)  # the loss of a host without workers changes no degrees
    job, due = ticked(job)
    assert actions.Release(1, 2, ()) in due
    assert [generation.number for generation in job.states.generations] == [2]


def with_a_newer_one(job: m.Job, **facts: Any) -> m.Job:
    """Return the job with one more generation, which all hosts have renamed."""
    newest = job.states.generations[-1]
    newer = replace(newest, number=newest.number + 1, step=newest.step + 10)
    found = (*job.states.generations, newer)
    return but(job, generations=found, committing=newer.number, **facts)


@pytest.mark.fault
def test_replicas_that_are_late_are_skipped_for_those_of_a_newer_generation_once() -> None:
    """They do not queue up, and there are some in the end."""
    job, due = ticked(replicated())
    first = replicas(due)
    yet_to_rename = with_a_newer_one(job, uncommitted=frozenset("b"))
    assert not ticked(yet_to_rename)[1]
    job, due = ticked(with_a_newer_one(job))
    second = replicas(due)
    assert (first.generation, second.generation) == (2, 3) and second.order > first.order
    assert "event=replicas_skipped generation=2 newest=3 awaited=a,b" in lines(due)
    assert [g.number for g in job.states.generations] == [1, 2, 3], "an older one has replicas"
    job, due = advance_all(job, *told("ab", reports.Replicated(first.order, 16)))
    assert not due, "what was skipped says nothing any more"
    job, due = ticked(with_a_newer_one(job))
    assert not due, "these are made, however late"
    made = reports.Replicated(second.order, 16, unchanged_bytes=8)
    job, due = advance_all(job, *told("ab", made))
    assert "event=replicated generation=3 bytes=32 unchanged_bytes=16" in lines(due)
    assert replicas(ticked(job)[1]).generation == 4
