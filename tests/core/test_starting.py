"""The rules of membership: the phases of a start, and what comes of a proof."""

from dataclasses import replace

import pytest

from scalai.core import actions, events
from scalai.core import membership as m
from scalai.core.resize import advance
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


def test_the_first_failed_proof_is_fetched_anew_and_costs_no_restart() -> None:
    job = starting().job
    failed = events.ProofFailed(job.round, "it differs", is_second=False, can_reread=True)
    after, done = advance_all(job, failed)
    assert done[0] == actions.Doubt(("a", "b"), 1)
    assert isinstance(done[-1], actions.StopWorkers), "the doubt is told before"
    assert after.phase is m.Phase.STOPPING and after.failures_left == job.failures_left


def test_what_there_is_nothing_else_of_is_not_given_up_for_a_failed_proof() -> None:
    job = starting().job
    failed = events.ProofFailed(job.round, "it differs", is_second=False, can_reread=False)
    _, done = advance_all(job, failed)
    assert done[0] == actions.Doubt((), 1)
    assert isinstance(done[1], actions.Say) and "generation 1 stays as it is" in done[1].text


def test_the_second_failed_proof_of_a_generation_ends_the_job() -> None:
    job = starting().job
    failed = events.ProofFailed(job.round, "it differs twice", is_second=True, can_reread=False)
    after, done = advance_all(job, failed)
    assert after.phase is m.Phase.ENDED
    assert done == [actions.Exit(("a", "b"), 3, "it differs twice")]


@pytest.mark.parametrize("is_second", [False, True])
def test_a_proof_that_fails_while_the_round_is_stopped_is_recorded_and_stops_nothing(
    is_second: bool,
) -> None:
    simulation = starting()
    simulation.feed(events.WorkersFailed("a", simulation.job.round, "died"))
    job = simulation.job
    failed = events.ProofFailed(job.round, "it differs", is_second, can_reread=True)
    after, done = advance_all(job, failed)
    assert after == job
    assert done == ([] if is_second else [actions.Doubt(("a", "b"), 1)])
    assert advance_all(job, replace(failed, round=job.round - 1)) == (job, [])
