"""What becomes of workers that outlive a failure: both laws, and the law of a host alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalai.core.host import actions, events
from scalai.core.host.events import NoRoom, Reserved, SealDone
from scalai.core.job.deadlines import FREEZE_ALL_S
from scalai.core.job.membership import Phase
from scalai.core.messages import commands, reports
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    AwaitFreeze,
    BeginSnapshot,
    RankFailed,
    RankFrozen,
    RankWritten,
)
from support.law_host import LawHost
from support.simulated_workers import Worker, use_real_time, use_virtual_time
from support.two_laws import World

NONE = JsonText.of(None)


@pytest.fixture(autouse=True, scope="module")
def virtual_time() -> Iterator[None]:
    use_virtual_time()
    yield
    use_real_time()


def trained(folder: Path, names: str = "ab", **settings: Any) -> tuple[World, int]:
    """Return a job that has trained on these hosts, and the step at which its workers stand."""
    use_virtual_time()
    world = World(folder, **{"flags": ("--nnodes", "1:4"), **settings})
    for name in names:
        world.add(name)
    world.go_on(90.0)
    assert world.is_training(), world.log
    _, step = world.furthest()
    assert step > world.live.state.newest_generation.step, "it has gone beyond what is committed"
    return world, step


def workers(world: World, name: str) -> list[Worker]:
    (group,) = world.hosts[name].hands._groups.values()
    return list(group.workers.values())


def fail(world: World, name: str) -> None:
    """The script of a host's first worker raises."""
    host = world.hosts[name]
    (number,) = host.hands._groups
    worker = workers(world, name)[0]
    worker.is_hung, rank = True, worker.rank
    host.agent.feed(events.Called(0, RankFailed(rank, number, "Connection closed by peer")))


def begun_at(world: World) -> int:
    """Return the step that the last round began from."""
    number = world.started[-1][1]
    assert number is not None
    return int(world.live.generations.step(number))


def logged(world: World, text: str) -> bool:
    return any(text in line for line in world.log)


def test_a_host_that_is_lost_costs_no_step_where_others_hold_the_state(tmp_path: Path) -> None:
    world, step = trained(tmp_path)
    left = world.live.state.budget.left
    world.kill("b", is_disk_lost=True)
    world.go_on(120.0)
    assert world.is_training() and begun_at(world) == step, world.log
    assert logged(world, f"event=rescued committed=2 step={step}"), world.log
    assert world.live.state.budget.left == left and not logged(world, "event=went_back")


def test_a_worker_that_is_killed_costs_no_step_where_others_hold_its_state(tmp_path: Path) -> None:
    world, step = trained(tmp_path)
    world.kill_worker("a", 0)
    world.go_on(120.0)
    assert world.is_training() and begun_at(world) == step, world.log


def test_what_nobody_else_held_is_lost_with_its_host(tmp_path: Path) -> None:
    world, step = trained(tmp_path, is_replicated=False)
    world.kill("b", is_disk_lost=False)
    world.go_on(120.0)
    assert logged(world, f"event=not_rescued step={step}"), world.log
    assert not world.is_training() or begun_at(world) < step


def test_a_worker_in_the_middle_of_an_update_is_not_believed(tmp_path: Path) -> None:
    world, step = trained(tmp_path)
    world.kill_worker("a", 0)
    for worker in (*workers(world, "a"), *workers(world, "b")):
        worker.is_torn, worker.step = True, step + 1
    world.go_on(120.0)
    assert world.is_training() and begun_at(world) < step, world.log
    assert logged(world, "event=went_back"), world.log


@pytest.mark.fault
def test_the_furthest_step_is_written_that_is_whole(tmp_path: Path) -> None:
    world, step = trained(tmp_path, "abc")
    world.kill_worker("a", 0)
    for worker in workers(world, "b"):
        worker.step = step + 1  # it has ended an update that the others had only begun
    world.go_on(120.0)
    assert world.is_training() and begun_at(world) == step + 1, world.log


def test_shards_of_two_steps_are_no_state(tmp_path: Path) -> None:
    world, step = trained(tmp_path, is_replicated=False)
    for worker in workers(world, "b"):
        worker.step = step + 1
    fail(world, "a")
    world.go_on(120.0)
    for tried in (step + 1, step):
        assert logged(world, f"event=not_rescued step={tried}"), world.log
    assert world.is_training() and begun_at(world) < step, world.log


