"""The rules of membership: a host that is told that it will be taken away."""

import pytest

from scalai.core.job import membership as m
from scalai.core.job.preemption import LATE_S
from scalai.core.job.resize import advance
from scalai.core.job.spacing import Pace, estimate
from scalai.core.messages import actions, commands, events, reports
from scalai.core.messages.actions import Action
from support.law_jobs import but, made
from support.law_words import ordered
from support.membership_choice import assign_all
from support.membership_jobs import rounds, two_hosts
from support.membership_simulation import Simulation, job

SLOW = Pace(step_s=60.0, write_s=2.0, start_s=3.0)


def training(workers: str = "abc", replicas: int = 0, pace: Pace = SLOW) -> m.Job:
    """Return a job whose hosts have just committed generation 2, whole on all of them together."""
    hosts = {name: m.Host(name, 1, number) for number, name in enumerate(workers)}
    assign = assign_all()
    current = assign(tuple((name, 1) for name in hosts), None)
    return made(
        assign=assign,
        max_hosts=len(hosts),
        replicas=replicas,
        phase=m.Phase.RUNNING,
        hosts=hosts,
        joined=len(hosts),
        round=1,
        last_round=1,
        current=current,
        ran=current,
        has_state=True,
        generations=(m.Generation(2, 20, frozenset(workers)),),
        committing=2,
        newest=25,
        now=100.0,
        has_durable_dir=True,
        pace=pace,
    )


def notice(
    job: m.Job, left_s: float | None, host: str = "c", *, is_final: bool = True, size_bytes: int = 0
) -> tuple[m.Job, tuple[Action, ...]]:
    event = events.HostLeaving(host, job.now, "file", left_s, is_final, size_bytes)
    return advance(job, event)


def ticked(job: m.Job, seconds: float = 1.0) -> tuple[m.Job, tuple[Action, ...]]:
    return advance(job, events.Ticked(job.now + seconds, job.newest))


def kinds(due: tuple[Action, ...]) -> list[type]:
    return [type(ordered(action)) for action in due if not isinstance(action, actions.Say)]


def said(due: tuple[Action, ...]) -> str:
    return "\n".join(a.text for a in due if isinstance(a, actions.Say))


@pytest.mark.fault
def test_a_notice_that_leaves_time_is_a_drain_and_says_the_estimate() -> None:
    job, due = notice(training(), 120.0)
    assert kinds(due) == [commands.Prepare]
    assert job.phase is m.Phase.PREPARING and job.hosts["c"].leave_by == 220.0
    assert "left_s=120" in said(due) and "65.0 s: a step 60.0" in said(due)


def test_where_a_drain_takes_too_long_what_only_that_host_holds_leaves_first() -> None:
    """Ahead of everything else, also of the stop, which is proposed all the same."""
    job, due = notice(training(), 30.0)
    assert kinds(due) == [actions.MakeReplicas, commands.Prepare]
    assert next(a for a in due if isinstance(a, actions.MakeReplicas)) == actions.MakeReplicas(
        ("a", "b"), 1, 2, 1, ("c",)
    )
    assert "65.0 s" in said(due) and "too long" in said(due)
    for host in "ab":
        job, due = advance(job, events.Reported(host, reports.Replicated(1, 100)))
    assert "event=evacuated generation=2 from=c bytes=200" in said(due)
    job, due = ticked(job)
    assert kinds(due) == [], "once"


@pytest.mark.fault
def test_a_newer_generation_leaves_too() -> None:
    job, due = notice(training(), 30.0)
    for host in "ab":
        job, _ = advance(job, events.Reported(host, reports.Replicated(1, 100)))
    job, _ = advance(job, events.SnapshotJudged(("a", "b", "c"), 26, 3))
    job, due = ticked(job)
    assert kinds(due) == [], "its parts have no number yet"
    for host in "abc":
        job, _ = advance(job, events.Reported(host, reports.Committed(3)))
    job, due = ticked(job)
    assert actions.MakeReplicas(("a", "b"), 2, 3, 1, ("c",)) in due


