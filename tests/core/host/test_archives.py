"""Both laws, and a disk that all hosts share: generations that come there while the job trains, and
a job that loses more than its hosts can replace."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalai.core.job.membership import Phase
from support.simulated_workers import use_real_time, use_virtual_time
from support.two_laws import World

pytestmark = pytest.mark.fault


@pytest.fixture(autouse=True)
def virtual_time() -> Iterator[None]:
    use_virtual_time()
    yield
    use_real_time()


def training(folder: Path, hosts: str = "abc", **settings: Any) -> World:
    """Return a job that trains, with a snapshot every 4 steps and an archive every 100 s; each host
    alone has written some of it, and no other keeps it."""
    flags = ("--nnodes", "1:4", "--max-restarts", "9", "--replicas", "0")
    settings |= {"snapshot_every": 4, "archive_every_s": 100.0}
    world = World(folder, flags, is_replicated=False, **settings)
    for host in hosts:
        world.add(host)
    world.go_on(60.0)
    assert world.is_training(), world.log
    return world


def logged(world: World, text: str) -> bool:
    return any(text in line for line in world.log)


def lose(world: World, *hosts: str) -> None:
    for host in hosts:
        world.kill(host, is_disk_lost=True)


def test_generations_come_to_the_disk_and_older_ones_go(tmp_path: Path) -> None:
    world = training(tmp_path)
    assert not world.disk.shown, "the first one comes after a while"
    world.go_on(120.0)
    (first,) = world.disk.shown
    world.go_on(700.0)
    world.disk.check()
    assert len(world.disk.shown) == 2 and first < min(world.disk.shown), world.log
    assert logged(world, "event=archived generation=")


def test_a_job_that_loses_more_than_it_can_replace_goes_back_to_the_disk_unasked(
    tmp_path: Path,
) -> None:
    world = training(tmp_path)
    world.go_on(300.0)
    archived, (_, step) = max(world.disk.shown), world.furthest()
    lose(world, "a", "b")
    world.go_on(120.0)
    assert world.is_training(), world.log
    assert world.started[-1][1] == archived, "the newest that is on the disk"
    assert logged(world, "from='a durable directory'"), world.log
    world.go_on(120.0)
    assert world.furthest()[1] > step


def test_all_hosts_are_lost_and_others_go_on_from_the_disk(tmp_path: Path) -> None:
    world = training(tmp_path)
    world.go_on(300.0)
    archived = max(world.disk.shown)
    lose(world, "a", "b", "c")
    world.restart()
    world.add("d")
    world.go_on(120.0)
    assert world.is_training() and world.started[-1][1] == archived, world.log


def test_what_not_all_have_written_is_not_shown(tmp_path: Path) -> None:
    """A host dies in the middle of an archive, with its part."""
    world = training(tmp_path)
    while not world.disk.hidden:
        world.train()
        world.tick(1.0)
        for host in "ab":
            for what in ("net", "work", "workers"):
                world.act(host, what)
        for what in ("net", "workers"):
            world.act("c", what)
        if world.live.state.copies.archiving is None:  # else it would write its part
            world.act("c", "work")
    lose(world, "c")
    world.go_on(60.0)
    assert not world.disk.shown and logged(world, "event=archive_given_up"), world.log
    world.go_on(200.0)
    assert world.disk.shown, world.log
    world.disk.check()


def test_what_all_have_written_is_shown_though_a_host_dies_before(tmp_path: Path) -> None:
    world = training(tmp_path)
    while len(next(iter(world.disk.hidden.values()), {})) < 3:
        world.train()
        world.tick(1.0)
        for host in "abc":
            for what in ("net", "work", "workers"):
                world.act(host, what)
    lose(world, "c")
    world.go_on(30.0)
    assert world.disk.shown or logged(world, "event=archive_given_up"), world.log
    world.disk.check()


def test_a_disk_that_refuses_is_said_and_tried_again(tmp_path: Path) -> None:
    world = training(tmp_path)
    world.disk.is_full = True
    world.go_on(150.0)
    assert logged(world, "event=not_archived host=a the disk is full"), world.log
    assert world.is_training() and not world.disk.shown
    world.disk.is_full = False
    world.go_on(150.0)
    assert world.disk.shown, world.log


def test_a_host_that_joins_brings_nothing_back_that_the_disk_has(tmp_path: Path) -> None:
    world = training(tmp_path, hosts="ab")
    world.go_on(300.0)
    _, step = world.furthest()
    world.add("c")
    world.go_on(120.0)
    assert world.is_training() and len(world.live.state.current.active) == 3, world.log
    assert world.furthest()[1] > step
    assert max(len(host.store) for host in world.hosts.values()) <= 2


def test_what_an_earlier_run_left_on_the_disk_is_gone_back_to_by_a_person_only(
    tmp_path: Path,
) -> None:
    world = training(tmp_path)
    world.go_on(150.0)
    assert world.disk.shown
    world.restart()
    for host in "abc":
        world.add(host)
    world.go_on(60.0)
    assert world.is_training() and not world.live.state.copies.archived, world.log
    lose(world, "a", "b")
    world.go_on(60.0)
    assert world.phase is Phase.WAITING, world.log