@pytest.mark.fault
def test_a_worker_that_is_stopped_is_done_without(tmp_path: Path) -> None:
    world, step = trained(tmp_path)
    workers(world, "b")[0].is_stopped = True
    world.kill_worker("a", 0)
    world.go_on(120.0)
    assert world.is_training() and begun_at(world) == step, world.log


@pytest.mark.fault
def test_a_host_that_is_silent_meanwhile_is_done_without(tmp_path: Path) -> None:
    world, step = trained(tmp_path, "abc")
    world.hosts["c"].is_silent = True
    world.kill_worker("a", 0)
    world.go_on(180.0)
    assert world.is_training() and begun_at(world) == step, world.log


def test_a_failure_on_the_way_to_a_stop_costs_no_step(tmp_path: Path) -> None:
    world, _ = trained(tmp_path)
    for worker in workers(world, "b"):
        worker.is_late = True
    world.scale(2)
    world.go_on(20.0)
    _, step = world.furthest()
    world.kill("b", is_disk_lost=True)
    world.go_on(180.0)
    assert world.is_training() and begun_at(world) == step, world.log


@pytest.mark.fault
def test_the_loss_that_was_the_failure_costs_no_restart(tmp_path: Path) -> None:
    world, step = trained(tmp_path)
    left = world.live.state.budget.left
    world.hosts["b"].is_silent = True
    fail(world, "a")
    world.go_on(180.0)
    assert world.is_training() and begun_at(world) == step, world.log
    assert logged(world, "which was the failure") and world.live.state.budget.left == left


