"""Both laws at once: a host's part of the newest generation is damaged, and a round needs it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalai.core.job.membership import Phase
from support.simulated_workers import use_real_time, use_virtual_time
from support.two_laws import World

KINDS = ["rotten", "cut", "wrong for the script"]


@pytest.fixture(autouse=True, scope="module")
def virtual_time() -> Iterator[None]:
    use_virtual_time()
    yield
    use_real_time()


def training(folder: Path, **settings: Any) -> World:
    """Return a job that trains on hosts a and b, of which all has snapshots."""
    use_virtual_time()
    world = World(folder, **settings)
    world.add("a")
    world.add("b")
    world.go_on(90.0)
    assert world.is_training() and world.newest_whole(), world.log
    return world


def fail(world: World) -> None:
    """A worker dies in the middle of an update: what was written before is needed."""
    number, _ = world.furthest()
    for host in world.hosts.values():
        for worker in host.hands.groups[number].workers.values():
            worker.is_torn = True
    world.kill_worker("b", 2)


def logged(world: World, text: str) -> list[str]:
    return [line for line in world.log if text in line]


def commit_unreplicated(world: World) -> None:
    """Let the job train until it has a newer generation, of which there are no replicas yet."""
    world.go_on(60.0)
    before, steps = world.newest_whole(), 0
    while (world.newest_whole() or 0) <= (before or 0):  # replicas of it come by "work"
        world.tick(0.5)
        for name in "ab":
            for each in ("net", "workers"):
                world.act(name, each)
            if len(world.hosts[name].store) < 2:
                world.act(name, "work")
        world.train()
        steps += 1
        assert steps < 1000, world.log[-30:]


@pytest.mark.parametrize("is_replicated", [True, False])
@pytest.mark.parametrize("what", KINDS)
def test_a_damaged_part_is_fetched_anew_from_who_has_it_at_no_further_restart(
    tmp_path: Path, what: str, is_replicated: bool
) -> None:
    """All hold all of it, or the other one keeps a replica."""
    world = training(tmp_path, is_replicated=is_replicated)
    newest, left = world.newest_whole(), world.live.state.budget.left
    world.hosts["a"].damage(what, 4)
    assert world.newest_whole() == newest
    fail(world)
    world.go_on(300.0)
    assert world.is_training(), world.log[-30:]
    assert logged(world, "event=damage generation=")
    assert world.live.state.budget.left == left - 1, "the worker that died"
    assert {generation for _, generation in world.started[1:]} == {newest}


@pytest.mark.parametrize("what", KINDS)
def test_where_nothing_else_is_whole_the_job_ends_and_says_so(tmp_path: Path, what: str) -> None:
    flags = ("--nnodes", "1:4", "--max-restarts", "9", "--replicas", "0")
    world = training(tmp_path, is_replicated=False, flags=flags)
    world.hosts["a"].damage(what, 4)
    fail(world)
    world.go_on(600.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 3, world.log[-30:]
    (end,) = logged(world, "event=exit")
    assert "nothing else is whole" in end and f"is {what}" in end and "host 'a'" in end
    assert all(host.store for host in world.hosts.values()), "nothing is deleted"


@pytest.mark.parametrize("what", KINDS)
def test_what_is_damaged_before_it_is_replicated_is_passed_over(tmp_path: Path, what: str) -> None:
    world = training(tmp_path, is_replicated=False, snapshot_every=4)
    commit_unreplicated(world)
    world.hosts["a"].damage(what, 4)
    world.go_on(120.0)
    assert world.is_training(), world.log[-30:]
    assert logged(world, "event=suspected by=b hosts=a"), world.log[-30:]
    assert logged(world, "event=damage generation=")
    fail(world)
    world.go_on(300.0)
    assert world.is_training() and world.live.exit_code == 0, world.log[-30:]


def examine_unheard(world: World, name: str, number: int) -> None:
    """A host reads its part again, and the coordinator dies before it hears what was found."""
    world.hosts[name].examine(number)
    world.hosts[name].unsent.clear()
    world.replace_coordinator()
    world.go_on(60.0)
    assert world.is_training() and logged(world, "event=adopted"), world.log[-30:]


@pytest.mark.fault
@pytest.mark.parametrize("what", KINDS)
def test_what_was_found_damaged_is_known_to_the_next_coordinator(tmp_path: Path, what: str) -> None:
    flags = ("--nnodes", "1:4", "--max-restarts", "9", "--replicas", "0")
    world = training(tmp_path, is_replicated=False, flags=flags)
    world.hosts["a"].damage(what, 4)
    examine_unheard(world, "a", max(world.hosts["a"].store))
    fail(world)
    world.go_on(600.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 3, world.log[-30:]
    (end,) = logged(world, "event=exit")
    assert "nothing else is whole" in end and f"is {what}" in end and "host 'a'" in end


@pytest.mark.fault
def test_the_next_coordinator_has_what_is_not_whole_any_more_make_room(tmp_path: Path) -> None:
    """As the one before would have, had it lived to hear of it."""
    world = training(tmp_path, is_replicated=False, snapshot_every=4)
    commit_unreplicated(world)
    newest = max(world.hosts["a"].store)
    world.hosts["a"].damage("rotten", 4)
    examine_unheard(world, "a", newest)
    assert logged(world, f"event=given_up generation={newest}"), world.log[-30:]
    assert all(newest not in host.store for host in world.hosts.values())


def test_what_has_come_whole_again_is_told_to_no_other_coordinator(tmp_path: Path) -> None:
    world = training(tmp_path)
    newest = world.newest_whole()
    world.hosts["a"].damage("rotten", 4)
    fail(world)
    world.go_on(300.0)
    assert world.is_training() and logged(world, "event=damage generation=")
    world.log.clear()
    world.replace_coordinator()
    world.go_on(60.0)
    assert world.is_training() and world.newest_whole() == newest
    assert not logged(world, "event=damage "), world.log


@pytest.mark.fault
@pytest.mark.parametrize("later", range(5))
def test_whenever_the_coordinator_dies_behind_its_examination_an_older_state_is_gone_on_from(
    tmp_path: Path, later: int
) -> None:
    """As the one before would have: no person is asked."""
    world = training(tmp_path, is_replicated=False, snapshot_every=4)
    commit_unreplicated(world)
    newest = max(world.hosts["a"].store)
    world.hosts["a"].damage("cut", 4)
    fail(world)
    while not logged(world, "event=damage generation="):
        step_on(world)
    for _ in range(later):
        step_on(world)
    world.replace_coordinator()
    world.go_on(300.0)
    assert world.is_training(), "\n".join(world.log[-30:])
    assert all(newest not in host.store for host in world.hosts.values())


def step_on(world: World) -> None:
    """Let a moment pass, in which each host does one thing of each kind."""
    world.tick(0.5)
    for name in "ab":
        for each in ("net", "work", "workers"):
            world.act(name, each)
    assert len(world.log) < 1000, world.log[-30:]
