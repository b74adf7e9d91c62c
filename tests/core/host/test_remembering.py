"""What a job remembers outlives its coordinator: restarts that are used up, changes that have
failed, what lies on the disk, and what persons have asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalai.core.job.membership import Phase
from support.simulated_workers import Clock, use_real_time, use_virtual_time
from support.two_laws import World, training


@pytest.fixture(autouse=True)
def virtual_time() -> Iterator[None]:
    use_virtual_time()
    Clock.now = 1000.0
    yield
    use_real_time()


def until(world: World, *phases: Phase) -> None:
    """Let one thing happen after the other until the job is in one of these phases."""
    for _ in range(400):
        for name in list(world.hosts):
            for what in ("net", "work", "workers"):
                if world.phase in phases:
                    return
                world.act(name, what)
        world.train()
        world.tick(0.5)
    raise AssertionError(world.log[-10:])


def all_hear(world: World) -> None:
    for name in list(world.hosts):
        world.act(name, "net")


@pytest.mark.fault
@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.DRAINING, Phase.SNAPSHOTTING])
def test_a_request_for_which_nothing_is_built_yet_outlives_the_coordinator(
    tmp_path: Path, phase: Phase
) -> None:
    world = training(tmp_path)
    world.scale(2)
    until(world, phase)
    world.scale(1)
    all_hear(world)
    world.replace_coordinator()
    world.go_on(150.0)
    assert world.is_training() and len(world._workers()) == 1, world.log[-8:]


def test_the_latest_request_holds_though_only_one_host_has_heard_of_it(tmp_path: Path) -> None:
    world = training(tmp_path)
    world.scale(2)
    until(world, Phase.PREPARING)
    world.scale(1)
    world.act("b", "net")
    world.replace_coordinator()
    world.go_on(150.0)
    assert world.is_training() and len(world._workers()) == 1, world.log[-8:]


def test_a_request_outlives_several_coordinators_and_those_that_know_nothing(
    tmp_path: Path,
) -> None:
    world = training(tmp_path)
    world.scale(2)
    world.go_on(60.0)
    for _ in range(3):
        world.replace_coordinator()
        world.act("a", "net")
    world.go_on(60.0)
    assert world.is_training() and len(world._workers()) == 2, world.log[-8:]


def test_a_coordinator_that_knows_of_none_before_it_goes_by_what_a_late_host_has_kept(
    tmp_path: Path,
) -> None:
    """It was started by hand, its machine has lost its card, and a new host is there first."""
    world = training(tmp_path)
    for _ in range(3):
        world.replace_coordinator()
        world.go_on(30.0)
    world.scale(2)
    world.go_on(60.0)
    assert len(world._workers()) == 2 and world.term == 4
    world._open()
    world.add("c")
    world.act("c", "net")
    world.go_on(0.5)
    world.go_on(120.0)
    assert world.term == 1 and world.is_training(), world.log[-8:]
    assert len(world._workers()) == 2, world.log[-8:]


def test_a_coordinator_with_the_term_of_the_one_before_it_goes_by_what_hosts_have_kept(
    tmp_path: Path,
) -> None:
    """The machine of the first coordinator was started anew, and its own agent is there first."""
    world = training(tmp_path)
    world.scale(2)
    world.go_on(60.0)
    assert len(world._workers()) == 2 and world.term == 1
    world._open()
    world.add("c")
    world.act("c", "net")
    world.go_on(0.5)
    world.go_on(120.0)
    assert world.is_training() and len(world._workers()) == 2, world.log[-8:]
    assert world.live.members.term == 2  # so that what it says is later than what they had


@pytest.mark.fault
def test_a_crash_loop_gets_no_restarts_from_new_coordinators(tmp_path: Path) -> None:
    flags = ("--nnodes", "2", "--max-restarts", "2")
    world = training(tmp_path, flags=flags)
    for left in (1, 0):
        world.kill_worker("a", 0)
        world.go_on(120.0)
        assert world.is_training() and world.live.state.budget.left == left, world.log[-8:]
        world.replace_coordinator()
        world.go_on(30.0)
        assert world.is_training() and world.live.state.budget.left == left, world.log[-8:]
    world.kill_worker("a", 0)
    world.go_on(120.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 1, world.log[-8:]
    assert any("restart budget" in line for line in world.log)


@pytest.mark.fault
@pytest.mark.parametrize("phase", [Phase.FREEZING, Phase.RESCUING, Phase.STOPPING, Phase.STARTING])
def test_a_failure_counts_once_though_two_coordinators_hear_of_it(
    tmp_path: Path, phase: Phase
) -> None:
    world = training(tmp_path)
    left = world.live.state.budget.left
    world.kill_worker("a", 0)
    until(world, phase)
    all_hear(world)
    world.replace_coordinator()
    world.go_on(150.0)
    assert world.is_training(), world.log[-8:]
    assert world.live.state.budget.left == left - 1, world.log


def failed_change(folder: Path) -> World:
    """Return a job on a and b, for which a change to three hosts has failed on c."""
    world = training(folder)
    world.add("c")
    world.hosts["c"].cannot_start = True
    world.go_on(200.0)
    assert world.is_training() and world.live.state.change.failed, world.log
    return world


@pytest.mark.fault
def test_a_change_that_has_failed_is_not_tried_again_under_a_new_coordinator(
    tmp_path: Path,
) -> None:
    world = failed_change(tmp_path)
    started = list(world.started)
    for _ in range(2):
        world.replace_coordinator()
        world.go_on(120.0)
        assert world.is_training() and world.live.state.change.failed, world.log[-8:]
        assert world.started == started, world.log[-8:]


def test_it_is_tried_again_where_the_agent_of_its_host_is_a_new_one(tmp_path: Path) -> None:
    world = failed_change(tmp_path)
    world.kill("c", is_disk_lost=False)
    world.replace_coordinator()
    world.hosts["c"].cannot_start = False
    world.go_on(200.0)
    assert world.is_training() and len(world.live.state.current.active) == 3, world.log[-8:]


def test_so_it_is_where_the_agent_was_new_just_before_the_coordinator_was_lost(
    tmp_path: Path,
) -> None:
    world = failed_change(tmp_path)
    world.kill("c", is_disk_lost=False)
    world.go_on(0.5)
    world.act("c", "net")
    all_hear(world)
    world.replace_coordinator()
    world.go_on(200.0)
    assert world.is_training() and len(world.live.state.current.active) == 3, world.log[-8:]


def test_what_has_failed_is_known_though_its_host_comes_to_the_second_coordinator_only(
    tmp_path: Path,
) -> None:
    world = failed_change(tmp_path)
    started = list(world.started)
    world.hosts["c"].is_silent = True
    for _ in range(2):
        world.replace_coordinator()
        world.go_on(20.0)
    world.hosts["c"].is_silent = False
    world.go_on(120.0)
    assert world.is_training() and world.started == started, world.log[-8:]


@pytest.mark.fault
def test_a_change_that_fails_under_a_new_coordinator_goes_back_to_what_ran(tmp_path: Path) -> None:
    world = training(tmp_path)
    left = world.live.state.budget.left
    world.add("c")
    world.hosts["c"].cannot_start = True
    world.go_on(2.0)
    until(world, Phase.STARTING)
    all_hear(world)
    world.replace_coordinator()
    world.go_on(300.0)
    assert world.is_training() and world.live.state.budget.left == left, world.log
    assert set(world.live.state.current.active) == {"a", "b"} and world.live.state.change.failed


def test_what_the_job_has_brought_to_the_disk_is_known_to_the_next_coordinator(
    tmp_path: Path,
) -> None:
    world = training(tmp_path, snapshot_every=7, archive_every_s=30.0)
    world.go_on(120.0)
    archived = world.live.state.copies.archived
    assert archived, world.log
    world.replace_coordinator()
    world.go_on(12.0)
    assert world.live.state.copies.archived[: len(archived)] == archived, world.log


@pytest.mark.fault
def test_steps_that_were_lost_are_told_to_workers_of_later_coordinators_rounds(
    tmp_path: Path,
) -> None:
    """The ledger of samples keeps them, by the names of the rounds that had done them."""
    world = training(tmp_path)
    for name in "ab":
        world.kill(name, is_disk_lost=False)
    world.go_on(120.0)
    lost = world.live.state.states.lost
    assert world.is_training() and lost, world.log[-8:]
    named = [f"{world.live.run}-{each.round}" for each in lost]
    for _ in range(2):
        world.replace_coordinator()
        world.go_on(30.0)
        assert world.is_training(), world.log[-8:]
        assert [each.round for each in world.live.state.states.lost] == named
        assert [each.until for each in world.live.state.states.lost] == [
            each.until for each in lost
        ]
    heard: list[str] = []
    start = world.live._starter.start

    def listen(action: Any) -> None:
        heard.extend(each.round for each in action.lost)
        start(action)

    world.live._starter.start = listen
    world.scale(2)
    world.go_on(60.0)
    assert set(heard) == set(named)
