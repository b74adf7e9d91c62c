"""The rules of membership: the phases of a start, and what comes of a proof."""

from dataclasses import replace
from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.core.job.resize import advance
from scalai.core.messages import actions, events
from support.membership_jobs import two_hosts, until
from support.membership_simulation import Simulation


def starting() -> Simulation:
    """Return a job on hosts a and b at the begin of a round with a source."""
    simulation = two_hosts()
    simulation.feed(events.WorkersFailed("a", simulation.job.round, "died"))
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
        kind(host, job.round) for kind in (events.Published, events.Restored) for host in "ab"
    ]
    return advance_all(job, *reported, events.Proven(job.round))[0]


def test_each_phase_of_a_start_waits_for_the_workers_of_all_hosts() -> None:
    job = starting().job
    round = job.round
    job, done = advance_all(job, events.Published("a", round))
    assert not done and job.progress == {"a": "published"}
    job, done = advance_all(job, events.Published("b", round), events.Restored("b", round))
    assert done == [actions.Expect(("a", "b"))]
    job, done = advance_all(job, events.Restored("a", round))
    assert done == [actions.Prove(1)] and job.progress == {"a": "restored", "b": "restored"}
    job, done = advance_all(job, events.Proven(round))
    assert done == [actions.Proceed(("a", "b"))]


@pytest.mark.parametrize("kind", [events.Published, events.Restored])
def test_what_is_told_twice_or_of_another_round_or_by_nobody_begins_nothing(
    kind: type[events.Published | events.Restored],
) -> None:
    job, round = starting().job, starting().job.round
    strange = [kind("a", round), kind("a", round), kind("b", round - 1), kind("c", round)]
    reported, done = advance_all(job, *strange)
    assert not done and reported.awaited == {"a", "b"}
    reported, done = advance_all(reported, kind("b", round), kind("b", round), kind("a", round))
    assert len(done) == 1, "once"


def test_a_proof_that_passes_lets_the_workers_go_on_once() -> None:
    job = proven(starting().job)
    assert advance_all(job, events.Proven(job.round), events.Proven(job.round - 1)) == (job, [])


def test_a_round_with_nothing_to_restore_proves_nothing() -> None:
    job = starting().job
    job = replace(job, start=m.Start(None))
    reported = [
        kind(host, job.round) for kind in (events.Published, events.Restored) for host in "ab"
    ]
    _, done = advance_all(job, *reported)
    assert done == [actions.Expect(("a", "b"))]


def test_a_start_begins_with_what_the_earlier_round_left() -> None:
    simulation = starting()
    *_, discard, back, start = simulation.logged
    assert discard == actions.Discard(("a", "b")) and back == actions.GoBack(("a", "b"), 1)
    assert isinstance(start, actions.StartRound) and start.generation == 1
    simulation.job = proven(simulation.job)
    simulation.feed(events.WorkersFailed("b", simulation.job.round, "died"))
    until(simulation, m.Phase.STARTING)
    assert simulation.job.start == m.Start(1), "what was told of the round before is forgotten"


def test_a_host_that_is_lost_in_a_start_ends_its_round_and_its_word_does_not_count() -> None:
    simulation = starting()
    round = simulation.job.round
    simulation.feed(events.Published("a", round))
    simulation.lose("a")
    assert simulation.job.phase is m.Phase.STOPPING
    simulation.join("a", 2, {1: frozenset(range(4))})
    before = len(simulation.logged)
    simulation.feed(events.Published("a", round))  # who has just come has no workers of it
    assert len(simulation.logged) == before


def test_a_script_that_nothing_hooked_at_first_may_publish_while_the_job_runs() -> None:
    job = starting().job
    round = job.round
    late: list[events.Event] = [
        events.Unhooked("a", round),
        events.Hooked("a", round),
        events.Published("a", round),
    ]
    job, done = advance_all(job, *late, events.Published("b", round))
    assert job.phase is m.Phase.RUNNING and done[-1] == actions.Expect(("a", "b"))


def failed_proof(job: m.Job, *, is_second: bool = False, can_reread: bool = True) -> Any:
    return events.ProofFailed(job.round, "it differs", is_second, can_reread)


