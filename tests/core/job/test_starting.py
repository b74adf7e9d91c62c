"""The rules of membership: the phases of a start, and what comes of a proof."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.core.job.resize import advance
from scalai.core.messages import actions, commands, events, reports
from support.law_jobs import but
from support.law_words import ordered, published, restored
from support.membership_jobs import two_hosts, until
from support.membership_simulation import Simulation


def starting() -> Simulation:
    """Return a job on hosts a and b at the begin of a round with a source."""
    simulation = two_hosts()
    simulation.feed(events.Reported("a", reports.WorkersFailed(simulation.job.round, "died")))
    until(simulation, m.Phase.STARTING)
    return simulation


def advance_all(job: m.Job, *due: events.Event) -> tuple[m.Job, list[actions.Action]]:
    """Return the job after these events, and all actions of them."""
    done: list[actions.Action] = []
    for event in due:
        job, wanted = advance(job, event)
        done += wanted
    return job, done


def proven(job: m.Job) -> m.Job:
    """Return the job whose start was proven."""
    reported = [
        events.Reported(host, kind(job.round)) for kind in (published, restored) for host in "ab"
    ]
    return advance_all(job, *reported, events.Proven(job.round))[0]


def test_each_phase_of_a_start_waits_for_the_workers_of_all_hosts() -> None:
    job = starting().job
    round = job.round
    job, done = advance_all(job, events.Reported("a", reports.Published(round, ())))
    assert not done and job.attempt.progress == {"a": "published"}
    job, done = advance_all(
        job,
        events.Reported("b", reports.Published(round, ())),
        events.Reported("b", restored(round)),
    )
    assert done == [actions.CountTensors(("a", "b"))]
    job, done = advance_all(job, events.Reported("a", restored(round)))
    assert done == [actions.Prove(1)] and job.attempt.progress == {"a": "restored", "b": "restored"}
    job, done = advance_all(job, events.Proven(round))
    assert done == [actions.Send(("a", "b"), commands.Proceed(round))]


@pytest.mark.parametrize("kind", [published, restored])
def test_what_is_told_twice_or_of_another_round_or_by_nobody_begins_nothing(
    kind: Callable[[int], reports.Report],
) -> None:
    job, round = starting().job, starting().job.round
    strange = [
        events.Reported("a", kind(round)),
        events.Reported("a", kind(round)),
        events.Reported("b", kind(round - 1)),
        events.Reported("c", kind(round)),
    ]
    reported, done = advance_all(job, *strange)
    assert not done and reported.awaited == {"a", "b"}
    reported, done = advance_all(
        reported,
        events.Reported("b", kind(round)),
        events.Reported("b", kind(round)),
        events.Reported("a", kind(round)),
    )
    assert len(done) == 1, "once"


def test_a_proof_that_passes_lets_the_workers_go_on_once() -> None:
    job = proven(starting().job)
    assert advance_all(job, events.Proven(job.round), events.Proven(job.round - 1)) == (job, [])


def test_a_round_with_nothing_to_restore_proves_nothing() -> None:
    job = starting().job
    job = but(job, attempt=m.Attempt(None))
    reported = [
        events.Reported(host, kind(job.round)) for kind in (published, restored) for host in "ab"
    ]
    _, done = advance_all(job, *reported)
    assert done == [actions.CountTensors(("a", "b"))]


def test_a_start_begins_with_what_the_earlier_round_left() -> None:
    simulation = starting()
    *_, discard, back, start = simulation.logged
    assert discard == commands.Discard() and back == actions.GoBack(("a", "b"), 1)
    assert isinstance(start, actions.StartRound) and start.generation == 1
    simulation.job = proven(simulation.job)
    simulation.feed(events.Reported("b", reports.WorkersFailed(simulation.job.round, "died")))
    until(simulation, m.Phase.STARTING)
    assert simulation.job.attempt == m.Attempt(1), "what was told of the round before is forgotten"


def test_a_host_that_is_lost_in_a_start_ends_its_round_and_its_word_does_not_count() -> None:
    simulation = starting()
    round = simulation.job.round
    simulation.feed(events.Reported("a", reports.Published(round, ())))
    simulation.lose("a")
    assert simulation.job.phase is m.Phase.STOPPING
    simulation.join("a", 2, {1: frozenset(range(4))})
    before = len(simulation.logged)
    simulation.feed(
        events.Reported("a", reports.Published(round, ()))
    )  # who has just come has no workers of it
    assert len(simulation.logged) == before


def test_a_script_that_nothing_hooked_at_first_may_publish_while_the_job_runs() -> None:
    job = starting().job
    round = job.round
    late: list[events.Event] = [
        events.Reported("a", reports.Unhooked(round)),
        events.Reported("a", reports.Hooked(round)),
        events.Reported("a", reports.Published(round, ())),
    ]
    job, done = advance_all(job, *late, events.Reported("b", reports.Published(round, ())))
    assert job.phase is m.Phase.RUNNING and done[-1] == actions.CountTensors(("a", "b"))


def failed_proof(job: m.Job, *, is_second: bool = False, can_reread: bool = True) -> Any:
    return events.ProofFailed(job.round, "it differs", is_second, can_reread)


def examined(damaged: str = "", hosts: str = "ab", number: int = 1) -> list[events.Event]:
    return [
        events.Reported(host, reports.Examined(number, ("w",) if host in damaged else (), "/d"))
        for host in hosts
    ]


def test_a_failed_proof_is_examined_and_what_was_fetched_goes_where_nothing_is_damaged() -> None:
    job = starting().job
    after, done = advance_all(job, failed_proof(job))
    assert after.phase is m.Phase.EXAMINING and after.awaited == {"a", "b"}
    assert done[-1] == actions.Send(("a", "b"), commands.Examine(1))
    after, done = advance_all(after, *examined())
    assert done[0] == actions.Send(("a", "b"), commands.Doubt(1))
    assert isinstance(ordered(done[-1]), commands.Stop), "the doubt is told before"
    assert after.phase is m.Phase.STOPPING and after.budget.left == job.budget.left


def test_a_second_host_that_says_so_in_the_same_round_changes_nothing() -> None:
    job = starting().job
    second = failed_proof(job, is_second=True, can_reread=False)
    after, done = advance_all(job, failed_proof(job), second, *examined())
    assert actions.Send(("a", "b"), commands.Doubt(1)) in done and after.phase is m.Phase.STOPPING


def test_what_there_is_nothing_else_of_is_not_given_up_for_a_failed_proof() -> None:
    job = starting().job
    _, done = advance_all(job, failed_proof(job, can_reread=False), *examined())
    assert not any(isinstance(ordered(action), commands.Doubt) for action in done)
    said = [action.text for action in done if isinstance(action, actions.Say)]
    assert any("generation 1 stays as it is" in text for text in said)


def test_where_damage_is_found_what_was_fetched_stays_and_the_start_counts_as_no_failure() -> None:
    job = starting().job
    after, done = advance_all(job, failed_proof(job), *examined("b"))
    assert not any(isinstance(ordered(action), commands.Doubt) for action in done)
    assert after.phase is m.Phase.STOPPING and after.budget.left == job.budget.left


def test_the_second_failed_proof_of_a_generation_ends_the_job() -> None:
    job = starting().job
    after, done = advance_all(job, failed_proof(job, is_second=True))
    assert after.phase is m.Phase.ENDED
    assert done == [actions.EndJob(("a", "b"), 3, "it differs")]


@pytest.mark.parametrize("is_second", [False, True])
def test_a_proof_that_fails_while_the_round_is_stopped_is_examined_and_stops_nothing(
    is_second: bool,
) -> None:
    simulation = starting()
    simulation.feed(events.Reported("a", reports.WorkersFailed(simulation.job.round, "died")))
    job = simulation.job
    failed = failed_proof(job, is_second=is_second)
    after, done = advance_all(job, failed)
    assert after == job
    assert done == ([] if is_second else [actions.Send(("a", "b"), commands.Examine(1))])
    assert advance_all(job, replace(failed, round=job.round - 1)) == (job, [])


def all_published(job: m.Job) -> m.Job:
    return advance_all(
        job, *(events.Reported(host, reports.Published(job.round, ())) for host in "ab")
    )[0]


def raised(job: m.Job, reason: str = "AssertionError", **how: bool) -> events.Event:
    return events.Reported("a", reports.WorkersFailed(job.round, reason, **how))


def test_what_workers_raise_before_the_proof_is_their_failure_where_all_parts_are_whole() -> None:
    job = all_published(starting().job)
    after, done = advance_all(job, raised(job))
    assert after.phase is m.Phase.EXAMINING and after.budget.left == job.budget.left
    assert done[-1] == actions.Send(("a", "b"), commands.Examine(1))
    after, _ = advance_all(after, *examined(hosts="b"))
    assert after.awaited == {"a"}
    after, _ = advance_all(after, *examined(hosts="a"))
    assert after.phase is m.Phase.STOPPING and after.budget.left == job.budget.left - 1


def test_a_refusal_before_the_proof_ends_the_job_once_all_parts_are_known_to_be_whole() -> None:
    job = all_published(starting().job)
    after, done = advance_all(job, raised(job, "no", is_refusal=True), *examined())
    assert after.phase is m.Phase.ENDED and done[-1] == actions.EndJob(("a", "b"), 3, "no")
    after, _ = advance_all(job, raised(job, "no", is_refusal=True), *examined("a"))
    assert after.phase is m.Phase.STOPPING


def test_what_fails_for_damage_costs_nothing_however_often_and_the_last_state_ends_the_job() -> (
    None
):
    job = all_published(starting().job)
    after, _ = advance_all(but(job, left=0), raised(job), *examined("a"))
    assert after.phase is m.Phase.STOPPING and after.budget.left == 0
    lost = m.replace_obstacle(but(after, generations=()), "x", is_held_back=False, loss="x")
    stopped = [events.Reported(host, reports.Stopped(lost.round, 8)) for host in "ab"]
    after, _ = advance_all(lost, *stopped)
    assert after.phase is m.Phase.WAITING
    ended, done = advance_all(after, events.Ticked(after.now + 1.0, 0))
    assert ended.phase is m.Phase.ENDED and done == [actions.EndJob(("a", "b"), 3, "x")]
    asked = but(after, looking=frozenset("ab"))
    waits, _ = advance_all(
        asked, events.Reported("a", reports.Attached((), ())), events.Ticked(after.now + 1.0, 0)
    )
    assert waits.phase is m.Phase.WAITING, "b may have something on its disk"
    waits, _ = advance_all(
        waits, events.Reported("b", reports.Attached((), ())), events.Ticked(after.now + 2.0, 0)
    )
    assert waits.phase is m.Phase.ENDED


def test_a_signal_before_the_proof_is_chance_once_and_sigbus_never() -> None:
    job = all_published(starting().job)
    killed = {"reason": "rank 0 was killed by SIGKILL", "is_chance": True}
    after, _ = advance_all(job, raised(job, **killed))  # type: ignore[arg-type]
    assert after.phase is m.Phase.STOPPING and after.budget.was_start_killed
    again = but(job, was_start_killed=True)
    after, _ = advance_all(again, raised(job, **killed))  # type: ignore[arg-type]
    assert after.phase is m.Phase.EXAMINING
    after, _ = advance_all(job, raised(job, "rank 0 was killed by SIGBUS", is_chance=True))
    assert after.phase is m.Phase.EXAMINING


def test_what_fails_behind_the_proof_or_before_anything_is_read_is_not_examined() -> None:
    job = starting().job
    for each in (job, proven(job), but(all_published(job), attempt=m.Attempt(None))):
        after, _ = advance_all(each, raised(each))
        assert after.phase is m.Phase.STOPPING


def test_a_host_that_is_lost_in_an_examination_is_not_waited_for() -> None:
    simulation = starting()
    simulation.job = all_published(simulation.job)
    simulation.feed(raised(simulation.job))
    simulation.lose("a")
    assert simulation.job.phase is m.Phase.EXAMINING and simulation.job.awaited == {"b"}
    simulation.feed(events.Reported("b", reports.Examined(1, (), "/d")))
    assert simulation.job.phase is m.Phase.STOPPING


def test_an_examination_that_takes_too_long_is_done_without_those_that_are_awaited() -> None:
    job = all_published(starting().job)
    job, _ = advance_all(job, raised(job), events.Ticked(1000.0, 0), *examined(hosts="a"))
    after, _ = advance_all(job, events.Ticked(1001.0, 0), events.Ticked(4000.0, 0))
    assert after.phase is m.Phase.STOPPING, "the agent of b hangs in a read, say"


@pytest.mark.fault
def test_damage_that_is_found_in_the_training_makes_room_for_an_older_generation() -> None:
    job = but(
        starting().job, phase=m.Phase.RUNNING, generations=(m.Generation(3, 20, frozenset("ab")),)
    )
    suspected = events.Reported("b", reports.Suspected(4, ("b", "gone"), "it differs"))
    assert advance_all(job, suspected)[1] == [actions.Send(("b",), commands.Examine(4))]
    after, done = advance_all(but(job, replicated=(4, frozenset("ab"))), *examined("b", "b", 4))
    assert done[-1] == actions.GoBack(("a", "b"), 3) and after.copies.replicated is None
    assert advance_all(job, *examined("", "b", 4)) == (job, [])
    _, done = advance_all(job, *examined("b", "b", 3))
    assert not done, "others have all of it"


def test_damage_that_is_found_in_a_start_from_it_begins_it_again_at_no_restart() -> None:
    job = starting().job
    assert advance_all(job, events.Reported("b", reports.Suspected(1, ("b",), "it differs"))) == (
        job,
        [],
    ), "it may do without"
    after, _ = advance_all(job, *examined("b", "b"))
    assert after.phase is m.Phase.STOPPING and after.budget.left == job.budget.left
    assert advance_all(proven(job), *examined("b", "b"))[0].phase is m.Phase.STARTING
