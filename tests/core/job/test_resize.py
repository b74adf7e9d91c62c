"""Changes: hosts that come and go, requests, stops, and workers that are built beside others."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.exit_codes import RESUMABLE
from scalai.core.job import membership as m
from scalai.core.job.deadlines import ANSWER_S
from scalai.core.job.membership import Phase, active, staying
from scalai.core.job.resize import advance
from scalai.core.messages import actions, commands, events, reports
from support.laws import (
    advance_all,
    assign_all,
    at,
    but,
    generations,
    joined,
    kinds,
    lines,
    made,
    ordered,
    ticked,
    told,
    training,
    until,
)
from support.two_laws import Train


def leaving(host: str, job: m.Job) -> events.HostLeaving:
    return events.HostLeaving(host, job.now)


def rescaled(*allowed: int, minimum: int = 1) -> events.Rescaled:
    return events.Rescaled(assign_all(minimum, allowed), 100.0)


# ---------------------------------------------------------------------- who comes and goes


def test_a_full_job_starts_at_once_and_a_smaller_one_once_it_has_settled() -> None:
    job = made(assign=assign_all(), max_hosts=2, settle_s=1.0)
    alone, _ = advance_all(job, joined(job, "a"), events.Ticked(0.9, 0))
    assert alone.phase is Phase.WAITING
    assert advance_all(alone, events.Ticked(1.1, 0))[0].phase is Phase.STARTING
    assert advance_all(alone, joined(job, "b"))[0].phase is Phase.STARTING


def test_two_joins_within_the_settling_time_are_one_change() -> None:
    job = training("a", max_hosts=4, settle_s=1.0)
    job, _ = advance_all(job, joined(job, "b"))
    job, _ = ticked(job, 0.5)
    job, _ = advance_all(job, joined(job, "c"))
    job, due = ticked(job, 0.8)
    assert job.phase is Phase.RUNNING and not due
    job, due = ticked(job, 0.3)
    assert kinds(due) == [commands.Prepare]
    job = until(job, Phase.STARTING)
    assert job.current is not None and job.current.degrees.world_size == 3


def test_the_first_host_may_drain_and_nothing_is_lost(begin: Train) -> None:
    world = begin()
    world.leave("a")
    world.settle()
    assert world.is_training() and world.active == "b" and world.hosts["a"].agent.exit == 0
    last = world.rounds[-1]
    assert last.assignment.active == ("b",) and last.steps_lost == 0 and world.job.budget.left == 9


def test_hosts_that_stay_keep_their_order() -> None:
    job = training("cab", max_hosts=3)
    job = until(advance_all(job, leaving("c", job))[0], Phase.RUNNING)
    job, _ = advance_all(job, joined(job, "c"))
    assert [name for name, _ in staying(job)] == ["a", "b", "c"]


def test_an_idle_host_comes_and_goes_without_a_resize() -> None:
    job = training("a", idle="b")
    job, due = advance_all(job, leaving("b", job))
    assert actions.Release(1, 2, ("b",)) in due and job.phase is Phase.RUNNING
    job, due = advance_all(job, joined(job, "c"))
    later, more = ticked(job)
    assert later.phase is Phase.RUNNING and not kinds([*due, *more])


def test_where_no_world_fits_without_a_leaving_host_the_job_goes_on_with_it() -> None:
    job = training("ab", assign=assign_all(minimum=2), max_hosts=3, has_durable_dir=False)
    job, due = advance_all(job, leaving("a", job))
    assert job.phase is Phase.RUNNING and "no allowed world fits" in lines(due)
    job, _ = advance_all(job, joined(job, "c"))
    job = until(ticked(job)[0], Phase.RUNNING)
    assert set(job.hosts) == {"b", "c"} == active(job)


def test_a_second_change_during_a_resize_starts_again_from_the_same_generation(
    begin: Train,
) -> None:
    world = begin("a")
    world.add("b")
    world.until(Phase.STARTING)
    world.add("c")
    world.act("c", "net")
    world.tick(2.0)
    assert world.phase is Phase.STOPPING
    world.settle()
    first, second = world.rounds[-2:]
    assert first.generation == second.generation and second.steps_lost <= 1
    assert world.is_training() and second.assignment.degrees.world_size == 6


@pytest.mark.fault
def test_a_host_may_leave_a_job_that_has_not_begun() -> None:
    job = made(assign=assign_all(minimum=3), max_hosts=3)
    job, _ = advance_all(job, joined(job, "a"), joined(job, "b"))
    job, due = advance_all(job, leaving("a", job))
    assert due == [actions.Release(0, None, ("a",))]
    _, due = advance_all(job, leaving("b", job))
    assert [(e.hosts, e.code) for e in due if isinstance(e, actions.EndJob)] == [(("b",), 75)]


@pytest.mark.fault
def test_a_last_host_that_leaves_before_any_step_begins_anew_by_the_same_command() -> None:
    job = made(assign=assign_all(), max_hosts=1)
    job, _ = advance_all(job, joined(job, "a"))
    assert job.phase is Phase.STARTING
    job, _ = advance_all(job, leaving("a", job))
    _, due = advance_all(job, *told("a", reports.Stopped(job.round)))
    assert [each.code for each in due if isinstance(each, actions.EndJob)] == [RESUMABLE]


def all_leave(**settings: Any) -> tuple[m.Job, list[actions.Action]]:
    """Return a job that both hosts leave, once their workers are gone."""
    job = training("ab", **settings)
    job, _ = advance_all(job, leaving("a", job), leaving("b", job))
    job = until(job, Phase.STOPPING)
    return advance_all(job, *told("ab", reports.Stopped(1, 26)))


@pytest.mark.parametrize(
    ("what", "code"),
    [([reports.Saved(), reports.Saved()], 75), ([reports.Saved("no space left")], 1), ([None], 1)],
    ids=["saved", "full", "lost"],
)
def test_the_last_host_saves_to_the_durable_directory_and_the_job_is_resumable(
    what: list[reports.Saved | None], code: int
) -> None:
    job, due = all_leave()
    assert job.phase is Phase.SAVING and ordered(due[-1]) == commands.Save(10)
    for host, said in zip("ba", what, strict=False):
        lost = events.HostLost(host, job.states.generations, 101.0)
        job, due = advance_all(job, events.Reported(host, said) if said else lost)
    assert [(e.hosts, e.code) for e in due if isinstance(e, actions.EndJob)] == [
        (("a",) if what == [None] else ("a", "b"), code)
    ]


def test_a_last_host_whose_steps_are_not_saved_has_failed() -> None:
    _, due = all_leave(has_durable_dir=False)
    assert [each.code for each in due if isinstance(each, actions.EndJob)] == [1]


def test_an_ended_job_stays_ended() -> None:
    ended = but(training("ab"), phase=Phase.ENDED)
    covered = ended.states.generations
    for event in (
        joined(ended, "z"), leaving("a", ended), events.HostLost("a", covered, 9.0),
        events.Ticked(99.0, 3), *told("a", reports.WorkersFailed(1, "late"), reports.Finished(1)),
    ):  # fmt: skip
        assert advance(ended, event) == (ended, ())


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.DRAINING])
def test_the_job_is_done_when_the_workers_of_every_host_are(phase: Phase) -> None:
    """Also while a stop waits for them."""
    job = at(phase) if phase is Phase.DRAINING else training("ab")
    job, due = advance_all(job, *told("a", reports.Finished(1)))
    assert job.phase is phase and not due
    _, due = advance_all(job, *told("b", reports.Finished(1)))
    assert [(e.hosts, e.code) for e in due if isinstance(e, actions.EndJob)] == [(("a", "b"), 0)]


def test_idle_hosts_do_not_make_an_assignment_another_one_and_other_passes_do() -> None:
    small = m.Assignment((("a", 2),), Degrees(1, 1, 2), 1, "")
    assert small.is_same_as(m.Assignment((("a", 2), ("b", 0)), Degrees(1, 1, 2), 1, "other"))
    assert not small.is_same_as(m.Assignment((("a", 2),), Degrees(2, 1, 1), 1, ""))
    assert not small.is_same_as(replace(small, micro_batch_size=2))
    assert not small.is_same_as(replace(small, recompute="full"))


# ---------------------------------------------------------------------- the stop


def test_a_stop_that_comes_too_late_is_taken_back_and_tried_with_more_margin() -> None:
    job, stops = at(Phase.PREPARING), []
    for _ in range(4):
        stops.append(job.stop.step)
        job, due = advance_all(job, *told("ab", reports.Prepared(1, stops[-1], stops[-1])))
        # The hosts forget the old stop before they hear of the new one.
        assert kinds(due) == [commands.Withdraw, commands.Prepare]
    assert [later - sooner for sooner, later in pairwise(stops)] == [2, 4, 8]
    job = until(job, Phase.DRAINING)
    assert job.stop.margin == 1


@pytest.mark.fault
def test_a_change_of_replicas_that_differ_is_refused_by_name_and_the_job_trains_on() -> None:
    job = at(Phase.DRAINING)
    job, due = advance_all(job, *told("b", reports.Arrived(1, job.stop.step, "'w' on ranks [0]")))
    assert job.phase is Phase.RUNNING and job.budget.left == 3
    assert commands.Withdraw(1) in map(ordered, due)
    assert "replicas that differ: 'w' on ranks [0]" in lines(due)


@pytest.mark.fault
def test_replicas_that_differ_keep_no_host_from_leaving_and_are_named() -> None:
    job = training("ab")
    job = until(advance_all(job, leaving("a", job))[0], Phase.DRAINING)
    job, due = advance_all(job, *told("b", reports.Arrived(1, job.stop.step, "'w'")))
    assert job.awaited == {"a"} and "event=replicas_differ host b holds" in lines(due)


@pytest.mark.fault
def test_a_stop_that_a_rank_does_not_come_to_is_taken_back_and_tried_again_later(
    begin: Train,
) -> None:
    world = begin()
    world.hang("b", is_late=True)
    world.scale(2)
    world.settle(70.0)
    assert world.logged("tried again after 60 s") and world.phase is Phase.RUNNING
    world.hang("b", is_late=False)
    world.settle()
    last = world.rounds[-1]
    assert world.is_training() and last.assignment.degrees.world_size == 2 and not last.steps_lost
    assert world.job.budget.left == 9 and world.job.change.withdrawn == 0


@pytest.mark.fault
def test_each_further_try_of_such_a_change_comes_later() -> None:
    job, waits = at(Phase.DRAINING, training("ab", drain_timeout_s=10.0)), list[float]()
    for _ in range(4):
        job, _ = ticked(job)
        job, due = ticked(job, 11.0)
        assert job.phase is Phase.RUNNING and job.change.again_at is not None
        waits.append(job.change.again_at - job.now)
        assert f"tried again after {waits[-1]:.0f} s" in lines(due)
        assert not kinds(ticked(job, waits[-1] - 1.0)[1])
        job = until(ticked(job, waits[-1])[0], Phase.DRAINING)
    assert waits == [10.0, 20.0, 40.0, 80.0]


@pytest.mark.fault
@pytest.mark.parametrize("what", [leaving("a", training("a")), rescaled(1)], ids=["leave", "scale"])
def test_what_was_said_during_a_stop_that_is_taken_back_is_met_at_once(what: events.Event) -> None:
    job, _ = advance_all(at(Phase.DRAINING), what)
    job, _ = ticked(ticked(job)[0], 121.0)
    assert job.phase is Phase.RUNNING
    assert ticked(job)[0].phase is Phase.PREPARING


# ---------------------------------------------------------------------- a save in flight


def held(*hosts: str) -> m.Job:
    """Return a job whose change waits for a save on these hosts."""
    job = at(Phase.PREPARING)
    return advance_all(job, *told("".join(hosts), reports.Held(1, job.stop.step, "a save")))[0]


@pytest.mark.fault
def test_a_change_waits_for_a_save_however_long_it_takes_and_loses_nobody() -> None:
    job = held("a", "b")
    for second in range(40):
        job, due = ticked(job, ANSWER_S / 2)
        again = reports.Held(1, job.stop.step, f"a save, {second}")
        job, more = advance_all(job, *told("ab", again))
        assert not kinds([*due, *more]) and set(job.stop.held) == {"a", "b"}
    job = until(job, Phase.DRAINING)
    assert not job.stop.held and job.budget.left == 3


@pytest.mark.fault
def test_a_host_that_does_not_answer_is_lost_all_the_same() -> None:
    _, due = ticked(ticked(held("a"))[0], ANSWER_S + 1.0)
    assert [each.hosts for each in due if isinstance(each, actions.Lose)] == [("b",)]


@pytest.mark.fault
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_save_that_begins_on_the_way_to_a_stop_puts_it_off(first: str) -> None:
    job = at(Phase.DRAINING)
    stop = job.stop.step
    job, due = advance_all(job, *told(first, reports.Held(1, stop, "a save that began")))
    assert job.phase is Phase.PREPARING and job.stop.step > stop and job.change.withdrawn == 0
    assert kinds(due) == [commands.Withdraw, commands.Prepare]
    assert f"the stop at step {stop} is put off" in lines(due)


def test_workers_that_die_while_a_change_waits_are_a_failure_as_ever() -> None:
    job, _ = advance_all(held("a", "b"), *told("a", reports.WorkersFailed(1, "killed")))
    assert job.phase is Phase.STOPPING and not job.stop.held and job.budget.left == 2


def test_what_is_told_of_another_stop_is_no_news() -> None:
    job = held("a")
    for round, stop in ((1, job.stop.step + 1), (2, job.stop.step)):
        assert advance_all(job, *told("b", reports.Held(round, stop, "of another"))) == (job, [])


def test_a_request_that_is_taken_back_while_the_change_waits_for_a_save_costs_no_round() -> None:
    job, due = advance_all(held("a", "b"), rescaled(1, 2))
    assert job.phase is Phase.RUNNING and not job.stop.held and kinds(due) == [commands.Withdraw]
    assert not kinds(ticked(job, 200.0)[1])
    job, due = advance_all(job, rescaled(1))
    assert job.phase is Phase.PREPARING, "a later one is met"


def test_an_idle_host_that_leaves_again_while_its_change_waits_for_a_save_is_let_go() -> None:
    job = training("ab", max_hosts=3)
    job = ticked(advance_all(job, joined(job, "c"))[0])[0]
    job, _ = advance_all(job, *told("ab", reports.Held(1, job.stop.step, "a save")))
    job, due = advance_all(job, leaving("c", job))
    assert job.phase is Phase.RUNNING and set(job.hosts) == {"a", "b"}
    assert actions.Release(1, 2, ("c",)) in due


# ---------------------------------------------------------------------- workers on standby


def building(**settings: Any) -> m.Job:
    """Return a job on a and b that has begun to build for c as well."""
    job = training("ab", **{"max_hosts": 3, "build_timeout_s": 30.0, **settings})
    job, due = advance_all(job, joined(job, "c"), events.Ticked(job.now + 1.0, 25))
    assert job.phase is Phase.BUILDING or len(job.hosts) < job.settings.max_hosts, due
    return job if job.phase is Phase.BUILDING else ticked(job)[0]


def test_workers_train_on_while_the_next_ones_build_and_stop_once_all_have_built() -> None:
    job = building()
    assert job.change.standby is not None
    built = reports.Built(job.change.standby.round)
    job, due = advance_all(job, *told("ab", built))
    assert job.phase is Phase.BUILDING and not due
    done: list[actions.Action] = []
    job, due = advance_all(ticked(job)[0], *told("c", built))
    assert kinds(due) == [commands.Prepare]
    job = until(job, Phase.RUNNING, done)
    (start,) = [each for each in done if isinstance(each, actions.StartRound)]
    assert start.is_built and start.steps_lost == 0 and active(job) == {"a", "b", "c"}
    assert start.generation == 10, "of the stop, not of the start"


def test_a_host_that_leaves_is_not_kept_by_what_is_built() -> None:
    job = training("ab", build_timeout_s=30.0)
    job, due = advance_all(job, leaving("a", job))
    assert kinds(due) == [actions.BuildRound, commands.Prepare]
    assert job.phase is Phase.PREPARING


def test_where_a_host_cannot_build_the_workers_start_after_the_stop() -> None:
    job, done = building(), list[actions.Action]()
    assert job.change.standby is not None
    job, due = advance_all(job, *told("b", reports.Built(job.change.standby.round, "no room")))
    assert kinds(due) == [commands.GiveUp, commands.Prepare] and "no room" in lines(due)
    until(job, Phase.STARTING, done)
    (start,) = [each for each in done if isinstance(each, actions.StartRound)]
    assert not start.is_built
    assert start.round == 3, "the number of what was given up is not used again"


def test_what_takes_too_long_to_build_is_given_up() -> None:
    job, due = ticked(ticked(building())[0], 25.0)
    assert job.phase is Phase.BUILDING and not due
    job, due = ticked(job, 6.0)
    assert kinds(due) == [commands.GiveUp, commands.Prepare]


def test_another_change_while_they_build_builds_anew() -> None:
    job = building(max_hosts=4)
    job, due = advance_all(job, joined(job, "d"))
    assert kinds(due) == [commands.GiveUp, actions.BuildRound]
    assert len(job.awaited) == 4


def test_a_change_that_is_taken_back_leaves_the_job_as_it_is() -> None:
    job, due = advance_all(building(), rescaled(2))
    assert job.phase is Phase.RUNNING and kinds(due) == [commands.GiveUp]
    assert not kinds(ticked(job, 100.0)[1])


@pytest.mark.parametrize(("victim", "left"), [("a", 2), ("c", 3)])
def test_a_host_that_is_lost_takes_what_was_built_with_it(victim: str, left: int) -> None:
    """The loss of a host whose workers train is a failure, that of the newcomer is none."""
    job = building()
    job, due = advance_all(job, events.HostLost(victim, job.states.generations, job.now))
    assert commands.GiveUp(2) in map(ordered, due) and job.budget.left == left
    assert job.phase is (Phase.STOPPING if victim == "a" else Phase.RUNNING)


def test_workers_that_fail_while_others_build_start_again_without_what_was_built() -> None:
    """It expected a state that is newer than any checkpoint."""
    job, done = building(), list[actions.Action]()
    job, due = advance_all(job, *told("b", reports.WorkersFailed(1, "rank 3 died")))
    assert commands.GiveUp(2) in map(ordered, due) and job.budget.left == 2
    until(job, Phase.STARTING, done)
    (start,) = [each for each in done if isinstance(each, actions.StartRound)]
    assert not start.is_built and start.steps_lost == 5


def test_what_was_built_may_fail_once_and_is_not_counted() -> None:
    job = until(building(left=0), Phase.STARTING)
    assert job.attempt.was_standby
    job, _ = advance_all(job, *told("c", reports.WorkersFailed(job.round, "rank 4 died")))
    assert job.phase is Phase.STOPPING
    job = until(job, Phase.RUNNING)
    again = but(job, phase=Phase.STARTING)
    ended, _ = advance_all(again, *told("c", reports.WorkersFailed(job.round, "rank 4 died")))
    assert ended.phase is Phase.ENDED


# ---------------------------------------------------------------------- the room for a snapshot


def two_generations(**facts: Any) -> m.Job:
    """Return a job whose hosts have yet to rename their parts of a newer generation."""
    return training("ab", generations=generations("ab", 1, 2), uncommitted=frozenset("ab"), **facts)


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.PREPARING, Phase.DRAINING])
def test_a_snapshot_replaces_the_older_generation_only_once_every_host_has_it(phase: Phase) -> None:
    """Also on the way to a stop, whose snapshot needs the room."""
    job = two_generations() if phase is Phase.RUNNING else at(phase, two_generations())
    job, due = advance_all(job, *told("a", reports.Committed(2)))
    assert not due
    job, due = advance_all(job, *told("b", reports.Committed(2)))
    assert due == [actions.Release(1, 2, ())]


def test_an_idle_host_that_goes_during_a_snapshot_does_not_keep_older_generations() -> None:
    job = training("ab", "c", generations=generations("ab", 1, 2), uncommitted=frozenset("ab"))
    job, _ = advance_all(job, events.HostLost("c", job.states.generations, job.now))
    _, due = advance_all(job, *told("ab", reports.Committed(2)))
    assert due == [actions.Release(1, 2, ())]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("covered", "phase"), [((1, 2), Phase.DRAINING), ((1,), Phase.STOPPING)], ids=["whole", "lost"]
)
def test_a_host_lost_in_a_drain_with_a_snapshot_to_rename_leaves_nobody_without_room(
    covered: tuple[int, ...], phase: Phase
) -> None:
    """Where the snapshot is whole without it, older ones go; where not, nobody waits for room."""
    job = at(Phase.DRAINING, two_generations())
    job, _ = advance_all(job, *told("a", reports.Committed(2)))
    job, due = advance_all(job, events.HostLost("b", generations("a", *covered), job.now))
    assert job.phase is phase and (actions.Release(1, 2, ()) in due) is (phase is Phase.DRAINING)