def examined(damaged: str = "", hosts: str = "ab", number: int = 1) -> list[events.Event]:
    return [events.Examined(host, number, host in damaged) for host in hosts]


def test_a_failed_proof_is_examined_and_what_was_fetched_goes_where_nothing_is_damaged() -> None:
    job = starting().job
    after, done = advance_all(job, failed_proof(job))
    assert after.phase is m.Phase.EXAMINING and after.awaited == {"a", "b"}
    assert done[-1] == actions.Examine(("a", "b"), 1)
    after, done = advance_all(after, *examined())
    assert done[0] == actions.Doubt(("a", "b"), 1)
    assert isinstance(done[-1], actions.StopWorkers), "the doubt is told before"
    assert after.phase is m.Phase.STOPPING and after.failures_left == job.failures_left


def test_a_second_host_that_says_so_in_the_same_round_changes_nothing() -> None:
    job = starting().job
    second = failed_proof(job, is_second=True, can_reread=False)
    after, done = advance_all(job, failed_proof(job), second, *examined())
    assert actions.Doubt(("a", "b"), 1) in done and after.phase is m.Phase.STOPPING


def test_what_there_is_nothing_else_of_is_not_given_up_for_a_failed_proof() -> None:
    job = starting().job
    _, done = advance_all(job, failed_proof(job, can_reread=False), *examined())
    assert not any(isinstance(action, actions.Doubt) for action in done)
    said = [action.text for action in done if isinstance(action, actions.Say)]
    assert any("generation 1 stays as it is" in text for text in said)


def test_where_damage_is_found_what_was_fetched_stays_and_the_start_counts_as_no_failure() -> None:
    job = starting().job
    after, done = advance_all(job, failed_proof(job), *examined("b"))
    assert not any(isinstance(action, actions.Doubt) for action in done)
    assert after.phase is m.Phase.STOPPING and after.failures_left == job.failures_left


def test_the_second_failed_proof_of_a_generation_ends_the_job() -> None:
    job = starting().job
    after, done = advance_all(job, failed_proof(job, is_second=True))
    assert after.phase is m.Phase.ENDED
    assert done == [actions.Exit(("a", "b"), 3, "it differs")]


@pytest.mark.parametrize("is_second", [False, True])
def test_a_proof_that_fails_while_the_round_is_stopped_is_examined_and_stops_nothing(
    is_second: bool,
) -> None:
    simulation = starting()
    simulation.feed(events.WorkersFailed("a", simulation.job.round, "died"))
    job = simulation.job
    failed = failed_proof(job, is_second=is_second)
    after, done = advance_all(job, failed)
    assert after == job
    assert done == ([] if is_second else [actions.Examine(("a", "b"), 1)])
    assert advance_all(job, replace(failed, round=job.round - 1)) == (job, [])


def published(job: m.Job) -> m.Job:
    return advance_all(job, *(events.Published(host, job.round) for host in "ab"))[0]


def raised(job: m.Job, reason: str = "AssertionError", **how: bool) -> events.Event:
    return events.WorkersFailed("a", job.round, reason, **how)


def test_what_workers_raise_before_the_proof_is_their_failure_where_all_parts_are_whole() -> None:
    job = published(starting().job)
    after, done = advance_all(job, raised(job))
    assert after.phase is m.Phase.EXAMINING and after.failures_left == job.failures_left
    assert done[-1] == actions.Examine(("a", "b"), 1)
    after, _ = advance_all(after, *examined(hosts="b"))
    assert after.awaited == {"a"}
    after, _ = advance_all(after, *examined(hosts="a"))
    assert after.phase is m.Phase.STOPPING and after.failures_left == job.failures_left - 1


def test_a_refusal_before_the_proof_ends_the_job_once_all_parts_are_known_to_be_whole() -> None:
    job = published(starting().job)
    after, done = advance_all(job, raised(job, "no", is_refusal=True), *examined())
    assert after.phase is m.Phase.ENDED and done[-1] == actions.Exit(("a", "b"), 3, "no")
    after, _ = advance_all(job, raised(job, "no", is_refusal=True), *examined("a"))
    assert after.phase is m.Phase.STOPPING


