"""Both laws at once: random histories of a coordinator and its hosts over a network that loses,
delays and repeats, with hosts that die, hang, fall silent and come back; and what they may do, one
thing at a time."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from scalai.core.errors import ScalaiError
from scalai.core.host import events, snapshots
from scalai.core.host.step import Step
from scalai.core.job.membership import Phase
from scalai.launch.coordinator.calls import Join
from scalai.launch.coordinator.joins import Admission
from scalai.launch.coordinator.members import Members
from support.histories import NAMES, Histories
from support.simulated_workers import Clock
from support.two_laws import TICK_S, Train, World


def workers(world: World) -> int:
    """Return how many workers train."""
    assert world.is_training(), world.log[-30:]
    return int(world.live.state.current.degrees.world_size)


def test_a_job_begins_trains_changes_and_ends_a_hosts_part(train: Train) -> None:
    world = train()
    world.add("c")
    assert world.trains(120.0) == "abc"
    assert world.started[-1][1] is not None, "from what was written"
    world.leave("a")
    assert world.trains(120.0) == "bc" and world.hosts["a"].agent.exit == 0, world.log


# ---------------------------------------------------------------------- snapshots


def test_what_is_copied_beside_the_training_may_be_told_late(train: Train) -> None:
    world = train(snapshot_every=4, is_async=True)
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
    assert workers(world) == 2 and world.logged("event=snapshot committed="), world.log


def test_a_job_chooses_how_often_by_the_slowest_host_and_all_workers_agree(train: Train) -> None:
    world = train(snapshot_every="auto", is_async=True)
    for name, cost_s in (("a", 1.0), ("b", 4.0)):
        world.hosts[name].seconds = {"cost": cost_s, "step": 5.0}
    while not world.logged("event=snapshot committed="):
        world.go_on(60.0)
        assert world.furthest()[1] < 500, world.log
    world.go_on(60.0)
    assert world.logged("event=snapshot_every k=720 cost_s=4.000 step_s=5 "), world.log
    number, _ = world.furthest()
    told = {host.hands.groups[number].spaced for host in world.hosts.values()}
    assert len(told) == 1 and {each.every for each in told} == {720}
    assert not any("may leave out" in line for host in world.hosts.values() for line in host.log)
    world.kill_worker("a", 0)
    world.trains(120.0)
    assert world.furthest()[0] > number, world.log
    assert world.logged("event=snapshot_every k=34 cost_s=4.000 step_s=5 mtbf_s=36"), world.log
    groups = [host.hands.groups[world.furthest()[0]] for host in world.hosts.values()]
    every = {worker.schedule.every for group in groups for worker in group.workers.values()}
    assert every == {34}


@pytest.mark.fault
def test_a_host_without_room_leaves_snapshots_out_and_holds_up_nobody(train: Train) -> None:
    """Each host alone has some of the state: what the other one has written of it goes."""
    world = train(snapshot_every=4, is_async=True, is_replicated=False)
    world.go_on(30.0)
    world.hosts["a"].is_full = True
    world.log.clear()
    _, step = world.furthest()
    world.go_on(120.0)
    assert world.furthest()[1] > step + 8, world.log
    assert world.logged("event=snapshot step=") and not world.hosts["b"].sealed, world.log
    assert any("event=snapshot_skipped" in line for line in world.hosts["a"].log)
    world.hosts["a"].is_full = False
    world.log.clear()
    world.go_on(600.0)
    assert world.logged("event=snapshot committed="), world.log


def without_coordinator(world: World, seconds: float) -> Iterator[list[set[str]]]:
    """Let the hosts train while the coordinator answers nobody; yield what each has sealed."""
    end, slow = Clock.now + seconds, random.Random(3)
    while Clock.now < end:
        for what in ("work", "workers", "work", "workers"):
            for name in list(world.hosts):
                if what != "work" or name == "a" or slow.random() < 0.2:
                    world.act(name, what)
        world.train()
        Clock.now += TICK_S
        for host in world.hosts.values():
            seen = host.hands.seen(host.agent.state.round)
            host.agent.feed(events.TimePassed(host.clock_s, seen))
        yield [set(host.sealed) for host in world.hosts.values()]


@pytest.mark.fault
@pytest.mark.parametrize("is_async", [True, False])
def test_while_the_coordinator_is_silent_memory_stays_bounded_and_one_snapshot_is_of_all(
    train: Train, is_async: bool
) -> None:
    world = train(snapshot_every=4, is_async=is_async, is_replicated=False)
    world.go_on(60.0)
    world.log.clear()
    began = world.furthest()[1]
    for held in without_coordinator(world, 300.0):
        assert max(map(len, held)) <= 3, "two, and one that others may not have yet"
        if world.furthest()[1] > began + 9:
            assert set.intersection(*held), "else nothing is left of them if all die now"
    step = world.furthest()[1]
    assert step > began + 20, "the training goes on meanwhile"
    world.trains(120.0)
    assert world.furthest()[1] > step, world.log
    assert not world.logged("event=lost") and world.logged("event=snapshot committed="), world.log
    assert all(len(host.sealed) < 2 for host in world.hosts.values())


@pytest.mark.fault
def test_after_a_silent_coordinator_and_the_death_of_all_the_newest_common_snapshot_counts(
    train: Train,
) -> None:
    world = train(snapshot_every=4, is_replicated=False)
    world.go_on(60.0)
    *_, held = without_coordinator(world, 200.0)
    newest = max(int(name.rpartition("-")[2]) for name in set.intersection(*held))
    world.restart()
    for name in "ab":
        world.add(name)
    world.trains(60.0)
    assert world.started[-1][1] is not None, world.log
    assert world.logged(f"step={newest} "), world.log


@pytest.mark.fault
def test_a_commit_that_found_no_room_in_time_takes_none_for_ever(train: Train) -> None:
    """A host has no room for a manifest while the job goes on to later generations: once it has
    room, it keeps nothing of what the job has left behind."""
    world = train(snapshot_every=7)
    world.hosts["b"].is_full = True
    world.go_on(120.0)
    world.heal()
    world.trains(300.0)
    newest = world.job.newest_generation
    assert newest is not None
    for host in world.hosts.values():
        assert min(host.store, default=newest.number) >= newest.number - 1, sorted(host.store)


# ---------------------------------------------------------------------- hangs and links


def test_a_training_that_hangs_is_started_again_and_loses_no_step(train: Train) -> None:
    world = train()
    world.go_on(60.0)
    number, step = world.furthest()
    world.hosts["b"].hands.groups[number].workers[2].is_hung = True
    world.go_on(250.0)
    assert world.furthest() == (number, step), "it may be a pause"
    world.go_on(200.0)
    assert world.logged("hangs: no worker has made a step for 3"), world.log
    assert world.is_training() and world.furthest() > (number + 1, step), world.log


@pytest.mark.fault
def test_two_hosts_that_do_not_hear_each_other_do_not_stop_the_others(train: Train) -> None:
    """Each hears the coordinator; the round that ran cannot be made again."""
    world = train()
    world.add("c")
    world.go_on(120.0)
    before = world.furthest()
    world.broken.add(frozenset("bc"))
    world.trains(900.0)
    assert world.logged("event=unheard b and c do not hear each other"), world.log
    assert len(world.active) == 2 and world.furthest() > before, world.log
    assert world.job.budget.left >= 8, world.log
    world.broken.clear()
    assert len(world.trains(900.0)) == 3, world.log


# ---------------------------------------------------------------------- replicas


def shards(train: Train, **facts: Any) -> World:
    """Return a job that trains on hosts a, b and c, each of which alone has written some of it."""
    world = train(is_replicated=False, **facts)
    world.add("c")
    assert world.trains(120.0) == "abc"
    return world


def replicas(count: int) -> tuple[str, ...]:
    return ("--nnodes", "1:4", "--max-restarts", "9", "--replicas", str(count))


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_host_whose_shards_nobody_else_has_written_may_be_lost_with_its_store(
    train: Train, lost: str
) -> None:
    """Then another one: what a host kept for others is made anew on those that are left."""
    world, left = shards(train), set("abc")
    for gone in (lost, min(left - {lost})):
        left.remove(gone)
        world.kill(gone, is_disk_lost=True)
        assert set(world.trains(120.0)) == left and world.started[-1][1] is not None, world.log


@pytest.mark.fault
def test_two_may_be_lost_at_once_where_there_are_two_replicas(train: Train) -> None:
    world = shards(train, flags=replicas(2))
    world.kill("a", is_disk_lost=True)
    world.kill("b", is_disk_lost=True)
    assert world.trains(120.0) == "c"


def test_without_replicas_such_a_job_waits_for_its_host(train: Train) -> None:
    world = shards(train, flags=replicas(0))
    world.kill("a", is_disk_lost=True)  # the first ranks are its own, before the change and after
    world.go_on(120.0)
    assert world.phase is Phase.WAITING, world.log


@pytest.mark.fault
def test_an_older_generation_stays_until_the_newer_one_has_replicas(train: Train) -> None:
    world = shards(train, snapshot_every=4)
    world.go_on(60.0)
    world.until(lambda: all(len(world.hosts[it].store) == 2 for it in "abc"), world.holds_back)
    for _ in range(60):
        for name in "abc":
            for what in ("net", "workers"):
                world.act(name, what)
        world.train()
        world.tick(0.5)
        assert all(len(world.hosts[name].store) == 2 for name in "abc"), world.log
    world.kill("b", is_disk_lost=True)
    world.trains(120.0)
    assert world.started[-1][1] is not None, world.log


AT_ANY_TIME = [*range(4), *(pytest.param(n, marks=pytest.mark.campaign) for n in range(4, 60))]


@pytest.mark.fault
@pytest.mark.parametrize("seed", AT_ANY_TIME)
def test_a_host_may_be_lost_with_its_store_at_any_time(train: Train, seed: int) -> None:
    """Snapshots and replicas are made all the time; workers may fail before the loss is noticed."""
    world = shards(train, snapshot_every=4)
    world.go_on(30.0)
    assert world.logged("event=replicated"), world.log
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
            name = chance.choice("".join(sorted({*"abc"} - {lost})))
            world.act(name, chance.choice(["net", "work", "workers"]))
    world.kill(lost, is_disk_lost=True)
    assert lost not in world.trains(300.0) and world.started[-1][1] is not None, world.log[-60:]


# ---------------------------------------------------------------------- agents and changes


def test_a_host_that_comes_at_once_without_its_disk_is_another_agent(train: Train) -> None:
    world = train()
    for name in "ab":
        world.kill(name, is_disk_lost=True)
        world.add(name)
        world.act(name, "net")
        assert world.trains(120.0) == "ab"


def test_an_agent_that_was_paused_is_gone_with_its_machine(train: Train) -> None:
    world = train()
    world.replace("a")
    world.wake_ghosts()
    world.kill("a", is_disk_lost=True)
    assert world.trains(120.0) == "b"


def test_workers_that_nobody_was_told_to_build_begin_with_their_round(train: Train) -> None:
    """A host leaves, and waits for no standby: the round begins before there was a store for it."""
    world = train()
    number, _ = world.furthest()
    world.delay_stores(is_late=True)
    world.leave("b")
    world.go_on(60.0)
    assert world.phase is Phase.STARTING, world.log
    world.delay_stores(is_late=False)
    world.trains(60.0)
    assert world.furthest()[0] == number + 1, world.log


@pytest.mark.parametrize("loses_hosts", [False, True])
def test_a_coordinator_that_fails_leaves_the_state_for_the_same_job(
    train: Train, loses_hosts: bool
) -> None:
    world = train(snapshot_every=7 * loses_hosts)
    newest = world.newest_whole()
    if loses_hosts:  # as it loses its hosts
        world.scale(1)
        world.cut("a")
        world.cut("b")
    assert world.slip(6 if loses_hosts else 2) and newest is not None
    if loses_hosts:
        assert {host.agent.exit for host in world.hosts.values()} == {1}
    assert (world.newest_whole(of_all=True) or 0) >= newest
    world.restart()
    world.trains(60.0)
    assert (world.started[-1][1] or 0) >= newest, world.log


# ---------------------------------------------------------------------- random histories


class DiskHistories(Histories):
    """A job with a disk that all hosts share, to which generations come while it trains: what it
    shows is always whole, and the job goes back to it where nothing else is left."""

    @initialize(
        present=st.sampled_from(["a", "ab", "abc"]), is_replicated=st.booleans(),
        begins_s=st.sampled_from([0.0, 60.0, 200.0]),
    )  # fmt: skip
    def begin(self, present: str, is_replicated: bool, begins_s: float) -> None:
        Clock.now = 1000.0
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(
            Path(self.folder.name), is_replicated=is_replicated, snapshot_every=4,
            archive_every_s=40.0,
        )  # fmt: skip
        for name in present:
            self.world.add(name)
        self.world.go_on(begins_s)

    @rule()
    def fill_disk(self) -> None:
        self.world.disk.is_full = not self.world.disk.is_full

    @rule(names=st.lists(NAMES, unique=True, min_size=1))
    def lose_memories(self, names: list[str]) -> None:
        for name in names:
            self.world.kill(name, is_disk_lost=True)

    @invariant()
    def what_is_shown_is_whole(self) -> None:
        if hasattr(self, "world"):
            self.world.disk.check()


def so_many(examples: int, **given: Any) -> settings:
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck),
        **{"derandomize": os.environ.get("SCALAI_HISTORIES") != "random", **given},
    )  # fmt: skip


TestHistories = Histories.TestCase
TestHistories.settings = so_many(16, stateful_step_count=20)
TestDiskHistories = pytest.mark.fault(
    pytest.mark.campaign(pytest.mark.turns(DiskHistories.TestCase))
)
TestDiskHistories.settings = so_many(8, stateful_step_count=20)


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
            settings=so_many(
                200, stateful_step_count=25, derandomize=True, database=None,
                phases=[HypothesisPhase.generate], report_multiple_bugs=False,
            ),
        )  # fmt: skip
