"""The rules of membership: what a failure costs, and which generation is kept for one."""

from dataclasses import replace

import pytest

from scalai.core.job import membership as m
from scalai.core.job.membership import active
from scalai.core.job.resize import advance
from scalai.core.messages import actions, commands, events, reports
from support.law_words import ordered
from support.membership_choice import assign_all
from support.membership_jobs import rounds, two_hosts, until
from support.membership_simulation import Simulation, job

PHASES = [
    m.Phase.STARTING, m.Phase.PREPARING, m.Phase.DRAINING, m.Phase.COMMITTING, m.Phase.STOPPING
]  # fmt: skip


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("phase", PHASES)
def test_with_replicas_a_host_lost_in_a_resize_costs_no_step_that_was_written(
    phase: m.Phase, victim: str
) -> None:
    simulation = two_hosts(max_hosts=3)
    simulation.train(5)
    simulation.join("c", 2)
    simulation.tick()
    until(simulation, phase)
    stop = simulation.job.stop.step
    simulation.lose(victim)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    assert victim not in active(simulation.job)
    newest = simulation.job.newest_generation
    assert newest is not None
    lost = rounds(simulation)[-1].steps_lost
    if phase is m.Phase.PREPARING:  # the workers had no agreed stop yet
        assert newest.step < stop and lost > 0
    else:
        assert newest.step == stop and lost == 0


def test_without_replicas_a_host_lost_at_the_commit_costs_the_steps_since_the_generation() -> None:
    """The hosts that stay answer for a generation that is not whole any more: none is awaited for
    ever, and the older one is used."""
    simulation = two_hosts(max_hosts=3)
    simulation.train(5)
    simulation.is_replicated = False
    simulation.feed(events.HostLeaving("b", simulation.now))
    until(simulation, m.Phase.COMMITTING)
    reached = simulation.job.stop.step
    simulation.lose("b")
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    last = rounds(simulation)[-1]
    assert last.steps_lost == reached - simulation.steps[last.generation or 0] > 0


@pytest.mark.fault
def test_a_host_without_a_part_of_the_snapshot_is_not_awaited_at_the_commit() -> None:
    """All of its workers died before they wrote, or it has just come back."""
    simulation = two_hosts(max_hosts=3)
    simulation.train(5)
    simulation.join("c", 2)
    simulation.tick()
    until(simulation, m.Phase.SNAPSHOTTING)
    job = replace(simulation.job, awaited=frozenset())
    assert active(job) == {"a", "b"}
    job, due = advance(job, events.Judged(True, job.stop.step, 9, frozenset({"a"})))
    assert due == (actions.CommitParts(("a",), 9),) and job.awaited == {"a"}
    job, due = advance(job, events.Reported("a", reports.Committed(9)))
    assert [type(ordered(action)) for action in due] == [actions.Say, commands.Stop]
    assert job.awaited == {"a", "b"}


def test_workers_that_fail_start_again_from_the_newest_generation_within_the_budget() -> None:
    simulation = two_hosts(left=2)
    for left in (1, 0):
        simulation.train(3)
        made = simulation.hosts["b"].step - simulation.steps[1]
        simulation.feed(
            events.Reported("a", reports.WorkersFailed(simulation.job.round, "rank 0 died"))
        )
        simulation.settle()
        assert (simulation.job.phase, simulation.job.budget.left) == (m.Phase.RUNNING, left)
        last = rounds(simulation)[-1]
        assert last.steps_lost == made >= 3
        assert last.lost[-1].until - last.lost[-1].after == made
    assert [each.round for each in last.lost] == ["1", "2"], "of all rounds, not the last alone"
    simulation.feed(
        events.Reported("a", reports.WorkersFailed(simulation.job.round, "rank 0 died"))
    )
    assert [e.code for e in simulation.exits] == [1]


def test_resizes_do_not_count_against_the_budget() -> None:
    simulation = two_hosts(left=0)
    for _ in range(3):
        simulation.feed(events.HostLeaving("b", simulation.now))
        simulation.settle()
        simulation.join("b", 2)
        simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and len(rounds(simulation)) == 7


@pytest.mark.parametrize("phase", [p for p in m.Phase if p not in (m.Phase.RUNNING,)])
def test_a_failure_of_an_earlier_round_is_ignored(phase: m.Phase) -> None:
    state = replace(two_hosts().job, phase=phase, round=5)
    assert advance(state, events.Reported("a", reports.WorkersFailed(4, "late"))) == (state, ())


def test_a_snapshot_replaces_the_older_generation_only_once_every_host_has_it() -> None:
    simulation = two_hosts()
    simulation.train(4)
    simulation.snapshot()
    number = simulation.numbers
    simulation.answer("a")
    assert actions.Release(1, number, ()) not in simulation.logged
    simulation.answer("b")
    assert simulation.logged[-1] == actions.Release(1, number, ())


@pytest.mark.parametrize("phase", [m.Phase.PREPARING, m.Phase.DRAINING])
def test_a_snapshot_during_a_drain_makes_room_for_the_snapshot_after_it(phase: m.Phase) -> None:
    simulation = two_hosts()
    simulation.train(4)
    simulation.feed(events.HostLeaving("b", simulation.now))
    until(simulation, phase)
    simulation.snapshot()
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and set(simulation.hosts) == {"a"}


@pytest.mark.fault
@pytest.mark.parametrize(
    ("is_replicated", "phase"), [(True, m.Phase.RUNNING), (False, m.Phase.WAITING)]
)
def test_a_host_lost_in_a_drain_with_a_snapshot_to_rename_leaves_nobody_without_room(
    is_replicated: bool, phase: m.Phase
) -> None:
    """Where the snapshot is whole without it, older ones go; where not, nobody waits for room."""
    simulation = two_hosts()
    simulation.is_replicated = is_replicated
    simulation.train(4)
    simulation.snapshot()
    simulation.settle()
    simulation.train(4)
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.DRAINING)
    simulation.snapshot()
    while simulation.commands["a"]:
        simulation.answer("a")
    simulation.lose("b")
    simulation.deliver()
    assert simulation.job.phase is phase
    assert not rounds(simulation)[-1].steps_lost


