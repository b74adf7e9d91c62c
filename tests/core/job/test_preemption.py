"""A host that is told that it will be taken away."""

import pytest

from scalai.core.job import membership as m
from scalai.core.job.membership import Phase, active
from scalai.core.job.preemption import LATE_S
from scalai.core.job.spacing import Pace, estimate
from scalai.core.messages import actions, commands, events, reports
from support.laws import advance_all, but, generations, kinds, lines, ticked, told, until
from support.laws import training as trains

SLOW = Pace(step_s=60.0, write_s=2.0, start_s=3.0)
Due = list[actions.Action]


def training(workers: str = "abc") -> m.Job:
    """Return a job whose hosts hold generation 2 together, and whose steps take long."""
    return trains(workers, pace=SLOW)


def notice(
    job: m.Job, left_s: float | None, host: str = "c", *, is_final: bool = True
) -> tuple[m.Job, Due]:
    return advance_all(job, events.HostLeaving(host, job.now, "file", left_s, is_final))


def replicas(*hosts: str, order: int = 1, generation: int = 2) -> actions.MakeReplicas:
    """Return the order to copy what c alone holds."""
    return actions.MakeReplicas(hosts or ("a", "b"), order, generation, 1, ("c",))


@pytest.mark.fault
def test_a_notice_that_leaves_time_is_a_drain_and_says_the_estimate() -> None:
    job, due = notice(training(), 120.0)
    assert kinds(due) == [commands.Prepare]
    assert job.phase is Phase.PREPARING and job.hosts["c"].leave_by == 220.0
    assert "left_s=120" in lines(due) and "65.0 s: a step 60.0" in lines(due)


def test_where_a_drain_takes_too_long_what_only_that_host_holds_leaves_first() -> None:
    """Ahead of everything else, also of the stop, which is proposed all the same."""
    job, due = notice(training(), 30.0)
    assert kinds(due) == [actions.MakeReplicas, commands.Prepare] and replicas() in due
    assert "65.0 s" in lines(due) and "too long" in lines(due)
    job, due = advance_all(job, *told("ab", reports.Replicated(1, 100)))
    assert "event=evacuated generation=2 from=c bytes=200" in lines(due)
    assert not kinds(ticked(job)[1]), "once"


@pytest.mark.fault
def test_a_newer_generation_leaves_too() -> None:
    job, _ = notice(training(), 30.0)
    job, _ = advance_all(job, *told("ab", reports.Replicated(1, 100)))
    job, _ = advance_all(job, events.SnapshotJudged(("a", "b", "c"), 26, 3))
    job, due = ticked(job)
    assert not kinds(due), "its parts have no number yet"
    job, _ = advance_all(job, *told("abc", reports.Committed(3)))
    assert replicas(order=2, generation=3) in ticked(job)[1]


@pytest.mark.fault
def test_what_could_not_come_is_asked_for_again_soon_and_what_has_no_room_is_not() -> None:
    job, _ = notice(training(), 30.0)
    job, _ = advance_all(job, *told("a", reports.Replicated(1, 0, "c does not answer")))
    job, due = advance_all(job, *told("b", reports.Replicated(1, 0)))
    assert "no_replica" not in lines(due)
    job, due = ticked(job)
    assert not kinds(due)
    job, due = ticked(job, 1.5)
    assert replicas(order=2) in due
    job, _ = advance_all(job, *told("a", reports.Replicated(2, 0, "no room", is_lasting=True)))
    job, due = advance_all(job, *told("b", reports.Replicated(2, 0)))
    assert "failed=a" in lines(due) and not kinds(ticked(job, 10.0)[1])


def test_a_recommendation_without_a_deadline_drains_without_haste() -> None:
    job, due = notice(training(), None)
    assert kinds(due) == [commands.Prepare]
    assert job.hosts["c"].is_leaving and job.hosts["c"].leave_by is None
    assert not {actions.Lose, actions.MakeReplicas} & {*kinds(ticked(job, 50.0)[1])}


def test_a_signal_is_no_deadline_of_which_the_job_takes_leave() -> None:
    """The agent ends by itself, and a save in flight gives it more time."""
    job, due = notice(training(), 30.0, is_final=False)
    assert actions.MakeReplicas in kinds(due) and job.hosts["c"].leave_by is None


def test_the_same_notice_twice_counts_once_and_a_sooner_one_counts() -> None:
    job, _ = notice(training(), 600.0)
    assert notice(job, 600.0) == (job, [])
    sooner, due = notice(job, 20.0)
    assert sooner.hosts["c"].leave_by == 120.0 and actions.MakeReplicas in kinds(due)


