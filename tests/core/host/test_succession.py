"""A coordinator dies, and another one takes its place: the workers train on, no step is lost, and
the job can be changed again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import UsageError
from scalai.core.host.events import Commanded, GroupOver
from scalai.core.job.membership import Phase
from scalai.core.messages import commands
from scalai.launch.coordinator.person_calls import Scale
from support.simulated_workers import Clock, use_real_time, use_virtual_time
from support.two_laws import World, training

pytestmark = pytest.mark.fault

MOST_ACTS = 400


@pytest.fixture(autouse=True)
def virtual_time() -> Iterator[None]:
    use_virtual_time()
    Clock.now = 1000.0
    yield
    use_real_time()


def test_the_workers_train_on_under_the_new_coordinator(tmp_path: Path) -> None:
    world = training(tmp_path)
    number, step = world.furthest()
    started = list(world.started)
    world.replace_coordinator()
    world.go_on(10.0)
    assert world.phase is Phase.RUNNING and world.live.state.round == number
    world.go_on(30.0)
    assert world.started == started, "nothing was started anew"
    assert world.furthest()[1] > step
    assert any("event=adopted" in line for line in world.log)


@pytest.mark.parametrize("late", ["a", "b", "ab"])
def test_a_round_is_adopted_however_late_its_hosts_come(tmp_path: Path, late: str) -> None:
    world = training(tmp_path)
    started = list(world.started)
    world.replace_coordinator()
    for name in late:
        world.hosts[name].is_silent = True
    world.go_on(12.0)
    for name in late:
        world.hosts[name].is_silent = False
    world.go_on(30.0)
    assert world.phase is Phase.RUNNING and world.started == started, world.log[-6:]
    assert world.is_training()


def test_snapshots_stay_as_far_apart_as_the_workers_know(tmp_path: Path) -> None:
    world = training(tmp_path, snapshot_every="auto", is_async=True)
    world.space(7, 20)
    world.go_on(60.0)
    world.replace_coordinator()
    world.go_on(30.0)
    assert world.phase is Phase.RUNNING and world.live.state.spacing.every == 7
    number, _ = world.furthest()
    before = {host.hands.groups[number].spaced for host in world.hosts.values()}
    world.go_on(30.0)
    after = {host.hands.groups[number].spaced for host in world.hosts.values()}
    assert before == after and len(after) == 1, "nobody is told what all know"


def test_where_the_last_word_has_reached_some_all_are_told(tmp_path: Path) -> None:
    world = training(tmp_path, snapshot_every="auto", is_async=True)
    number, step = world.furthest()
    told = commands.Space(number, step + 20, 7)
    world.hosts["a"].agent.feed(Commanded(told, None))
    world.replace_coordinator()
    world.go_on(90.0)
    found = {host.hands.groups[number].spaced for host in world.hosts.values()}
    assert world.phase is Phase.RUNNING and len(found) == 1 and found.pop() is not None, world.log


def test_the_new_coordinator_takes_a_persons_request(tmp_path: Path) -> None:
    world = training(tmp_path)
    world.replace_coordinator()
    world.go_on(10.0)
    step = world.furthest()[1]
    world.scale(2)
    world.go_on(60.0)
    assert world.is_training() and len(world._workers()) == 2
    assert world.furthest()[1] > step and world.started[-1][1] is not None


def test_what_a_person_had_asked_for_holds_under_the_new_coordinator(tmp_path: Path) -> None:
    world = training(tmp_path)
    world.scale(2)
    world.go_on(60.0)
    assert len(world._workers()) == 2
    world.replace_coordinator()
    world.go_on(60.0)
    assert world.is_training() and len(world._workers()) == 2


def test_a_host_that_is_gone_with_the_coordinator_costs_no_step(tmp_path: Path) -> None:
    world = training(tmp_path, "abc")
    step = world.furthest()[1]
    world.kill("a", is_disk_lost=True)
    world.replace_coordinator()
    world.go_on(100.0)
    assert world.is_training(), world.log[-8:]
    assert "a" not in world.live.state.current.members
    assert world.furthest()[1] >= step


def test_a_job_that_waits_goes_on_waiting(tmp_path: Path) -> None:
    world = World(tmp_path, flags=("--nnodes", "2:4", "--max-restarts", "9"))
    world.add("a")
    world.go_on(10.0)
    assert world.phase is Phase.WAITING
    world.replace_coordinator()
    world.go_on(60.0)
    assert world.phase is Phase.WAITING
    world.add("b")
    world.go_on(60.0)
    assert world.is_training()


def step_by_step(world: World, count: int) -> bool:
    """Let so many things happen, one at a time; return whether there were so many."""
    for _ in range(count):
        before = world.happened
        for name in list(world.hosts):
            for what in ("net", "work", "workers"):
                if world.happened == before:
                    world.act(name, what)
        if world.happened == before:
            world.train()
            world.tick(1.0)
    return world.phase is not Phase.RUNNING or world.is_training()


@pytest.mark.parametrize(
    "every", [24, pytest.param(3, marks=[pytest.mark.campaign, pytest.mark.turns])]
)
@pytest.mark.parametrize("is_replicated", [True, False])
@pytest.mark.parametrize("hosts", ["ab", "abc"])
def test_wherever_a_change_is_when_the_coordinator_dies_no_step_is_lost(
    tmp_path: Path, hosts: str, is_replicated: bool, every: int
) -> None:
    phases = set()
    for acts in range(0, MOST_ACTS, every):
        Clock.now = 1000.0
        world = training(tmp_path, hosts, is_replicated=is_replicated, snapshot_every=7)
        world.scale(2)
        step_by_step(world, acts)
        phases.add(world.phase)
        _, step = world.furthest()
        newest = world.newest_whole()
        world.replace_coordinator()
        world.go_on(150.0)
        why = f"after {acts} acts: {world.phase} {world.log[-12:]}"
        assert world.is_training(), why
        assert world.furthest()[1] >= step, why
        assert (world.newest_whole() or 0) >= (newest or 0), why
    if every == 3:
        assert {Phase.RUNNING, Phase.BUILDING, Phase.STARTING, Phase.SNAPSHOTTING} <= phases


def all_at_once(world: World, name: str, count: int = 60) -> None:
    """Let one host do all that it can, alone."""
    for _ in range(count):
        for what in ("net", "work", "workers"):
            world.act(name, what)


def test_what_a_host_tells_before_the_round_is_adopted_is_heard_then(tmp_path: Path) -> None:
    world = training(tmp_path)
    world.replace_coordinator()
    all_at_once(world, "a")
    for name in "ab":
        host = world.hosts[name]
        number = host.agent.state.round.number  # type: ignore[union-attr]
        host.agent.feed(GroupOver(number))
        all_at_once(world, name)
    world.go_on(30.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 0, world.log[-5:]


def test_a_job_whose_workers_have_all_finished_is_not_begun_again(tmp_path: Path) -> None:
    world = training(tmp_path, flags=("--nnodes", "2", "--max-restarts", "0"))
    started = list(world.started)
    number = world.hosts["b"].agent.state.round.number  # type: ignore[union-attr]
    world.hosts["b"].agent.feed(GroupOver(number))
    world.kill("a", is_disk_lost=True)  # it has had its exit
    world.replace_coordinator()
    world.go_on(60.0)
    assert world.phase is Phase.ENDED and world.live.exit_code == 0, world.log[-5:]
    assert world.started == started


def test_a_job_that_had_begun_anew_keeps_what_it_has_made_since(tmp_path: Path) -> None:
    world = training(tmp_path, flags=("--nnodes", "1:4", "--fresh"), snapshot_every=7)
    world.go_on(60.0)
    newest = world.newest_whole()
    assert newest is not None and newest > 1
    world.replace_coordinator()
    world.go_on(30.0)
    assert world.phase is Phase.RUNNING and (world.newest_whole() or 0) >= newest
    assert not any("gives up" in line for line in world.log), world.log
    world.kill("a", is_disk_lost=False)
    world.go_on(60.0)
    assert world.is_training() and world.started[-1][1] is not None


@pytest.mark.parametrize("acts", range(0, 60, 6))
def test_a_job_of_fixed_size_without_restarts_outlives_its_coordinator(
    tmp_path: Path, acts: int
) -> None:
    """At its first start, and at the stop of a change."""
    world = World(tmp_path, flags=("--nnodes", "2", "--max-restarts", "0"))
    for name in "ab":
        world.add(name)
    step_by_step(world, acts)
    world.replace_coordinator()
    world.go_on(90.0)
    assert world.is_training(), world.log[-8:]
    world.scale(2)
    step_by_step(world, acts)
    world.replace_coordinator()
    world.go_on(150.0)
    assert world.is_training(), world.log[-8:]


def test_a_request_is_refused_until_it_is_known_what_runs(tmp_path: Path) -> None:
    world = training(tmp_path)
    world.replace_coordinator()
    person: Any = None
    with pytest.raises(UsageError, match="Ask again in a moment"):
        world.desk.handle(person, Scale(2, None, None, dry_run=False))


def test_a_request_that_workers_are_built_for_is_not_forgotten(tmp_path: Path) -> None:
    world = training(tmp_path)
    world.scale(2)
    step_by_step(world, 6)
    assert world.phase in (Phase.BUILDING, Phase.PREPARING)
    built = world.live.state.change.last_round
    world.replace_coordinator()
    world.go_on(120.0)
    assert world.is_training() and len(world._workers()) == 2
    assert world.live.state.round > built, "no number of a round is used twice"