def test_a_job_without_restarts_ends_with_what_lives(tmp_path: Path) -> None:
    world, step = trained(tmp_path, flags=("--nnodes", "2"))
    world.kill_worker("a", 0)
    world.go_on(60.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 1, world.log
    assert logged(world, "the restart budget (--max-restarts) is used up")
    world.restart()
    world.go_on(60.0)
    assert world.is_training() and begun_at(world) == step, world.log


# ---------------------------------------------------------------------- the law of a host alone


def frozen_host(steps: dict[int, int | None]) -> LawHost:
    """Return a host whose workers stand still at these steps."""
    host = LawHost()
    host.train()
    for rank in range(2):
        host.ask(AwaitFreeze(rank, 1))
    host.obey(commands.Freeze(1))
    for rank, step in steps.items():
        host.ask(RankFrozen(rank, 1, step, "torn"))
    return host


def written(rank: int, step: int = 9) -> RankWritten:
    return RankWritten(rank, 1, step, (rank,), f"dp{rank}", NONE, NONE, 12, {})


def orders(host: LawHost) -> list[Any]:
    return [a.value.rank for a in host.all(actions.AnswerCall) if hasattr(a.value, "rank")]


def test_who_was_killed_is_named_though_its_end_is_seen_after_others_have_raised() -> None:
    host = LawHost()
    host.train()
    host.ask(RankFailed(0, 1, "Connection closed by peer"))
    host.tick()
    assert "workers_failed" not in host.reported(), (
        "a process closes its connections before it has ended"
    )
    host.feed(events.GroupOver(1, ("rank 1 was killed by SIGKILL",), is_chance=True))
    host.tick(9.0)
    (failed,) = [each for each in host.reports() if isinstance(each, reports.WorkersFailed)]
    assert failed.reason == "rank 1 was killed by SIGKILL"


def test_who_raises_is_named_where_nobody_was_killed() -> None:
    host = LawHost()
    host.train()
    host.ask(RankFailed(0, 1, "ValueError: no such token"))
    for _ in range(9):
        host.tick()
    (failed,) = [each for each in host.reports() if isinstance(each, reports.WorkersFailed)]
    assert failed.reason == "rank 0: ValueError: no such token"


def test_workers_are_asked_at_once_and_written_when_it_is_wanted() -> None:
    host = frozen_host({0: 9, 1: 9})
    assert host.reports()[-1] == reports.Frozen(1, (9,))
    assert not orders(host), "nothing is written before the job says of which step"
    host.obey(commands.Rescue(1, 9))
    assert orders(host) == [0, 1]
    for rank in range(2):
        host.ask(written(rank))
    seal = host.all(actions.Seal)[-1]
    assert seal.step == 9 and set(seal.parts) == {0, 1}
    host.feed(SealDone(1, seal.slot, b"manifest"))
    sealed, done = host.reports()[-2:]
    assert isinstance(sealed, reports.Sealed) and sealed.reason == "emergency"
    assert done == reports.Rescued(1, 9)


@pytest.mark.fault
def test_another_rank_writes_what_a_torn_one_should_have_written() -> None:
    host = frozen_host({0: 9, 1: None})
    host.obey(commands.Rescue(1, 9))
    host.ask(written(0))
    assert orders(host) == [0, 0], "its own share, then that of the other"
    host.ask(written(0))
    seal = host.all(actions.Seal)[-1]
    assert set(seal.parts) == {0} and len(seal.taken_over) == 1


def test_who_cannot_write_is_done_without_at_once() -> None:
    host = frozen_host({0: 9, 1: 9})
    host.obey(commands.Rescue(1, 9))
    host.ask(written(0))
    host.ask(RankFrozen(1, 1, None, "cannot write: out of memory"))
    assert orders(host) == [0, 1, 0], "the other one writes what it should have written"
    host.ask(written(0))
    assert len(host.all(actions.Seal)) == 1


def test_who_does_not_answer_is_done_without() -> None:
    host = frozen_host({0: 9})
    assert not any(isinstance(report, reports.Frozen) for report in host.reports())
    host.tick(FREEZE_ALL_S + 0.1)
    assert host.reports()[-1] == reports.Frozen(1, (9,))


def test_nobody_that_lives_writes_where_none_stands_at_the_step() -> None:
    host = frozen_host({0: 9, 1: 9})
    host.obey(commands.Rescue(1, 10))
    assert host.reports()[-1] == reports.Rescued(1, 10) and not orders(host)
    host.obey(commands.Rescue(1, 9))
    assert orders(host) == [0, 1], "of an earlier step they do"


def rescued_behind_a_snapshot() -> tuple[LawHost, Any]:
    """Return a host that is to write, and has no files to write into, and the files that it had."""
    host = LawHost()
    slot = host.train()
    for rank in range(2):
        host.ask(AwaitFreeze(rank, 1))
        host.ask(BeginSnapshot(rank, 1, "snapshot", 7))
    for rank in range(2):
        host.ask(written(rank, 7))
    host.obey(commands.Freeze(1))
    for rank in range(2):
        host.ask(RankFrozen(rank, 1, 9, ""))
    host.obey(commands.Rescue(1, 9))
    assert not host.all(actions.Seal)[1:], "the one before is being sealed"
    host.feed(SealDone(1, slot, b"manifest"))
    assert not any(isinstance(r, reports.Rescued) for r in host.reports())
    return host, slot


@pytest.mark.fault
def test_a_store_without_room_writes_nothing_and_says_so() -> None:
    host, _ = rescued_behind_a_snapshot()
    host.feed(NoRoom(1, "full"))
    assert host.reports()[-1] == reports.Rescued(1, 9)
    assert not any(isinstance(r, reports.WorkersFailed) for r in host.reports())


def test_files_are_made_where_there_are_none() -> None:
    host, slot = rescued_behind_a_snapshot()
    before = len(orders(host))
    host.feed(Reserved(1, slot))
    assert orders(host)[before:] == [0, 1]


@pytest.mark.fault
def test_a_snapshot_in_the_middle_of_which_workers_fail_is_written_again() -> None:
    host = LawHost()
    host.train()
    for rank in range(2):
        host.ask(AwaitFreeze(rank, 1))
        host.ask(BeginSnapshot(rank, 1, "snapshot", 7))
    host.obey(commands.Freeze(1))
    for rank in range(2):
        host.ask(RankFrozen(rank, 1, 7, ""))
    host.obey(commands.Rescue(1, 7))
    host.ask(written(0, 7))  # its main thread
    host.ask(written(0, 7))
    assert not host.all(actions.Seal)
    host.ask(written(1, 7))
    assert len(host.all(actions.Seal)) == 1


@pytest.mark.fault
def test_a_worker_that_hangs_while_it_writes_is_ended() -> None:
    host = frozen_host({0: 9, 1: 9})
    host.obey(commands.Rescue(1, 9))
    host.ask(written(0))
    host.tick(0.1)
    host.tick(9.1)
    assert host.all(actions.Kill) == [actions.Kill(1, frozenset({1}))]
    host.ask(written(0))
    assert len(host.all(actions.Seal)) == 1
