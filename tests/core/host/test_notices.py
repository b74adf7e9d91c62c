"""Both laws at once: a host is told that it will be taken away."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalai.core.job.spacing import Pace
from support.simulated_workers import use_real_time, use_virtual_time
from support.two_laws import World

pytestmark = pytest.mark.fault


@pytest.fixture(autouse=True, scope="module")
def virtual_time() -> Iterator[None]:
    use_virtual_time()
    yield
    use_real_time()


def training(folder: Path, hosts: str = "ab", **settings: Any) -> World:
    world = World(folder, **settings)
    for name in hosts:
        world.add(name)
    world.go_on(60.0)
    assert world.is_training(), world.log
    return world


def test_a_notice_with_enough_time_is_a_drain_that_loses_no_step(tmp_path: Path) -> None:
    world = training(tmp_path, is_replicated=False)
    world.notice("a", 300.0)
    world.go_on(60.0)
    assert world.is_training() and world.hosts["a"].agent.exit == 0, world.log
    assert "event=went_back" not in "\n".join(world.log)
    assert any("event=notice host=a" in line for line in world.log)


def test_a_host_that_is_killed_before_it_has_drained_has_given_what_it_held(tmp_path: Path) -> None:
    world = training(tmp_path, is_replicated=False, flags=("--nnodes", "1:4", "--replicas", "0"))
    newest = world.newest_whole()
    world.live.state = _slow(world.live.state)
    for worker in (w for g in world.hosts["a"].hands._groups.values() for w in g.workers.values()):
        worker.is_hung = True  # in the middle of a step of a minute
    world.notice("a", 20.0)
    world.go_on(5.0)
    assert any("event=evacuated" in line for line in world.log), world.log
    world.kill("a", is_disk_lost=True)
    world.go_on(120.0)
    assert world.is_training() and newest is not None, world.log
    assert world.started[-1][1] == newest


def test_a_notice_that_is_withdrawn_leaves_the_host_in_the_job(tmp_path: Path) -> None:
    world = training(tmp_path)
    world.notice("a", 300.0)
    world.take_back("a")
    world.go_on(60.0)
    assert world.is_training() and world.hosts["a"].agent.exit is None, world.log
    assert set(world.live.state.current.active) == {"a", "b"}


def _slow(state: Any) -> Any:
    from dataclasses import replace

    pace = Pace(step_s=60.0, write_s=1.0, start_s=1.0)
    return replace(state, change=replace(state.change, pace=pace))
