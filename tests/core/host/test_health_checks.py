"""Hosts with a health check under both laws: who fails it is not used again until it passes,
whichever coordinator asks, and the others go on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scalai.core.job.membership import Phase
from support.simulated_workers import Clock, use_real_time, use_virtual_time
from support.two_laws import World


@pytest.fixture(autouse=True)
def virtual_time() -> Iterator[None]:
    use_virtual_time()
    Clock.now = 1000.0
    yield
    use_real_time()


def training(folder: Path, hosts: str = "abc") -> World:
    world = World(folder, has_checks=True)
    for name in hosts:
        world.add(name)
    world.go_on(90.0)
    assert world.is_training() and runs(world) == set(hosts), world.log[-5:]
    return world


def runs(world: World) -> set[str]:
    return set(world.live.state.current.active)


def fall_sick(world: World, name: str) -> None:
    """A worker of a host fails, and the host fails its health check then."""
    number, _ = world.furthest()
    rank = next(iter(world.hosts[name].hands.groups[number].workers))
    world.hosts[name].is_sick = True
    world.kill_worker(name, rank)


def test_who_fails_its_check_is_not_used_until_it_passes(tmp_path: Path) -> None:
    world = training(tmp_path)
    fall_sick(world, "b")
    world.go_on(200.0)
    assert world.is_training() and runs(world) == {"a", "c"}, world.log[-8:]
    world.hosts["b"].is_sick = False
    world.go_on(300.0)
    assert world.is_training() and runs(world) == {"a", "b", "c"}, world.log[-8:]


@pytest.mark.fault
@pytest.mark.parametrize("phase", [Phase.FREEZING, Phase.STOPPING, Phase.STARTING, Phase.RUNNING])
def test_nor_is_it_by_another_coordinator(tmp_path: Path, phase: Phase) -> None:
    world = training(tmp_path)
    fall_sick(world, "b")
    world.go_on(0.5)
    for _ in range(400):
        for name in "abc":
            for what in ("net", "work", "workers"):
                if world.phase is not phase:
                    world.act(name, what)
        if world.phase is phase:
            break
        world.tick(0.5)
    assert world.phase is phase, world.log[-8:]
    world.replace_coordinator()
    world.go_on(250.0)
    assert world.is_training() and runs(world) == {"a", "c"}, world.log[-8:]
    world.hosts["b"].is_sick = False
    world.go_on(400.0)
    assert world.is_training() and runs(world) == {"a", "b", "c"}, world.log[-8:]
