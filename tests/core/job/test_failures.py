"""What a failure costs, and what the job goes on with."""

from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.core.job.endings import (
    OUT_OF_DEVICE_MEMORY,
    OUT_OF_HOST_MEMORY,
    PEER_GONE,
    RUN_AGAIN,
    WRONG_RESULT,
    kind_of,
    rank_of,
)
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
    ticked,
    told,
    training,
    until,
)
from support.two_laws import Train

NCCL = "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2074, unhandled cuda error"


def failed(job: m.Job, reason: str = "died", **how: bool) -> m.Job:
    """Return the job after workers of host a have failed."""
    report = reports.WorkersFailed(job.round, reason, **how)
    return advance(job, events.Reported("a", report))[0]


def exits(due: list[actions.Action]) -> list[tuple[int, str]]:
    return [(each.code, each.reason) for each in due if isinstance(each, actions.EndJob)]


# ---------------------------------------------------------------------- the budget


@pytest.mark.fault
def test_workers_that_fail_start_again_from_the_newest_generation_within_the_budget() -> None:
    job = training("ab", left=2)
    for left, newest in ((1, 25), (0, 33)):
        job, done = failed(but(job, newest=newest)), list[actions.Action]()
        job = until(job, Phase.RUNNING, done)
        (start,) = [each for each in done if isinstance(each, actions.StartRound)]
        assert start.generation == 2 and start.steps_lost == newest - 20
        assert job.budget.left == left
    assert [(each.round, each.after, each.until) for each in start.lost] == [
        ("1", 20, 25), ("2", 20, 33),
    ], "of all rounds, not the last alone"  # fmt: skip
    _, due = advance_all(job, *told("a", reports.WorkersFailed(job.round, "died")))
    assert [code for code, _ in exits(due)] == [1]


def test_resizes_do_not_count_against_the_budget() -> None:
    job = training("ab", left=0)
    for _ in range(3):
        job = until(advance_all(job, events.HostLeaving("b", job.now))[0], Phase.RUNNING)
        job = until(advance_all(job, joined(job, "b"))[0], Phase.RUNNING)
    assert job.budget.left == 0 and active(job) == {"a", "b"} and job.round == 7


@pytest.mark.fault
def test_where_hosts_may_come_and_go_the_loss_of_one_is_no_failure() -> None:
    job = training("ab", left=0, is_loss_free=True)
    job, _ = advance_all(job, events.HostLost("b", job.states.generations, job.now))
    assert active(until(job, Phase.RUNNING)) == {"a"}


@pytest.mark.fault
def test_an_hour_of_steps_earns_a_failure_back_where_nobody_gave_a_budget() -> None:
    job = training("ab", left=2, is_loss_free=True)
    for _ in range(4):
        job, _ = advance_all(job, events.Ticked(job.now + 1800.0, 25))
    assert job.budget.left == 2, "time without steps earns nothing"
    for minute in range(61):
        assert job.budget.left == 2
        job, _ = advance_all(job, events.Ticked(job.now + 60.0, 26 + minute))
    assert job.budget.left == 3


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.RUNNING])
def test_a_failure_of_an_earlier_round_is_ignored(phase: Phase) -> None:
    job = but(training("ab"), phase=phase, round=5)
    assert advance_all(job, *told("a", reports.WorkersFailed(4, "late"))) == (job, [])


# ---------------------------------------------------------------------- a start that fails


def starting(**settings: Any) -> m.Job:
    job = made(assign=assign_all(), max_hosts=1, left=5, **settings)
    return advance_all(job, joined(job, "a", 2))[0]


def fail_start(job: m.Job, reason: str, **how: bool) -> m.Job:
    job = failed(job, reason, **how)
    return until(job, Phase.STARTING) if job.phase is Phase.STOPPING else job


@pytest.mark.fault
def test_a_script_that_raises_the_same_before_its_first_step_again_ends_the_job() -> None:
    job = fail_start(starting(), "rank 0: FileNotFoundError: no data (pid 17)")
    assert job.phase is Phase.STARTING and job.budget.left == 4
    again = reports.WorkersFailed(
        job.round, "rank 1: FileNotFoundError: no data (pid 23); rank 2: FileNotFoundError: no data"
    )
    ((code, reason),) = exits(advance_all(job, *told("a", again))[1])
    assert code == 1 and "no step was ever made" in reason


@pytest.mark.fault
def test_a_library_that_crashes_twice_before_the_first_step_ends_the_job() -> None:
    job = fail_start(starting(), "rank 0 was killed by SIGSEGV", is_chance=True)
    assert job.phase is Phase.STARTING and job.budget.left == 4
    again = "rank 1 was killed by SIGSEGV; rank 0 was killed by SIGTERM"
    report = reports.WorkersFailed(job.round, again, is_chance=True)
    ((code, reason),) = exits(advance_all(job, *told("a", report))[1])
    assert code == 1 and "no step was ever made" in reason


