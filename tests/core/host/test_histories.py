"""Both laws at once: random histories of a coordinator and its hosts over a network that loses,
delays and repeats, with hosts that die, hang, fall silent and come back."""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from scalai.core.errors import ScalaiError
from scalai.core.host import events, snapshots
from scalai.core.host.step import Step
from scalai.core.job.membership import Phase
from scalai.launch.coordinator.calls import Join
from scalai.launch.coordinator.joins import Admission
from scalai.launch.coordinator.members import Members
from support.histories import Histories
from support.simulated_workers import Clock, use_real_time, use_virtual_time
from support.two_laws import TICK_S, World


@pytest.fixture(autouse=True, scope="module")
def virtual_time() -> Iterator[None]:
    use_virtual_time()
    yield
    use_real_time()


def test_a_job_begins_trains_changes_and_ends_a_hosts_part(tmp_path: Path) -> None:
    use_virtual_time()
    world = World(tmp_path)
    world.add("a")
    world.add("b")
    world.go_on(60.0)
    assert world.is_training(), world.log
    world.add("c")
    world.go_on(120.0)
    assert world.is_training() and len(world.live.state.current.active) == 3, world.log
    assert world.started[-1][1] is not None, "from what was written"
    world.leave("a")
    world.go_on(120.0)
    assert world.is_training() and world.hosts["a"].agent.exit == 0, world.log


def two_hosts(folder: Path, **settings: Any) -> World:
    """Return a job that trains on hosts a and b."""
    use_virtual_time()
    world = World(folder, **settings)
    world.add("a")
    world.add("b")
    world.go_on(60.0)
    assert world.is_training(), world.log
    return world


def logged(world: World, text: str) -> bool:
    return any(text in line for line in world.log)


def test_snapshots_are_made_on_the_way(tmp_path: Path) -> None:
    world = two_hosts(tmp_path, snapshot_every=4)
    world.go_on(60.0)
    assert logged(world, "event=snapshot committed=") and len(world.hosts["a"].store) == 1


def test_what_is_copied_beside_the_training_may_be_told_late(tmp_path: Path) -> None:
    world = two_hosts(tmp_path, snapshot_every=4, is_async=True)
    world.go_on(60.0)
    number, step = world.furthest()
    for host in world.hosts.values():
        for worker in host.hands.groups[number].workers.values():
            worker.is_copying = True
    for _ in range(6):
        world.train()
        world.act("a", "workers")
        world.act("b", "workers")
    assert world.furthest()[1] > step, "the training does not wait for it"
    world.scale(2)
    world.go_on(120.0)
    assert world.is_training() and world.live.state.current.degrees.world_size == 2, world.log
    assert logged(world, "event=snapshot committed="), world.log


def test_a_job_chooses_how_often_by_the_slowest_host_and_all_workers_agree(tmp_path: Path) -> None:
    world = two_hosts(tmp_path, snapshot_every="auto", is_async=True)
    for name, cost_s in (("a", 1.0), ("b", 4.0)):
        world.hosts[name].seconds = {"cost": cost_s, "step": 5.0}
    while not logged(world, "event=snapshot committed="):
        world.go_on(60.0)
        assert world.furthest()[1] < 500, world.log
    world.go_on(60.0)
    assert logged(world, "event=snapshot_every k=720 cost_s=4.000 step_s=5 "), world.log
    number, _ = world.furthest()
    told = {host.hands.groups[number].spaced for host in world.hosts.values()}
    assert len(told) == 1 and {each.every for each in told} == {720}
    assert not any("may leave out" in line for host in world.hosts.values() for line in host.log)
    world.kill_worker("a", 0)
    world.go_on(120.0)
    assert world.is_training() and world.furthest()[0] > number, world.log
    assert logged(world, "event=snapshot_every k=34 cost_s=4.000 step_s=5 mtbf_s=36"), world.log
    groups = [host.hands.groups[world.furthest()[0]] for host in world.hosts.values()]
    workers = [worker for group in groups for worker in group.workers.values()]
    assert {worker.schedule.every for worker in workers} == {34}


@pytest.mark.fault
def test_a_host_without_room_leaves_snapshots_out_and_holds_up_nobody(tmp_path: Path) -> None:
    """Each host alone has some of the state: what the other one has written of it goes."""
    world = two_hosts(tmp_path, snapshot_every=4, is_async=True, is_replicated=False)
    world.go_on(30.0)
    world.hosts["a"].is_full = True
    before, (_, step) = len(world.log), world.furthest()
    world.go_on(120.0)
    assert world.furthest()[1] > step + 8, world.log
    refused = [line for line in world.log[before:] if "event=snapshot step=" in line]
    assert refused and not world.hosts["b"].sealed, world.log
    assert any("event=snapshot_skipped" in line for line in world.hosts["a"].log)
    world.hosts["a"].is_full, before = False, len(world.log)
    world.go_on(600.0)
    assert any("event=snapshot committed=" in line for line in world.log[before:]), world.log