@pytest.mark.fault
def test_what_could_not_come_is_asked_for_again_soon_and_what_has_no_room_is_not() -> None:
    job, _ = notice(training(), 30.0)
    job, _ = advance(job, events.Reported("a", reports.Replicated(1, 0, "c does not answer")))
    job, due = advance(job, events.Reported("b", reports.Replicated(1, 0)))
    assert "no_replica" not in said(due)
    job, due = ticked(job, 1.0)
    assert kinds(due) == []
    job, due = ticked(job, 1.5)
    assert actions.MakeReplicas(("a", "b"), 2, 2, 1, ("c",)) in due
    job, _ = advance(
        job, events.Reported("a", reports.Replicated(2, 0, "no room", is_lasting=True))
    )
    job, due = advance(job, events.Reported("b", reports.Replicated(2, 0)))
    assert "failed=a" in said(due)
    job, due = ticked(job, 10.0)
    assert kinds(due) == []


def test_a_recommendation_without_a_deadline_drains_without_haste() -> None:
    job, due = notice(training(), None)
    assert kinds(due) == [commands.Prepare]
    assert job.hosts["c"].is_leaving and job.hosts["c"].leave_by is None
    job, due = ticked(job, 50.0)
    assert not any(isinstance(a, (actions.Lose, actions.MakeReplicas)) for a in due)


def test_a_signal_is_no_deadline_of_which_the_job_takes_leave() -> None:
    """The agent ends by itself, and a save in flight gives it more time."""
    job, due = notice(training(), 30.0, is_final=False)
    assert actions.MakeReplicas in kinds(due) and job.hosts["c"].leave_by is None


def test_the_same_notice_twice_counts_once_and_a_sooner_one_counts() -> None:
    job, _ = notice(training(), 600.0)
    again, due = notice(job, 600.0)
    assert again == job and due == ()
    sooner, due = notice(job, 20.0)
    assert sooner.hosts["c"].leave_by == 120.0 and actions.MakeReplicas in kinds(due)


def test_no_new_round_has_a_host_that_was_told_to_go() -> None:
    simulation = two_hosts()
    simulation.feed(events.HostLeaving("b", simulation.now, "file", 600.0, True))
    simulation.settle()
    assert rounds(simulation)[-1].assignment.active == ("a",)
    assert rounds(simulation)[-1].steps_lost == 0 and set(simulation.hosts) == {"a"}


@pytest.mark.fault
def test_the_others_go_on_without_a_host_whose_time_is_over() -> None:
    job, _ = notice(training(), 30.0)
    job, due = ticked(job, 30.0 + LATE_S - 0.5)
    assert not any(isinstance(a, actions.Lose) for a in due)
    job, due = ticked(job, 1.0)
    lost = [a for a in due if isinstance(a, actions.Lose)]
    assert [a.hosts for a in lost] == [("c",)]
    job, due = ticked(job, 1.0)
    assert not any(isinstance(a, actions.Lose) and a.hosts == ("c",) for a in due), "said once"


def test_a_host_that_is_killed_after_it_gave_what_it_held_costs_the_steps_since_alone() -> None:
    simulation = Simulation(job(max_hosts=3, assign=assign_all()))
    for name in "abc":
        simulation.join(name, 1)
    simulation.settle()
    simulation.snapshot()
    simulation.settle()
    newest = simulation.covered()[-1].number
    simulation.job = but(simulation.job, pace=SLOW)
    simulation.feed(events.HostLeaving("c", simulation.now, "file", 10.0, True))
    while (
        any(name in simulation.waiting() for name in "ab") and not simulation.job.copies.evacuated
    ):
        simulation.answer(next(name for name in simulation.waiting() if name in "ab"))
    assert simulation.job.copies.evacuated == (newest, frozenset("c"))
    simulation.lose("c")
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    assert rounds(simulation)[-1].generation == newest