@pytest.mark.fault
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("rank 0: KeyError: 'a'", "rank 0: KeyError: 'b'"),
        ("rank 0: DistNetworkError: lost",) * 2,
        ("rank 0 was killed by SIGKILL",) * 2,
        ("rank 0 was killed by SIGABRT",) * 2,
        ("rank 0 was killed by SIGKILL; rank 1 was killed by SIGSEGV",) * 2,
        ("rank 0 was killed by SIGSEGV", "rank 0 exited with 1"),
    ],
    ids=["another error", "a network", "a signal", "a check", "an outer signal", "another end"],
)
def test_what_may_be_well_the_next_time_is_tried_within_the_budget(first: str, second: str) -> None:
    job = starting()
    for reason in (first, second):
        job = fail_start(job, reason, is_chance="killed" in reason)
        assert job.phase is Phase.STARTING


def test_an_error_behind_steps_is_tried_within_the_budget() -> None:
    job = training("ab", left=5)
    for _ in range(2):
        job = until(failed(job, "rank 0 exited with 1"), Phase.RUNNING)


@pytest.mark.fault
def test_a_refusal_ends_a_first_start_with_its_own_words_and_a_change_goes_back() -> None:
    job = starting()
    refused = reports.WorkersFailed(job.round, "no such model", is_refusal=True)
    assert exits(advance_all(job, *told("a", refused))[1]) == [(3, "no such model")]
    job = failed(at(Phase.STARTING, training("ab", left=0)), "not with DP 1", is_refusal=True)
    job = until(job, Phase.RUNNING)
    assert active(job) == {"a", "b"}
    assert [each.reason for each in job.change.failed] == ["not with DP 1"]


@pytest.mark.fault
def test_what_a_signal_killed_is_tried_once_more_before_it_goes_back() -> None:
    job = at(Phase.STARTING, training("ab", left=0))
    worlds = []
    for _ in range(2):
        assert job.current is not None
        worlds.append(job.current.degrees.world_size)
        job = until(failed(job, "killed", is_chance=True), Phase.STARTING)
    assert worlds == [1, 1] and active(until(job, Phase.RUNNING)) == {"a", "b"}


@pytest.mark.fault
def test_a_change_that_failed_is_tried_again_once_a_host_of_it_has_joined_anew() -> None:
    job = training("ab", max_hosts=3)
    job = until(advance_all(job, joined(job, "c"))[0], Phase.STARTING)
    job = until(failed(job, "KeyError"), Phase.RUNNING)
    assert active(job) == {"a", "b"} and job.budget.left == 3
    job, due = advance_all(job, *told("c", reports.Slots(0), reports.Slots(1)))
    assert not kinds([*due, *ticked(job)[1]]), "nothing of it is new"
    job, _ = advance_all(job, events.HostLeaving("c", job.now))
    assert "c" not in job.hosts
    job, _ = advance_all(job, joined(job, "c"))
    assert active(until(job, Phase.RUNNING)) == {"a", "b", "c"}


@pytest.mark.fault
def test_a_script_that_nothing_hooks_is_never_stopped_for_a_change() -> None:
    job = made(assign=assign_all(), max_hosts=3)
    job, _ = advance_all(job, joined(job, "a", 2), events.Ticked(1.0, 0))
    job, due = advance_all(
        job,
        *told("a", reports.Hooked(job.round, is_hooked=False)),
        joined(job, "b"),
        events.HostLeaving("b", 1.0),
        joined(job, "c"),
        events.Rescaled(assign_all(allowed=(1,)), 1.0),
        *(events.Ticked(second, 0) for second in (2.0, 90.0, 7200.0)),
    )
    assert job.phase is Phase.RUNNING and not {commands.Prepare, commands.Stop} & {*kinds(due)}
    assert "nothing hooks" in lines(due)
    job, _ = advance_all(job, *told("a", reports.Hooked(job.round)))
    assert ticked(job)[0].phase is Phase.PREPARING, "what was refused is met"


# ---------------------------------------------------------------------- Megatron-LM's rerun machine


@pytest.mark.fault
def test_a_step_that_megatron_runs_again_is_free_once() -> None:
    job, lefts = training("ab", left=2), []
    for _ in range(3):
        job = until(failed(job, f"rank 0: the script left with 16: {RUN_AGAIN}"), Phase.RUNNING)
        lefts.append(job.budget.left)
        job = training("ab", left=job.budget.left, ran_again=job.budget.ran_again)
    assert lefts == [2, 1, 0]
    job = but(training("ab", left=0, ran_again=20), generations=generations("ab", 3))
    assert until(failed(job, f"rank 0: {RUN_AGAIN}"), Phase.RUNNING).budget.left == 0, "it got on"