def without_coordinator(world: World, seconds: float) -> Iterator[None]:
    """Let the hosts train while the coordinator answers nobody."""
    end, slow = Clock.now + seconds, random.Random(3)
    while Clock.now < end:
        for what in ("work", "workers", "work", "workers"):
            for name in list(world.hosts):
                if what != "work" or name == "a" or slow.random() < 0.2:
                    world.act(name, what)
        world.train()
        Clock.now += TICK_S
        for host in world.hosts.values():
            host.agent.feed(
                events.TimePassed(host.clock_s, host.hands.seen(host.agent.state.round))
            )
        yield


@pytest.mark.fault
@pytest.mark.parametrize("is_async", [True, False])
def test_while_the_coordinator_is_silent_memory_stays_bounded_and_one_snapshot_is_of_all(
    tmp_path: Path, is_async: bool
) -> None:
    world = two_hosts(tmp_path, snapshot_every=4, is_async=is_async, is_replicated=False)
    world.go_on(60.0)
    before, began = len(world.log), world.furthest()[1]
    for _ in without_coordinator(world, 300.0):
        held = [set(host.sealed) for host in world.hosts.values()]
        assert max(map(len, held)) <= 3, "two, and one that others may not have yet"
        if world.furthest()[1] > began + 9:
            assert set.intersection(*held), "else nothing is left of them if all die now"
    step = world.furthest()[1]
    assert step > began + 20, "the training goes on meanwhile"
    world.go_on(120.0)
    assert world.is_training() and world.furthest()[1] > step, world.log[before:]
    assert not logged(world, "event=lost"), world.log[before:]
    assert all(len(host.sealed) < 2 for host in world.hosts.values())
    assert any("event=snapshot committed=" in line for line in world.log[before:])


@pytest.mark.fault
def test_after_a_silent_coordinator_and_the_death_of_all_the_newest_common_snapshot_counts(
    tmp_path: Path,
) -> None:
    world = two_hosts(tmp_path, snapshot_every=4, is_replicated=False)
    world.go_on(60.0)
    for _ in without_coordinator(world, 200.0):
        pass
    (newest, *_) = sorted(
        (int(n.rpartition("-")[2]) for n in set.intersection(*(
            set(host.sealed) for host in world.hosts.values()))), reverse=True
    )  # fmt: skip
    world.restart()
    for name in "ab":
        world.add(name)
    world.go_on(60.0)
    assert world.is_training(), world.log
    number = world.started[-1][1]
    assert number is not None and any(f"step={newest} " in line for line in world.log), world.log


def test_a_training_that_hangs_is_started_again_and_loses_no_step(tmp_path: Path) -> None:
    world = two_hosts(tmp_path)
    world.go_on(60.0)
    number, step = world.furthest()
    world.hosts["b"].hands.groups[number].workers[2].is_hung = True
    world.go_on(250.0)
    assert world.furthest() == (number, step), "it may be a pause"
    world.go_on(200.0)
    assert logged(world, "hangs: no worker has made a step for 3"), world.log
    assert world.is_training() and world.furthest() > (number + 1, step), world.log


@pytest.mark.fault
def test_two_hosts_that_do_not_hear_each_other_do_not_stop_the_others(tmp_path: Path) -> None:
    """Each hears the coordinator; the round that ran cannot be made again."""
    world = two_hosts(tmp_path)
    world.add("c")
    world.go_on(120.0)
    number, step = world.furthest()
    world.broken.add(frozenset("bc"))
    world.go_on(900.0)
    assert logged(world, "event=unheard b and c do not hear each other"), world.log
    assert world.is_training() and len(world.live.state.current.active) == 2, world.log
    assert world.furthest() > (number, step) and world.live.state.budget.left >= 8, world.log
    world.broken.clear()
    world.go_on(900.0)
    assert world.is_training() and len(world.live.state.current.active) == 3, world.log


def three_with_shards(folder: Path, **settings: Any) -> World:
    """Return a job that trains on hosts a, b and c, each of which alone has written some of it."""
    world = two_hosts(folder, is_replicated=False, **settings)
    world.add("c")
    world.go_on(120.0)
    assert world.is_training() and len(world.live.state.current.active) == 3, world.log
    return world


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_host_whose_shards_nobody_else_has_written_may_be_lost_with_its_store(
    tmp_path: Path, lost: str
) -> None:
    world = three_with_shards(tmp_path)
    world.kill(lost, is_disk_lost=True)
    world.go_on(120.0)
    assert world.is_training() and lost not in world.live.state.current.active, world.log
    assert world.started[-1][1] is not None