def test_an_idle_host_that_goes_during_a_snapshot_does_not_keep_older_generations() -> None:
    simulation = two_hosts(max_hosts=3, assign=assign_all(allowed=(4,)))
    simulation.join("c", 2)
    simulation.settle()
    simulation.train(4)
    simulation.snapshot()
    simulation.lose("c")
    simulation.settle()
    assert [len(host.parts) for host in simulation.hosts.values()] == [1, 1]


def test_a_host_that_comes_back_brings_the_state_that_the_job_waits_for() -> None:
    simulation = two_hosts()
    simulation.is_replicated = False
    simulation.feed(events.HostLeaving("b", simulation.now))
    simulation.join("c", 2)
    simulation.settle()
    simulation.train(3)
    lost = simulation.lose("c")
    simulation.settle()
    assert simulation.job.phase is m.Phase.WAITING
    *_, reported = (action for action in simulation.logged if isinstance(action, actions.Say))
    assert "if their memory is lost: stop the job, run scalai clean" in reported.text
    simulation.join("c", 2, lost.parts)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    assert rounds(simulation)[-1].generation == max(lost.parts)


@pytest.mark.fault
def test_the_last_host_that_is_lost_is_waited_for_with_its_state_and_the_restarts() -> None:
    simulation = two_hosts(left=2, is_loss_free=True, has_durable_dir=True)
    simulation.train(5)
    newest = simulation.job.newest_generation
    assert newest is not None
    kept = [simulation.lose(name).parts for name in ("a", "b")]
    simulation.settle()
    assert simulation.job.phase is m.Phase.WAITING and not simulation.exits
    for name, parts in zip(("a", "b"), kept, strict=True):
        simulation.join(name, 2, dict(parts))
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    assert rounds(simulation)[-1].generation == newest.number
    assert simulation.job.budget.left == 2


@pytest.mark.fault
def test_the_last_host_that_is_lost_while_it_drains_is_waited_for_too() -> None:
    simulation = two_hosts(has_durable_dir=True)
    simulation.feed(events.HostLeaving("a", simulation.now))
    simulation.feed(events.HostLeaving("b", simulation.now))
    for name in ("a", "b"):
        simulation.lose(name)
    simulation.settle()
    assert simulation.job.phase is m.Phase.WAITING and not simulation.exits


@pytest.mark.fault
def test_a_last_host_that_leaves_before_any_step_begins_anew_by_the_same_command() -> None:
    simulation = Simulation(job())
    simulation.join("a", 2)
    simulation.tick()
    assert simulation.job.phase is m.Phase.STARTING
    simulation.feed(events.HostLeaving("a", simulation.now))
    simulation.settle()
    assert [each.code for each in simulation.exits] == [actions.RESUMABLE]


def test_a_last_host_whose_steps_are_not_saved_has_failed() -> None:
    simulation = two_hosts(has_durable_dir=False)
    simulation.train(5)
    simulation.feed(events.HostLeaving("a", simulation.now))
    simulation.feed(events.HostLeaving("b", simulation.now))
    simulation.settle()
    assert [each.code for each in simulation.exits] == [1]


def starting(**settings: object) -> Simulation:
    simulation = Simulation(job(left=5, **settings))
    simulation.join("a", 2)
    simulation.tick()
    assert simulation.job.phase is m.Phase.STARTING
    return simulation


def fail_start(simulation: Simulation, reason: str, *, is_chance: bool = False) -> None:
    simulation.feed(
        events.Reported(
            "a", reports.WorkersFailed(simulation.job.round, reason, is_chance=is_chance)
        )
    )
    while simulation.job.phase is not m.Phase.ENDED and simulation.job.phase is m.Phase.STOPPING:
        simulation.answer(simulation.waiting()[0])


@pytest.mark.fault
def test_a_script_that_raises_the_same_before_its_first_step_again_ends_the_job() -> None:
    simulation = starting()
    fail_start(simulation, "rank 0 exited with 1: FileNotFoundError: no data (pid 17)")
    assert not simulation.exits and simulation.job.budget.left == 4
    fail_start(simulation, "rank 1 exited with 1: FileNotFoundError: no data (pid 23)")
    assert [each.code for each in simulation.exits] == [1]
    assert "no step was ever made" in simulation.exits[0].reason


@pytest.mark.fault
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("rank 0 exited with 1: KeyError: 'a'", "rank 0 exited with 1: KeyError: 'b'"),
        ("rank 0 exited with 1: DistNetworkError: lost",) * 2,
        ("rank 0 was killed by SIGKILL",) * 2,
    ],
    ids=["another error", "a network", "a signal"],
)
def test_what_may_be_well_the_next_time_is_tried_within_the_budget(first: str, second: str) -> None:
    simulation = starting()
    for reason in (first, second):
        fail_start(simulation, reason, is_chance="killed" in reason)
    assert not simulation.exits and simulation.job.phase is m.Phase.STARTING


def test_an_error_behind_steps_is_tried_within_the_budget() -> None:
    simulation = two_hosts(left=5)
    for _ in range(2):
        simulation.train(3)
        simulation.feed(
            events.Reported(
                "a", reports.WorkersFailed(simulation.job.round, "rank 0 exited with 1")
            )
        )
        simulation.settle()
    assert not simulation.exits and simulation.job.phase is m.Phase.RUNNING
