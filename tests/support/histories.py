"""A job whose hosts meet whatever may happen, as a machine for hypothesis: both laws over a network
that loses, delays and repeats."""

import sys
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scalai.core.job.function_proof import Numbers
from scalai.core.job.membership import Phase
from scalai.core.messages.reports import Slots
from support.simulated_workers import Clock
from support.two_laws import TICK_S, World

NAMES = st.sampled_from("abc")
LONG_S = 1500.0
"""Within so long of virtual time a job without faults steps again, or says what it waits for."""
STEP_S = 30.0
"""Within so long it makes a step."""
_FAULTS = ["is_silent", "is_full", "cannot_start", "is_spoilt", "is_sick"]
_HANGS = ["is_hung", "is_late", "is_stopped", "is_torn", "is_copying"]


class Histories(RuleBasedStateMachine):
    """What happens to the hosts of a job."""

    @initialize(
        present=st.sampled_from(["a", "ab", "ab", "abc"]), is_replicated=st.booleans(),
        begins_s=st.sampled_from([0.0, 60.0]), snapshot_every=st.sampled_from([0, 0, 7]),
        is_async=st.booleans(), has_checks=st.booleans(),
    )  # fmt: skip
    def begin(
        self, present: str, is_replicated: bool, begins_s: float, snapshot_every: int,
        is_async: bool, has_checks: bool,
    ) -> None:  # fmt: skip
        Clock.now = 1000.0
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(
            Path(self.folder.name), is_replicated=is_replicated, snapshot_every=snapshot_every,
            is_async=is_async, has_checks=has_checks,
        )  # fmt: skip
        for name in present:
            self.world.add(name)
        self.world.go_on(begins_s)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            try:
                if sys.exc_info()[0] is None:
                    self.rest()
            finally:
                self.folder.cleanup()

    @rule(name=NAMES)
    def add(self, name: str) -> None:
        self.world.add(name)

    @rule(name=NAMES, is_disk_lost=st.sampled_from([False, False, True]))
    def kill(self, name: str, is_disk_lost: bool) -> None:
        self.world.kill(name, is_disk_lost=is_disk_lost)

    @rule(name=NAMES)
    def replace(self, name: str) -> None:
        self.world.replace(name)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule()
    def replace_coordinator(self) -> None:
        """The coordinator dies, and another one takes its place."""
        if self.world.phase is not Phase.ENDED:
            self.world.replace_coordinator()

    @rule()
    def wake_ghosts(self) -> None:
        self.world.wake_ghosts()

    @rule(name=NAMES)
    def cut(self, name: str) -> None:
        self.world.cut(name)

    @rule(name=NAMES, other=NAMES)
    def break_link(self, name: str, other: str) -> None:
        """Two hosts do not hear each other, or do again."""
        if name != other:
            self.world.broken ^= {frozenset((name, other))}

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.world.leave(name)

    @rule(name=NAMES, left_s=st.sampled_from([None, 2.0, 30.0, 300.0]))
    def notice(self, name: str, left_s: float | None) -> None:
        """A host is told that it will be taken away."""
        self.world.notice(name, left_s)

    @rule(name=NAMES)
    def take_back(self, name: str) -> None:
        """It is told that it will not."""
        self.world.take_back(name)

    @rule(name=NAMES, rank=st.integers(0, 5))
    def kill_worker(self, name: str, rank: int) -> None:
        self.world.kill_worker(name, rank)

    @rule(name=NAMES, fault=st.sampled_from(_FAULTS))
    def break_host(self, name: str, fault: str) -> None:
        if name in self.world.hosts:
            host = self.world.hosts[name]
            setattr(host, fault, not getattr(host, fault))

    @rule(
        name=NAMES, what=st.sampled_from(["rotten", "cut", "wrong for the script"]),
        count=st.integers(1, 4),
    )  # fmt: skip
    def damage(self, name: str, what: str, count: int) -> None:
        """Files of a host's part of its newest generation are not what was committed any more."""
        if name in self.world.hosts:
            self.world.hosts[name].damage(what, count)

    @rule(name=NAMES, rank=st.integers(0, 5), what=st.sampled_from(_HANGS))
    def hang(self, name: str, rank: int, what: str) -> None:
        """A worker makes no steps, or makes them and does not come to the stop, or does nothing at
        all, or is in the middle of an update, or tells late what it has copied; or does again."""
        host = self.world.hosts.get(name)
        for group in host.hands.groups.values() if host else ():
            if rank in group.workers:
                worker = group.workers[rank]
                setattr(worker, what, not getattr(worker, what))

    @rule(which=st.integers(0, 5), nproc=st.sampled_from([1, 2, 3, 4]))
    def change_while_one_is_late(self, which: int, nproc: int) -> None:
        """A change is wanted, and a worker does not come to the stop in time."""
        groups = [g for host in self.world.hosts.values() for g in host.hands.groups.values()]
        workers = [worker for group in groups for worker in group.workers.values()]
        if workers:
            workers[which % len(workers)].is_late = True
        self.world.scale(nproc)
        self.world.go_on(70.0)

    @rule(every=st.sampled_from([0, 1, 3, 7]), ahead=st.sampled_from([-2, 0, 1, 20]))
    def space(self, every: int, ahead: int) -> None:
        """Snapshots come at other steps; workers may hear of it too late, and of different ones."""
        self.world.space(every, ahead)

    @rule(is_late=st.booleans())
    def delay_stores(self, is_late: bool) -> None:
        """Where the next workers are to meet cannot be opened yet, or can again."""
        self.world.delay_stores(is_late=is_late)

    @rule()
    def finish(self) -> None:
        """The script comes to its end on all ranks, as they are at one step."""
        workers = [worker for _, worker in self.world.workers()]
        if len({worker.step for worker in workers}) == 1:
            if all(w.doing == "train" and w.call is None and w.exit is None for w in workers):
                for worker in workers:
                    worker.doing = "finish"

    @rule(name=NAMES, slots=st.integers(0, 3))
    def probe(self, name: str, slots: int) -> None:
        """Another number of a host's devices works."""
        if name in self.world.job.hosts:
            self.world.hear(name, Slots(slots))

    @rule(world_size=st.sampled_from([1, 2, 4, 6]))
    def break_a_world(self, world_size: int) -> None:
        """With so many workers every script raises, or does not any more."""
        self.world.cannot_run ^= {world_size}

    @rule(world_size=st.sampled_from([1, 2, 4, 6]), norm=st.sampled_from([2.0, 3.0]))
    def compute(self, world_size: int, norm: float) -> None:
        """With so many workers a step is of this function."""
        self.world.computes[world_size] = Numbers(5.0, norm, framework="simulated")

    @rule(is_late=st.booleans())
    def delay_proofs(self, is_late: bool) -> None:
        """Old workers make their step behind the stop late."""
        self.world.is_proof_late = is_late

    @rule(begins=st.booleans())
    def save(self, begins: bool) -> None:
        """A save of the training's own begins or ends."""
        if begins:
            self.world.begin_save()
        else:
            self.world.end_save()

    @rule(nproc=st.sampled_from([1, 2, 3, 4, 6]))
    def slip(self, nproc: int) -> None:
        """The coordinator fails while it does what the law says; the job is started again."""
        if self.world.slip(nproc):
            self.world.restart()

    @rule(nproc=st.sampled_from([1, 2, 3, 4, 6]))
    def scale(self, nproc: int) -> None:
        self.world.scale(nproc)

    @rule(
        steps=st.lists(
            st.tuples(NAMES, st.sampled_from(["net", "work", "workers"]), st.booleans()),
            min_size=1, max_size=12,
        )
    )  # fmt: skip
    def act(self, steps: list[tuple[str, str, bool]]) -> None:
        for name, what, is_repeated in steps:
            self.world.act(name, what, is_repeated=is_repeated)

    @rule(seconds=st.sampled_from([0.1, 2.0, TICK_S, 70.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(count=st.integers(1, 3))
    def train(self, count: int) -> None:
        for _ in range(count):
            self.world.train()

    @rule(seconds=st.sampled_from([2.0, 10.0]))
    def go_on(self, seconds: float) -> None:
        self.world.go_on(seconds)

    @invariant()
    def whose_phase_waits_for_somebody_or_something(self) -> None:
        if hasattr(self, "world"):
            job = self.world.job
            is_at_rest = job.phase in (Phase.WAITING, Phase.RUNNING, Phase.ENDED)
            assert is_at_rest or job.awaited, f"{job.phase} waits for nobody"

    @rule()
    def rest(self) -> None:
        """Faults stop: the job steps again within bounded time, or waits for something that it
        says, or has ended with a reason."""
        world = self.world
        world.heal()
        known = len(world.log)
        world.go_on(LONG_S)
        before = world.furthest()
        hung = [line for line in world.log[known:] if "hangs: no worker" in line]
        assert not hung, "nobody is at fault any more: the laws let a round hang"
        for report in world.live.timeline.reports:
            state = report["recovery"]["state"]
            assert (state and state["generation"]) == report["generation"], report
        world.go_on(STEP_S)
        assert not any("event=crashed" in line for line in world.log), world.log
        if world.phase is Phase.RUNNING:
            assert world.is_training(), (world.live.state, world.log[-30:])
            assert world.furthest() > before, "it makes no steps"
        elif world.phase is Phase.ENDED:
            assert any("event=exit" in line for line in world.log)
            if any("nothing else is whole" in line for line in world.log):
                assert world.live.exit_code == 3 and world.newest_whole() is None, world.log[-30:]
        else:
            assert world.phase is Phase.WAITING, (world.phase, world.log[-30:])
            assert world.live.state.states.obstacle or not self._is_enough(), world.log[-30:]

    def _is_enough(self) -> bool:
        """Whether hosts are there that a job could run on."""
        return any(
            host.is_in and host.agent.exit is None and host.agent.state.leave.since is None
            for host in self.world.hosts.values()
        )