@pytest.mark.fault
@pytest.mark.parametrize("phase", [m.Phase.PREPARING, m.Phase.DRAINING, m.Phase.RUNNING])
def test_a_notice_that_is_withdrawn_before_anybody_has_written_leaves_the_job_as_it_was(
    phase: m.Phase,
) -> None:
    simulation = two_hosts()
    begun = len(rounds(simulation))
    simulation.feed(events.HostLeaving("b", simulation.now, "azure", 600.0, True))
    while simulation.job.phase is not phase and phase is not m.Phase.RUNNING:
        simulation.answer(simulation.waiting()[0])
    simulation.feed(events.Reported("b", reports.Staying()))
    assert simulation.job.phase is m.Phase.RUNNING
    simulation.settle()
    assert len(rounds(simulation)) == begun and set(simulation.hosts) == {"a", "b"}
    simulation.train(3)
    assert len({host.step for host in simulation.hosts.values()}) == 1


@pytest.mark.fault
@pytest.mark.parametrize("phase", [m.Phase.SNAPSHOTTING, m.Phase.STOPPING, m.Phase.STARTING])
def test_a_notice_that_is_withdrawn_later_brings_the_host_back_with_no_step_lost(
    phase: m.Phase,
) -> None:
    simulation = two_hosts()
    simulation.feed(events.HostLeaving("b", simulation.now, "azure", 600.0, True))
    while simulation.job.phase is not phase:
        simulation.answer(simulation.waiting()[0])
    simulation.feed(events.Reported("b", reports.Staying()))
    simulation.settle()
    assert set(simulation.hosts) == {"a", "b"}
    assert rounds(simulation)[-1].assignment.active == ("a", "b")
    assert all(each.steps_lost == 0 for each in rounds(simulation))


def test_a_withdrawn_notice_of_a_host_that_was_given_from_is_forgotten() -> None:
    job, _ = notice(training(), 30.0)
    job, _ = advance(job, events.Reported("c", reports.Staying()))
    assert job.phase is m.Phase.RUNNING and not job.hosts["c"].is_short
    job, due = ticked(job, 60.0)
    assert kinds(due) == [] and job.copies.replication is None


def test_what_a_change_takes_is_measured_on_the_way() -> None:
    simulation = two_hosts()
    for _ in range(5):
        simulation.train(2)
        simulation.tick(20.0)
    assert simulation.job.change.pace.step_s == pytest.approx(10.0, rel=0.5)
    simulation.feed(events.HostLeaving("b", simulation.now, "file", 600.0, True))
    while simulation.job.phase is not m.Phase.RUNNING:
        simulation.tick(1.0)
        if simulation.waiting():
            simulation.answer(simulation.waiting()[0])
    pace = simulation.job.change.pace
    assert pace.write_s and pace.start_s and 1.0 <= pace.write_s <= 20.0 >= pace.start_s >= 1.0


def test_an_estimate_counts_a_step_that_takes_long_and_bytes_that_were_never_written() -> None:
    pace = Pace(step_s=1.0, seen=(7, 50.0))
    found = estimate(pace, 90.0, 10**10)
    assert (found.step_s, found.write_s, found.start_s) == (40.0, 25.0, 0.0)
    assert "assumed" in str(found)


@pytest.mark.fault
def test_where_nothing_runs_what_only_that_host_holds_leaves_all_the_same() -> None:
    waiting = but(training(), phase=m.Phase.WAITING, current=None, assign=lambda *_: None)
    _, due = notice(waiting, 600.0)
    assert actions.MakeReplicas in kinds(due) and "nothing runs" in said(due)


def test_the_last_host_has_nobody_to_give_to_and_saves() -> None:
    _, due = notice(training("c"), 30.0)
    assert kinds(due) == [commands.Prepare]


def test_a_host_whose_time_is_over_and_that_is_late_in_its_phase_is_lost_once() -> None:
    job, _ = notice(training(), 30.0)
    assert job.phase is m.Phase.PREPARING
    job, _ = ticked(job, 1.0)
    job, due = ticked(job, 100.0)
    lost = [host for a in due if isinstance(a, actions.Lose) for host in a.hosts]
    assert lost == ["c"]