def test_what_fails_for_damage_costs_nothing_however_often_and_the_last_state_ends_the_job() -> (
    None
):
    job = published(starting().job)
    after, _ = advance_all(replace(job, failures_left=0), raised(job), *examined("a"))
    assert after.phase is m.Phase.STOPPING and after.failures_left == 0
    lost = m.replace_obstacle(replace(after, generations=()), "x", is_held_back=False, loss="x")
    stopped = [events.Stopped(host, lost.round, 8) for host in "ab"]
    after, _ = advance_all(lost, *stopped)
    assert after.phase is m.Phase.WAITING
    ended, done = advance_all(after, events.Ticked(after.now + 1.0, 0))
    assert ended.phase is m.Phase.ENDED and done == [actions.Exit(("a", "b"), 3, "x")]
    asked = replace(after, looking=frozenset("ab"))
    waits, _ = advance_all(asked, events.Looked("a", 1.0), events.Ticked(after.now + 1.0, 0))
    assert waits.phase is m.Phase.WAITING, "b may have something on its disk"
    waits, _ = advance_all(waits, events.Looked("b", 1.0), events.Ticked(after.now + 2.0, 0))
    assert waits.phase is m.Phase.ENDED


def test_a_signal_before_the_proof_is_chance_once_and_sigbus_never() -> None:
    job = published(starting().job)
    killed = {"reason": "rank 0 was killed by SIGKILL", "is_chance": True}
    after, _ = advance_all(job, raised(job, **killed))  # type: ignore[arg-type]
    assert after.phase is m.Phase.STOPPING and after.was_start_killed
    again = replace(job, was_start_killed=True)
    after, _ = advance_all(again, raised(job, **killed))  # type: ignore[arg-type]
    assert after.phase is m.Phase.EXAMINING
    after, _ = advance_all(job, raised(job, "rank 0 was killed by SIGBUS", is_chance=True))
    assert after.phase is m.Phase.EXAMINING


def test_what_fails_behind_the_proof_or_before_anything_is_read_is_not_examined() -> None:
    job = starting().job
    for each in (job, proven(job), replace(published(job), start=m.Start(None))):
        after, _ = advance_all(each, raised(each))
        assert after.phase is m.Phase.STOPPING


def test_a_host_that_is_lost_in_an_examination_is_not_waited_for() -> None:
    simulation = starting()
    simulation.job = published(simulation.job)
    simulation.feed(raised(simulation.job))
    simulation.lose("a")
    assert simulation.job.phase is m.Phase.EXAMINING and simulation.job.awaited == {"b"}
    simulation.feed(events.Examined("b", 1, False))
    assert simulation.job.phase is m.Phase.STOPPING


def test_an_examination_that_takes_too_long_is_done_without_those_that_are_awaited() -> None:
    job = published(starting().job)
    job, _ = advance_all(job, raised(job), events.Ticked(1000.0, 0), *examined(hosts="a"))
    after, _ = advance_all(job, events.Ticked(1001.0, 0), events.Ticked(4000.0, 0))
    assert after.phase is m.Phase.STOPPING, "the agent of b hangs in a read, say"


def test_damage_that_is_found_in_the_training_makes_room_for_an_older_generation() -> None:
    job = replace(
        starting().job, phase=m.Phase.RUNNING, generations=(m.Generation(3, 20, frozenset("ab")),)
    )
    suspected = events.Suspected(("b", "gone"), 4)
    assert advance_all(job, suspected)[1] == [actions.Examine(("b",), 4)]
    after, done = advance_all(replace(job, replicated=(4, frozenset("ab"))), *examined("b", "b", 4))
    assert done[-1] == actions.GoBack(("a", "b"), 3) and after.replicated is None
    assert advance_all(job, *examined("", "b", 4)) == (job, [])
    _, done = advance_all(job, *examined("b", "b", 3))
    assert not done, "others have all of it"


def test_damage_that_is_found_in_a_start_from_it_begins_it_again_at_no_restart() -> None:
    job = starting().job
    assert advance_all(job, events.Suspected(("b",), 1)) == (job, []), "it may do without"
    after, _ = advance_all(job, *examined("b", "b"))
    assert after.phase is m.Phase.STOPPING and after.failures_left == job.failures_left
    assert advance_all(proven(job), *examined("b", "b"))[0].phase is m.Phase.STARTING
