"""The phases of a start, and what comes of a proof of what was restored."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.core.job.membership import Phase
from scalai.core.job.remembered import TakingOver, Underway
from scalai.core.job.succession import adopt
from scalai.core.messages import actions, commands, events, reports
from support.laws import (
    advance_all,
    but,
    generations,
    joined,
    lines,
    ordered,
    published,
    restored,
    told,
    training,
    until,
)

DOUBT = actions.Send(("a", "b"), commands.Doubt(2))
EXAMINE = actions.Send(("a", "b"), commands.Examine(2))


def starting(**facts: Any) -> m.Job:
    """Return a job on hosts a and b at the begin of a round from generation 2."""
    job, _ = advance_all(training("ab", **facts), *told("a", reports.WorkersFailed(1, "died")))
    return until(job, Phase.STARTING)


def all_published(**facts: Any) -> m.Job:
    return advance_all(starting(**facts), *told("ab", published(2)))[0]


def proven(job: m.Job) -> m.Job:
    """Return the job whose start was proven."""
    reported = told("ab", published(job.round), restored(job.round))
    return advance_all(job, *reported, events.Proven(job.round))[0]


def test_each_phase_of_a_start_waits_for_the_workers_of_all_hosts() -> None:
    job, done = advance_all(starting(), *told("a", published(2)))
    assert not done and job.attempt.progress == {"a": "published"}
    job, done = advance_all(job, *told("b", published(2), restored(2)))
    assert done == [actions.CountTensors(("a", "b"))]
    job, done = advance_all(job, *told("a", restored(2)))
    assert done == [actions.Prove(2)] and job.attempt.progress == {"a": "restored", "b": "restored"}
    job, done = advance_all(job, events.Proven(2))
    assert done == [actions.Send(("a", "b"), commands.Proceed(2))]
    assert advance_all(job, events.Proven(2), events.Proven(1)) == (job, []), "once"


def test_a_new_coordinator_lets_those_go_on_whom_the_old_one_did_not_reach() -> None:
    """A host that has made a step shows that the state was proven."""
    job = proven(starting())
    its = Underway(
        "run", 2, (("a", 2), ("b", 2)), {"tp": 1, "pp": 1, "dp": 4}, None, 2, 5, True, True, True,
        None, False, False, False, False, False, 0,
    )  # fmt: skip
    late = replace(its, is_proven=False, is_stepping=False)
    over = TakingOver(job.now, {"a": its, "b": late})
    job = replace(job, takeover=replace(job.takeover, pending=over))
    job, done = adopt(job)
    assert job.phase is Phase.STARTING and job.awaited == {"b"}
    assert actions.Send(("b",), commands.Proceed(2)) in done


@pytest.mark.parametrize("kind", [published, restored])
def test_what_is_told_twice_or_of_another_round_or_by_nobody_begins_nothing(
    kind: Callable[[int], reports.Report],
) -> None:
    strange = [*told("aa", kind(2)), *told("b", kind(1)), *told("c", kind(2))]
    job, done = advance_all(starting(), *strange)
    assert not done and job.awaited == {"a", "b"}
    assert len(advance_all(job, *told("bba", kind(2)))[1]) == 1, "once"


def test_a_round_with_nothing_to_restore_proves_nothing() -> None:
    job = but(starting(), attempt=m.Attempt(None))
    _, done = advance_all(job, *told("ab", published(2), restored(2)))
    assert done == [actions.CountTensors(("a", "b"))]


def test_a_start_begins_with_what_the_earlier_round_left() -> None:
    job, _ = advance_all(proven(starting()), *told("b", reports.WorkersFailed(2, "died")))
    done: list[actions.Action] = []
    job = until(job, Phase.STARTING, done)
    discard, back, *_, start = done[-3:]
    assert ordered(discard) == commands.Discard() and back == actions.GoBack(("a", "b"), 2)
    assert isinstance(start, actions.StartRound) and start.generation == 2
    assert job.attempt == m.Attempt(2), "what was told of the round before is forgotten"


def test_a_host_that_is_lost_in_a_start_ends_its_round_and_its_word_does_not_count() -> None:
    job, _ = advance_all(starting(), *told("a", published(2)))
    job, _ = advance_all(job, events.HostLost("a", generations("b", 2), job.now))
    assert job.phase is Phase.STOPPING
    job, _ = advance_all(job, joined(job, "a"))
    assert advance_all(job, *told("a", published(2))) == (job, []), "it has no workers of it"


def test_a_script_that_nothing_hooked_at_first_may_publish_while_the_job_runs() -> None:
    late = told("a", reports.Hooked(2, is_hooked=False), reports.Hooked(2), published(2))
    job, done = advance_all(starting(), *late, *told("b", published(2)))
    assert job.phase is Phase.RUNNING and done[-1] == actions.CountTensors(("a", "b"))


# ---------------------------------------------------------------------- a proof that fails


def differs(*, is_second: bool = False, can_reread: bool = True) -> events.ProofFailed:
    return events.ProofFailed(2, "it differs", is_second, can_reread)


def examined(damaged: str = "", hosts: str = "ab", number: int = 2) -> list[events.Event]:
    return [
        events.Reported(host, reports.Examined(number, ("w",) if host in damaged else (), "/d"))
        for host in hosts
    ]


@pytest.mark.parametrize(
    ("failed", "damaged", "is_doubted"),
    [
        pytest.param([differs()], "", True, id="whole"),
        pytest.param(
            [differs(), differs(is_second=True, can_reread=False)], "", True, id="a second host"
        ),
        pytest.param([differs(can_reread=False)], "", False, id="nothing else of it"),
        pytest.param([differs()], "b", False, id="damage was found"),
    ],
)
def test_a_failed_proof_is_examined_and_what_was_fetched_goes_where_nothing_is_damaged(
    failed: list[events.Event], damaged: str, is_doubted: bool
) -> None:
    """It counts as no failure."""
    job, done = advance_all(starting(), *failed)
    assert job.phase is Phase.EXAMINING and job.awaited == {"a", "b"} and done[-1] == EXAMINE
    after, done = advance_all(job, *examined(damaged))
    assert isinstance(ordered(done[-1]), commands.Stop), "the doubt is told before"
    assert (DOUBT in done) is is_doubted and after.budget.left == job.budget.left
    keeps = not is_doubted and not damaged
    assert ("generation 2 stays as it is" in lines(done)) is keeps


def test_the_second_failed_proof_of_a_generation_ends_the_job() -> None:
    after, done = advance_all(starting(), differs(is_second=True))
    assert after.phase is Phase.ENDED
    assert done == [actions.EndJob(("a", "b"), 3, "it differs")]


@pytest.mark.parametrize("is_second", [False, True])
def test_a_proof_that_fails_while_the_round_is_stopped_is_examined_and_stops_nothing(
    is_second: bool,
) -> None:
    job, _ = advance_all(starting(), *told("a", reports.WorkersFailed(2, "died")))
    failed = differs(is_second=is_second)
    assert advance_all(job, failed) == (job, [] if is_second else [EXAMINE])
    assert advance_all(job, replace(failed, round=1)) == (job, [])


# ---------------------------------------------------------------------- workers that fail


def raised(reason: str = "AssertionError", **how: bool) -> events.Event:
    return events.Reported("a", reports.WorkersFailed(2, reason, **how))


def test_what_workers_raise_before_the_proof_is_their_failure_where_all_parts_are_whole() -> None:
    job = all_published()
    after, done = advance_all(job, raised())
    assert after.phase is Phase.EXAMINING and after.budget.left == job.budget.left
    assert done[-1] == EXAMINE
    after, _ = advance_all(after, *examined(hosts="b"))
    assert after.awaited == {"a"}
    after, _ = advance_all(after, *examined(hosts="a"))
    assert after.phase is Phase.STOPPING and after.budget.left == job.budget.left - 1


def test_a_refusal_before_the_proof_ends_the_job_once_all_parts_are_known_to_be_whole() -> None:
    refused = raised("no", is_refusal=True)
    after, done = advance_all(all_published(), refused, *examined())
    assert after.phase is Phase.ENDED and done[-1] == actions.EndJob(("a", "b"), 3, "no")
    assert advance_all(all_published(), refused, *examined("a"))[0].phase is Phase.STOPPING


def test_what_fails_for_damage_costs_nothing_however_often_and_the_last_state_ends_the_job() -> (
    None
):
    after, _ = advance_all(all_published(left=1), raised(), *examined("a"))
    assert after.phase is Phase.STOPPING and after.budget.left == 0
    lost = m.replace_obstacle(but(after, generations=()), "x", is_held_back=False, loss="x")
    after, _ = advance_all(lost, *told("ab", reports.Stopped(2, 8)))
    assert after.phase is Phase.WAITING
    tick = events.Ticked(after.now + 1.0, 0)
    waits, _ = advance_all(after, *told("a", reports.Attached((), ())), tick)
    assert waits.phase is Phase.WAITING, "b may have something on its disk"
    ended, done = advance_all(waits, *told("b", reports.Attached((), ())), tick)
    assert ended.phase is Phase.ENDED and done == [actions.EndJob(("a", "b"), 3, "x")]


@pytest.mark.parametrize(
    ("reason", "facts", "phase"),
    [
        ("rank 0 was killed by SIGKILL", {}, Phase.STOPPING),
        ("rank 0 was killed by SIGKILL", {"was_start_killed": True}, Phase.EXAMINING),
        ("rank 0 was killed by SIGBUS", {}, Phase.EXAMINING),
    ],
)
def test_a_signal_before_the_proof_is_chance_once_and_sigbus_never(
    reason: str, facts: dict[str, Any], phase: Phase
) -> None:
    after, _ = advance_all(but(all_published(), **facts), raised(reason, is_chance=True))
    assert after.phase is phase and (phase is Phase.EXAMINING or after.budget.was_start_killed)


def test_what_fails_behind_the_proof_or_before_anything_is_read_is_not_examined() -> None:
    job = starting()
    for each in (job, proven(job), but(all_published(), attempt=m.Attempt(None))):
        assert advance_all(each, raised())[0].phase is Phase.STOPPING


def test_a_host_that_is_lost_in_an_examination_is_not_waited_for() -> None:
    job, _ = advance_all(all_published(), raised())
    job, _ = advance_all(job, events.HostLost("a", generations("b", 2), job.now))
    assert job.phase is Phase.EXAMINING and job.awaited == {"b"}
    assert advance_all(job, *examined(hosts="b"))[0].phase is Phase.STOPPING


@pytest.mark.fault
def test_damage_that_is_found_in_the_training_makes_room_for_an_older_generation() -> None:
    job = but(starting(), phase=Phase.RUNNING, generations=generations("ab", 3))
    _, done = advance_all(job, *told("b", reports.Suspected(4, ("b", "gone"), "it differs")))
    assert done == [actions.Send(("b",), commands.Examine(4))]
    after, done = advance_all(but(job, replicated=(4, frozenset("ab"))), *examined("b", "b", 4))
    assert done[-1] == actions.GoBack(("a", "b"), 3) and after.copies.replicated is None
    assert advance_all(job, *examined("", "b", 4)) == (job, [])
    assert not advance_all(job, *examined("b", "b", 3))[1], "others have all of it"


def test_damage_that_is_found_in_a_start_from_it_begins_it_again_at_no_restart() -> None:
    job = starting()
    suspected = told("b", reports.Suspected(2, ("b",), "it differs"))
    assert advance_all(job, *suspected) == (job, []), "it may do without"
    after, _ = advance_all(job, *examined("b", "b"))
    assert after.phase is Phase.STOPPING and after.budget.left == job.budget.left
    assert advance_all(proven(job), *examined("b", "b"))[0].phase is Phase.STARTING