@pytest.mark.fault
@pytest.mark.parametrize("is_first", [True, False], ids=["it tells first", "it tells last"])
def test_a_host_that_computed_wrongly_is_left_out_at_no_restart(is_first: bool) -> None:
    """All ranks leave with 17, and only the one with two results says so."""
    job = training("abc", left=0, is_loss_free=True, has_emergency=True)
    guilty = ("b", f"rank 1: the script left with 17: {WRONG_RESULT}")
    told_by = [guilty, ("a", "rank 0: the script left with 17")]
    for host, reason in told_by if is_first else reversed(told_by):
        job = advance(job, events.Reported(host, reports.WorkersFailed(job.round, reason)))[0]
        assert job.phase is Phase.FREEZING
    job, _ = advance_all(job, *told("abc", reports.Frozen(job.round, ())))
    job = until(job, Phase.RUNNING)
    assert active(job) == {"a", "c"} and job.budget.left == 0
    assert active(until(advance_all(job, joined(job, "b"))[0], Phase.RUNNING)) == {"a", "b", "c"}


@pytest.mark.fault
def test_a_host_that_computes_wrongly_and_cannot_be_spared_costs_restarts() -> None:
    job = training("a", left=1, is_loss_free=True, max_hosts=2)
    wrong = f"rank 0: the script left with 17: {WRONG_RESULT}"
    job = until(failed(job, wrong), Phase.RUNNING)
    assert active(job) == {"a"} and job.budget.left == 1
    assert until(failed(job, wrong), Phase.RUNNING).budget.left == 0


# ---------------------------------------------------------------------- losses


PHASES = [Phase.STARTING, Phase.PREPARING, Phase.DRAINING, Phase.COMMITTING, Phase.STOPPING]


@pytest.mark.fault
@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("phase", PHASES)
def test_with_replicas_a_host_lost_in_a_resize_costs_no_step_that_was_written(
    begin: Train, phase: Phase, victim: str
) -> None:
    world = begin()
    world.add("c")
    is_there = phase is not Phase.DRAINING  # else once all make no more steps
    world.until(
        lambda: world.phase is phase and (is_there or world.furthest()[1] >= world.job.stop.step)
    )
    stop, had = world.job.stop.step, len(world.rounds)
    world.kill(victim, is_disk_lost=True)
    world.settle()
    newest, lost = world.job.newest_generation, world.rounds[-1].steps_lost
    assert world.is_training() and victim not in world.active and newest is not None
    if phase is Phase.PREPARING:  # the workers had no agreed stop yet
        assert world.rounds[had].generation == 1 and world.rounds[had].steps_lost > 0
    else:
        assert newest.step >= stop and lost == 0


@pytest.mark.fault
def test_without_replicas_a_host_lost_at_the_commit_costs_the_steps_since_the_generation(
    begin: Train,
) -> None:
    """The hosts that stay answer for a generation that is not whole any more: none is awaited for
    ever, and the older one is used."""
    world = begin(is_replicated=False)
    world.settle(60.0)
    older = world.job.newest_generation
    world.leave("b")
    world.until(Phase.COMMITTING)
    reached = world.job.stop.step
    world.kill("b", is_disk_lost=True)
    world.settle()
    assert world.is_training() and older is not None
    assert world.rounds[1].generation == older.number
    assert world.rounds[1].steps_lost == reached - older.step > 0


@pytest.mark.fault
def test_a_host_without_a_part_of_the_snapshot_is_not_awaited_at_the_commit() -> None:
    """All of its workers died before they wrote, or it has just come back."""
    job = but(at(Phase.SNAPSHOTTING), awaited=frozenset())
    job, due = advance_all(job, events.Judged(True, job.stop.step, 9, frozenset({"a"})))
    assert due == [actions.CommitParts(("a",), 9)] and job.awaited == {"a"}
    job, due = advance_all(job, *told("a", reports.Committed(9)))
    assert kinds(due) == [commands.Stop] and job.awaited == {"a", "b"}


@pytest.mark.fault
def test_a_host_that_comes_back_brings_the_state_that_the_job_waits_for(begin: Train) -> None:
    world = begin(is_replicated=False, law={"replicas": 0})
    world.kill("b", is_disk_lost=False)
    world.hosts["b"].is_silent = True
    world.settle()
    assert world.phase is Phase.WAITING and world.job.states.obstacle
    newest = world.newest_whole(of_all=True)
    world.hosts["b"].is_silent = False
    world.settle()
    assert world.is_training() and world.rounds[-1].generation == newest