def test_without_replicas_such_a_job_waits_for_its_host(tmp_path: Path) -> None:
    flags = ("--nnodes", "1:4", "--max-restarts", "9", "--replicas", "0")
    world = three_with_shards(tmp_path, flags=flags)
    world.kill("a", is_disk_lost=True)  # the first ranks are its own, before the change and after
    world.go_on(120.0)
    assert world.phase is Phase.WAITING, world.log


@pytest.mark.fault
def test_two_may_be_lost_at_once_where_there_are_two_replicas(tmp_path: Path) -> None:
    flags = ("--nnodes", "1:4", "--max-restarts", "9", "--replicas", "2")
    world = three_with_shards(tmp_path, flags=flags)
    world.kill("a", is_disk_lost=True)
    world.kill("b", is_disk_lost=True)
    world.go_on(120.0)
    assert world.is_training() and world.live.state.current.active == ("c",), world.log


def test_one_host_after_the_other_may_be_lost(tmp_path: Path) -> None:
    """What a host kept for others is made anew on those that are left."""
    world = three_with_shards(tmp_path)
    for lost, left in (("c", 2), ("a", 1)):
        world.kill(lost, is_disk_lost=True)
        world.go_on(120.0)
        assert world.is_training() and len(world.live.state.current.active) == left, world.log


@pytest.mark.fault
def test_an_older_generation_stays_until_the_newer_one_has_replicas(tmp_path: Path) -> None:
    world = three_with_shards(tmp_path, snapshot_every=4)
    world.go_on(60.0)
    for _ in range(400):
        world.tick(0.5)
        for name in "abc":
            for what in ("net", "workers"):
                world.act(name, what)
            if len(world.hosts[name].store) < 2:  # or it would make its replicas
                world.act(name, "work")
        world.train()
    assert all(len(world.hosts[name].store) == 2 for name in "abc"), world.log
    world.kill("b", is_disk_lost=True)
    world.go_on(120.0)
    assert world.is_training(), world.log
    assert world.started[-1][1] is not None


AT_ANY_TIME = [*range(4), *(pytest.param(n, marks=pytest.mark.campaign) for n in range(4, 60))]


@pytest.mark.fault
@pytest.mark.parametrize("seed", AT_ANY_TIME)
def test_a_host_may_be_lost_with_its_store_at_any_time(tmp_path: Path, seed: int) -> None:
    """Snapshots and replicas are made all the time; workers may fail before the loss is noticed."""
    world = three_with_shards(tmp_path, snapshot_every=4)
    world.go_on(30.0)
    assert logged(world, "event=replicated"), world.log
    chance = random.Random(seed)
    for _ in range(chance.randrange(300)):
        name = chance.choice("abc")
        world.act(name, chance.choice(["net", "work", "workers", "workers"]))
        world.train()
        if chance.random() < 0.1:
            world.tick(0.5)
    lost = chance.choice("abc")
    if chance.random() < 0.5:
        world.kill_worker(next(name for name in "abc" if name != lost), chance.randrange(6))
        for _ in range(chance.randrange(30)):
            name = chance.choice("".join({*"abc"} - {lost}))
            world.act(name, chance.choice(["net", "work", "workers"]))
    world.kill(lost, is_disk_lost=True)
    world.go_on(300.0)
    assert world.is_training() and lost not in world.live.state.current.active, "\n".join(
        world.log[-60:]
    )
    assert world.started[-1][1] is not None


def test_a_host_that_comes_at_once_without_its_disk_is_another_agent(tmp_path: Path) -> None:
    world = two_hosts(tmp_path)
    for name in "ab":
        world.kill(name, is_disk_lost=True)
        world.add(name)
        world.act(name, "net")
        world.go_on(120.0)
        assert world.is_training() and len(world.live.state.current.active) == 2, world.log


def test_an_agent_that_was_paused_is_gone_with_its_machine(tmp_path: Path) -> None:
    world = two_hosts(tmp_path)
    world.replace("a")
    world.wake_ghosts()
    world.kill("a", is_disk_lost=True)
    world.go_on(120.0)
    assert world.is_training() and world.live.state.current.active == ("b",), world.log


def test_a_save_that_is_in_flight_puts_a_change_off(tmp_path: Path) -> None:
    world = two_hosts(tmp_path)
    world.begin_save()
    world.scale(2)
    world.go_on(60.0)
    assert world.phase is Phase.PREPARING and world.live.state.stop.held, world.log
    world.end_save()
    world.go_on(60.0)
    assert world.is_training() and world.live.state.current.degrees.world_size == 2, world.log