@pytest.mark.fault
def test_the_others_go_on_without_a_host_whose_time_is_over() -> None:
    job, _ = notice(training(), 30.0)
    job, due = ticked(job, 30.0 + LATE_S - 0.5)
    assert actions.Lose not in kinds(due)
    job, due = ticked(job, 1.0)
    assert [each.hosts for each in due if isinstance(each, actions.Lose)] == [("c",)]
    assert actions.Lose not in kinds(ticked(job, 1.0)[1]), "said once"


def test_a_host_whose_time_is_over_and_that_is_late_in_its_phase_is_lost_once() -> None:
    job, _ = ticked(notice(training(), 30.0)[0])
    _, due = ticked(job, 100.0)
    assert [each.hosts for each in due if isinstance(each, actions.Lose)] == [("c",)]


def test_a_host_that_is_killed_after_it_gave_what_it_held_costs_the_steps_since_alone() -> None:
    job, _ = notice(training(), 10.0)
    job, _ = advance_all(job, *told("ab", reports.Replicated(1, 100)))
    assert job.copies.evacuated == (2, frozenset("c"))
    job, _ = advance_all(job, events.HostLost("c", generations("ab", 2), job.now))
    job, done = until(job, Phase.STARTING), list[actions.Action]()
    assert job.attempt.source == 2 and active(until(job, Phase.RUNNING, done)) == {"a", "b"}


def withdrawn(phase: Phase) -> m.Job:
    """Return a job whose host b was told to go, and that it stays, in a phase of its drain."""
    job, _ = notice(trains("ab"), 600.0, "b")
    job = job if phase is Phase.RUNNING else until(job, phase)
    return advance_all(job, *told("b", reports.Staying()))[0]


@pytest.mark.fault
@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.DRAINING])
def test_a_notice_that_is_withdrawn_before_anybody_has_written_leaves_the_job_as_it_was(
    phase: Phase,
) -> None:
    job, _ = notice(trains("ab"), 600.0, "b")
    job, due = advance_all(until(job, phase), *told("b", reports.Staying()))
    assert job.phase is Phase.RUNNING and kinds(due) == [commands.Withdraw] and job.round == 1
    assert not kinds(ticked(job, 60.0)[1]) and active(job) == {"a", "b"}


@pytest.mark.fault
@pytest.mark.parametrize("phase", [Phase.SNAPSHOTTING, Phase.STOPPING, Phase.STARTING])
def test_a_notice_that_is_withdrawn_later_brings_the_host_back_with_no_step_lost(
    phase: Phase,
) -> None:
    job, done = withdrawn(phase), list[actions.Action]()
    job = until(job, Phase.RUNNING, done)
    assert active(job) == {"a", "b"} and not job.states.lost
    assert all(each.steps_lost == 0 for each in done if isinstance(each, actions.StartRound))


def test_a_withdrawn_notice_of_a_host_that_was_given_from_is_forgotten() -> None:
    job, _ = advance_all(notice(training(), 30.0)[0], *told("c", reports.Staying()))
    assert job.phase is Phase.RUNNING and not job.hosts["c"].is_short
    job, due = ticked(job, 60.0)
    assert not kinds(due) and job.copies.replication is None


def test_what_a_change_takes_is_measured_on_the_way() -> None:
    job = trains("ab")
    for step in (26, 28, 30):
        job, _ = advance_all(job, events.Ticked(job.now + 20.0, step))
    assert job.change.pace.step_s == 10.0
    job, _ = ticked(until(notice(job, 600.0, "b")[0], Phase.SNAPSHOTTING), 3.0)
    job, _ = ticked(until(job, Phase.STARTING), 4.0)
    pace = until(job, Phase.RUNNING).change.pace
    assert (pace.write_s, pace.start_s) == (3.0, 4.0)


def test_an_estimate_counts_a_step_that_takes_long_and_bytes_that_were_never_written() -> None:
    found = estimate(Pace(step_s=1.0, seen=(7, 50.0)), 90.0, 10**10)
    assert (found.step_s, found.write_s, found.start_s) == (40.0, 25.0, 0.0)
    assert "assumed" in str(found)


@pytest.mark.fault
def test_where_nothing_runs_what_only_that_host_holds_leaves_all_the_same() -> None:
    waiting = but(training(), phase=Phase.WAITING, current=None, assign=lambda *_: None)
    _, due = notice(waiting, 600.0)
    assert actions.MakeReplicas in kinds(due) and "nothing runs" in lines(due)


def test_the_last_host_has_nobody_to_give_to_and_saves() -> None:
    assert kinds(notice(training("c"), 30.0)[1]) == [commands.Prepare]