def test_a_job_whose_state_is_not_whole_waits_and_names_the_way_out() -> None:
    job = but(at(Phase.STOPPING), generations=())
    job, due = advance_all(job, *told("ab", reports.Stopped(1, 26)))
    assert job.phase is Phase.WAITING
    assert "if their memory is lost: stop the job, run scalai clean" in lines(due)


@pytest.mark.fault
@pytest.mark.parametrize("drains", [False, True])
def test_the_last_host_that_is_lost_is_waited_for_with_its_state_and_the_restarts(
    begin: Train, drains: bool
) -> None:
    world = begin(law={"left": 2, "is_loss_free": True, "has_durable_dir": True})
    newest = world.job.newest_generation
    for name in "ab" if drains else "":
        world.leave(name)
        world.act(name, "net")
    for name in "ab":
        world.kill(name, is_disk_lost=False)
        world.hosts[name].is_silent = True
    world.settle()
    assert world.phase is Phase.WAITING and not world.exits and newest is not None
    for name in "ab":
        world.hosts[name].is_silent = False
    world.settle()
    assert world.is_training() and world.job.budget.left == 2
    assert (world.rounds[1].generation or 0) >= newest.number


@pytest.mark.fault
def test_a_host_that_is_lost_again_and_again_waits_and_the_others_train_on() -> None:
    job = training("ab", max_hosts=3, is_loss_free=True, quarantine_s=60.0)
    for _ in range(3):
        job = until(advance_all(job, joined(job, "c"))[0], Phase.RUNNING)
        assert "c" in active(job)
        job, _ = advance_all(job, events.HostLost("c", job.states.generations, job.now))
        job = until(job, Phase.RUNNING)
    job, due = advance_all(job, joined(job, "c"))
    job, more = ticked(job, 2.0)
    assert not kinds([*due, *more]) and job.phase is Phase.RUNNING
    assert job.health.barred.keys() == {"c"}
    job, _ = ticked(job, 60.0)
    assert "c" in active(until(job, Phase.RUNNING))


@pytest.mark.fault
def test_the_only_host_that_fits_is_taken_though_it_flaps() -> None:
    job = training("ab", barred={"b": 1e9})
    assert [name for name, _ in staying(job)] == ["a"]
    job = but(job, assign=assign_all(minimum=2))
    assert [name for name, _ in staying(job)] == ["a", "b"]


# ---------------------------------------------------------------------- kinds of failures


@pytest.mark.fault
@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("rank 3 was killed by SIGKILL", "killed by SIGKILL"),
        ("rank 3 was killed by SIGKILL (out of host memory: this cgroup's count of oom_kill rose "
         "by 1)", OUT_OF_HOST_MEMORY),
        ("rank 0: MemoryError: Unable to allocate 8 GiB", OUT_OF_HOST_MEMORY),
        ("rank 0: RuntimeError: DefaultCPUAllocator: can't allocate memory", OUT_OF_HOST_MEMORY),
        ("rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate", OUT_OF_DEVICE_MEMORY),
        ("rank 1 exited with 12", OUT_OF_DEVICE_MEMORY),
        ("rank 1 exited with 120", "exit 120"),
        ("rank 2: AcceleratorError: CUDA error: uncorrectable ECC error encountered",
         "CUDA error: uncorrectable ECC error"),
        ("rank 2: RuntimeError: CUDA error: an illegal memory access was encountered",
         "CUDA error: illegal memory access"),
        ("rank 2: RuntimeError: CUDA error: device-side assert triggered", "CUDA error"),
        (f"rank 5: {NCCL}", "NCCL error"),
        (f"rank 5: {NCCL} ncclRemoteError: remote process exited", PEER_GONE),
        ("rank 2: RuntimeError: [pair.cc:537] Read error: Connection reset by peer", PEER_GONE),
        ("rank 1 was killed by SIGSEGV", "segmentation fault"),
        ("rank 1 was killed by SIGBUS", "bus error (is the shared memory full?)"),
        ("rank 4: ValueError: no such file", "the script raised ValueError"),
        ("rank 4: the script left with 7", "the script left with 7"),
        ("rank 4: the script left with 'a'; rank 5: the script left with 'a'",
         "the script left with 'a'"),
        ("rank 4 exited with 1; rank 5 was killed by SIGKILL", "killed by SIGKILL"),
        ("its workers cannot be started: no room", "other"),
    ],
)  # fmt: skip
def test_what_is_told_of_a_failure_says_its_kind(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind


def test_the_rank_that_is_named_first_is_its_rank() -> None:
    assert rank_of("workers of host a failed: rank 12 exited with 1; rank 3 exited") == 12
    assert rank_of("no room") is None