def test_a_proof_that_fails_once_costs_no_restart(tmp_path: Path) -> None:
    world = two_hosts(tmp_path)
    left = world.live.state.budget.left
    world.hosts["a"].is_spoilt = True
    world.scale(2)
    world.go_on(120.0)
    assert logged(world, "the restored state is not the written one"), world.log
    assert world.is_training() and world.live.state.budget.left == left, world.log
    assert world.started[-1][1] == world.started[-2][1] is not None


def test_workers_that_cannot_be_on_standby_start_after_the_stop(tmp_path: Path) -> None:
    world = two_hosts(tmp_path)
    world.add("c")
    world.hosts["c"].cannot_start = True
    for _ in range(200):
        if logged(world, "the next workers are not built beside the present ones"):
            break
        world.tick(0.5)
        for name in "abc":
            for what in ("net", "work", "workers"):
                world.act(name, what)
    else:
        raise AssertionError(world.log)
    world.hosts["c"].cannot_start = False
    world.go_on(120.0)
    assert world.is_training() and len(world.live.state.current.active) == 3, world.log


def test_a_coordinator_that_fails_leaves_the_state_for_the_same_job(tmp_path: Path) -> None:
    world = two_hosts(tmp_path)
    newest = world.newest_whole()
    assert world.slip(2) and newest is not None
    world.restart()
    world.go_on(60.0)
    assert world.is_training() and world.started[-1][1] == newest


def test_a_coordinator_that_fails_as_it_loses_its_hosts_leaves_the_state(tmp_path: Path) -> None:
    world = two_hosts(tmp_path, snapshot_every=7)
    newest = world.newest_whole()
    assert newest is not None
    world.scale(1)
    for name in "ab":
        world.cut(name)
    assert world.slip(6)
    assert {host.agent.exit for host in world.hosts.values()} == {1}
    assert (world.newest_whole(of_all=True) or 0) >= newest
    world.restart()
    world.go_on(60.0)
    assert world.is_training() and (world.started[-1][1] or 0) >= newest, world.log


@pytest.mark.fault
def test_a_commit_that_found_no_room_in_time_takes_none_for_ever(tmp_path: Path) -> None:
    """A host has no room for a manifest while the job goes on to later generations: once it has
    room, it keeps nothing of what the job has left behind."""
    world = World(tmp_path, is_replicated=True, snapshot_every=7)
    world.add("a")
    world.add("b")
    world.go_on(60.0)
    world.hosts["b"].is_full = True
    world.go_on(120.0)
    world.heal()
    world.go_on(300.0)
    assert world.is_training(), world.log[-30:]
    newest = world.live.state.newest_generation
    assert newest is not None
    for host in world.hosts.values():
        assert min(host.store, default=newest.number) >= newest.number - 1, sorted(host.store)


def test_workers_that_nobody_was_told_to_build_begin_with_their_round(tmp_path: Path) -> None:
    """A host leaves, and waits for no standby: the round begins before there was a store for it."""
    world = two_hosts(tmp_path)
    number, _ = world.furthest()
    world.delay_stores(is_late=True)
    world.leave("b")
    world.go_on(60.0)
    assert world.phase is Phase.STARTING, world.log
    world.delay_stores(is_late=False)
    world.go_on(60.0)
    assert world.is_training() and world.furthest()[0] == number + 1, world.log


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=16, stateful_step_count=20, deadline=None,
    derandomize=os.environ.get("SCALAI_HISTORIES") != "random",
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def find_any_agent(members: Members, host: str, incarnation: str) -> Any:
    """As it was: whoever calls for a host is taken for its agent."""
    return members._present.get(host) or members._released[host]


_join = Admission.join


def overlook_parts(self: Admission, peer: Any, join: Join, read: Any, spec: Any, **how: Any) -> Any:
    """As it was for some states: what a joining host holds is not looked at."""
    return _join(self, peer, replace(join, parts=(), sealed=()), read, spec, **how)


def forget_who_waits(step: Step) -> None:
    """As it was: who stands at a stop that is taken back stands there for ever."""
    step.change_round(snapshot=None)


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "commands are stolen by an agent that was replaced": (Members, "find", find_any_agent),
    "a job begins at step 0 though its state is there": (Admission, "join", overlook_parts),
    "a training hangs at a stop that was taken back": (snapshots, "withdraw", forget_who_waits),
}


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_that_was_mended_is_found_when_it_is_put_back(
    fault: tuple[Any, str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*fault)
    with pytest.raises((AssertionError, KeyError, ScalaiError)):
        run_state_machine_as_test(
            Histories,
            settings=settings(
                max_examples=200, stateful_step_count=25, deadline=None, derandomize=True,
                database=None, phases=[HypothesisPhase.generate],
                suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
            ),
        )  # fmt: skip
