"""A job in one process and virtual time: the coordinator's real desk and law, and hosts with the
real law, over a network that a test drives. Workers and stores are simulated.

A state is four tensors, whole on whoever holds them; the fingerprint of one tells its step.
"""

import contextlib
import types
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scalai.core import commands, reports
from scalai.core.collection import Collection, Tensor
from scalai.core.errors import PeerError, ScalaiError
from scalai.core.host import actions, events
from scalai.core.host.actions import Action
from scalai.core.host.events import Event
from scalai.core.host.state import HostState, Round, Settings
from scalai.core.membership import Phase
from scalai.core.messages import JsonText, Named
from scalai.core.orders import WriteOrder
from scalai.core.region import whole
from scalai.core.reports import Report
from scalai.core.worker_messages import (
    BeginDeposit,
    Hello,
    Publish,
    RankDeposited,
    RankFinished,
    RankRestored,
    RankStepped,
    Source,
)
from scalai.launch import (
    admission,
    agent_events,
    desk,
    live_job,
    losses,
    resumption,
    roster,
    scaling,
    timeline,
)
from scalai.launch.agent import Agent, Loop
from scalai.launch.coordinator_calls import Bye, Farewell, Join, Poll, StoreIdentity, Tell
from scalai.launch.desk import Desk
from scalai.launch.flags import parse_options
from scalai.launch.generations import deposit_name
from scalai.launch.job import JobSpec
from scalai.launch.losses import Patience
from scalai.launch.person_calls import Scale
from scalai.store.manifest import (
    HostManifest,
    StoredFile,
    manifest_bytes,
    manifest_of_bytes,
)
from support.wire import travelled

TENSORS = tuple(Tensor(f"param/t{number}", (4,), "F32") for number in range(4))
TICK_S = 5.0
LOOK_S = 0.5
ROUNDS_A_TICK = 40


class Clock:
    """The one clock of all simulated processes, in seconds."""

    now = 1000.0


def use_virtual_time() -> None:
    """Have the coordinator's modules read ``Clock``."""
    shim = types.SimpleNamespace(
        monotonic=lambda: Clock.now, time=lambda: Clock.now, sleep=lambda seconds: None
    )
    for module in (
        admission, agent_events, desk, live_job, losses, resumption, roster, scaling, timeline,
    ):  # fmt: skip
        if hasattr(module, "time"):
            setattr(module, "time", shim)  # noqa: B010  # each has it as an import


def print_of(tensor: Tensor, step: int) -> int:
    """Return the fingerprint of a whole tensor at a step."""
    return 1 + step * len(TENSORS) + TENSORS.index(tensor)


class NoStores:
    """Workers meet nowhere."""

    def __init__(self) -> None:
        self._port = 0

    def wait_ready(self) -> None: ...

    def open(self) -> int:
        self._port += 1
        return self._port

    def close(self, port: int) -> None: ...

    def end(self) -> None: ...


class EverySlot:
    """Files for a deposit: each rank writes what it holds."""

    def __init__(self, held: dict[int, Collection]) -> None:
        self.held = held
        self.orders = {rank: WriteOrder(rank, f"{rank}", (0,), (0,)) for rank in held}

    def take_over(self, lost: int, alive: Iterable[int]) -> dict[int, WriteOrder]:
        names = {tensor.name for tensor in self.held[lost].tensors}
        for rank in sorted(set(alive) - {lost}):
            if names <= {tensor.name for tensor in self.held[rank].tensors}:
                return {rank: WriteOrder(rank, f"{lost}", (0,), (0,))}
        return {}


@dataclass(slots=True)
class Worker:
    """One rank: ``doing`` is what it calls next, ``call`` what it waits for."""

    rank: int
    doing: str = "hello"
    step: int = 0
    source: int | None = None
    """The step that it has restored; None: its own initial state."""
    call: int | None = None
    exit: int | None = None
    is_hung: bool = False
    is_gone: bool = False
    """Whether its end has been noticed as that of its connection."""


@dataclass(slots=True)
class Group:
    """The workers of one round on a host, and their page."""

    workers: dict[int, Worker]
    proposed: int | None = None
    agreed: int | None = None


class SimulatedHands:
    """Does on simulated workers and files what the law of a host decides."""

    def __init__(self, host: "SimulatedHost") -> None:
        self._host = host
        self._groups: dict[int, Group] = {}
        self.waits: dict[int, Worker] = {}
        self.calls = 0

    @property
    def groups(self) -> Any:
        return self._groups

    def generations(self) -> frozenset[int]:
        return frozenset(self._host.store)

    def seen(self, current: Round | None) -> events.Seen | None:
        group = None if current is None else self._groups.get(current.number)
        if group is None:
            return None
        workers = group.workers.values()
        agreed = group.agreed
        return events.Seen(
            newest=max((worker.step for worker in workers), default=0),
            reached=frozenset(w.rank for w in workers if agreed is not None and w.step >= agreed),
            ended={w.rank: w.exit for w in workers if w.exit is not None},
        )

    def arrivals(self) -> Iterable[Event]:
        return ()

    def take_call(self, answer: "Future[Any]") -> int:
        raise AssertionError("workers call the law")

    def perform(self, action: Action) -> Iterable[Event]:
        host = self._host
        match action:
            case actions.Log():
                host.log.append(action.text)
            case actions.Tell(report):
                host.untold.append(report)
            case actions.Answer(call, value):
                self._answered(call, value)
            case actions.Welcome(call):
                self._answered(call, "welcome")
            case actions.Refuse(call):
                self.waits.pop(call, None)
            case actions.StartGroup(workers):
                return self._start(workers)
            case actions.EndGroup(number):
                return [self._end(number)]
            case actions.Poll(number):
                return self._poll(number)
            case actions.Propose(number, stop):
                group = self._groups[number]
                group.proposed = stop
                newest = max(worker.step for worker in group.workers.values())
                return [events.Proposed(number, stop, newest)]
            case actions.Agree(number, stop):
                over = self._poll(number)
                if over:
                    return over
                self._groups[number].agreed = stop
                return [events.Agreed(number, stop)]
            case actions.WithdrawStop(number):
                self._groups[number].proposed = self._groups[number].agreed = None
            case actions.Kill(number, ranks):
                for rank in ranks:
                    self._groups[number].workers[rank].exit = -9
            case actions.Rejoin():
                host.wants_to_join = True
            case _:
                return self._of_the_store(action)
        return ()

    def _of_the_store(self, action: Action) -> Iterable[Event]:
        host = self._host
        match action:
            case actions.Reserve(number, held):
                slot = EverySlot(dict(held))
                is_full = host.is_full
                host.work.append(
                    lambda: events.NoRoom(number, "full") if is_full
                    else events.Reserved(number, slot)
                )  # fmt: skip
            case actions.Seal():
                host.work.append(lambda: host.seal(action))
            case actions.Fetch(start, wants):
                host.work.append(lambda: host.fetch(start, wants))
            case actions.TryCommit():
                return host.commit(action)
            case actions.DiscardSealed(kept):
                host.sealed = {n: m for n, m in host.sealed.items() if n in kept}
            case actions.Drop(generation):
                host.store.pop(generation, None)
            case actions.Doubt(generation):
                left = host.store.get(generation)
                found = None if left is None else manifest_bytes(left)
                host.untold.append(reports.Doubted(generation, found))
            case actions.Look():
                host.untold.append(reports.Attached((), ()))
        return ()

    # ------------------------------------------------------------------ workers

    def _start(self, workers: commands.Workers) -> Iterable[Event]:
        if self._host.cannot_start:
            return [events.GroupNotStarted(workers.round, "no process")]
        ranks = workers.placement.ranks
        self._groups[workers.round] = Group({rank: Worker(rank) for rank in ranks})
        return [events.GroupStarted(workers.round)]

    def _end(self, number: int) -> Event:
        group = self._groups.pop(number)
        newest = max((worker.step for worker in group.workers.values()), default=0)
        return events.GroupEnded(number, newest)

    def _poll(self, number: int) -> list[Event]:
        workers = self._groups[number].workers.values()
        failed = tuple(f"rank {w.rank} exited with {w.exit}" for w in workers if w.exit)
        if failed:
            for worker in workers:
                worker.exit = worker.exit if worker.exit is not None else -15
            return [events.GroupOver(number, failed, False, True)]
        if all(worker.exit == 0 for worker in workers):
            return [events.GroupOver(number)]
        return []

    def _answered(self, call: int, value: object) -> None:
        worker = self.waits.pop(call, None)
        if worker is None or worker.exit is not None:
            return
        worker.call = None
        match worker.doing:
            case "hello":
                worker.doing = "publish"
            case "publish" if isinstance(value, Source):
                worker.source, worker.doing = value.step, "restored"
                worker.step = value.step
            case "publish":
                worker.doing = "start"
            case "start" | "stop" | "snapshot":
                worker.doing = f"write {worker.doing}" if value is not None else "train"
            case "write start" | "write stop" | "write snapshot":
                if value is not None:
                    return  # once more, for another rank
                if worker.doing == "write stop":
                    worker.exit = 0
                worker.doing = "train" if worker.source is not None else "stepped"
                worker.source = worker.source if worker.source is not None else 0
            case "restored":
                worker.doing = "stepped"
            case "stepped":
                worker.doing = "train"
                worker.step += 1

    def ask(self, number: int, worker: Worker) -> None:
        """Let a worker do what it does next."""
        request = self._request(number, worker)
        self.calls += 1
        worker.call = self.calls
        self.waits[self.calls] = worker
        self._host.agent.feed(events.Called(self.calls, travelled(request)))

    def _request(self, number: int, worker: Worker) -> Any:
        rank, none = worker.rank, JsonText.of({})
        held = self._host.held_by(worker, number)
        match worker.doing.partition(" ")[0]:
            case "hello":
                return Hello(rank, number)
            case "publish":
                return Publish(rank, number, True, held, held, none, False)
            case "restored":
                step = worker.source or 0
                prints = np.array([print_of(t, step) for t in held.tensors], np.uint64)
                return RankRestored(rank, number, prints, {}, "restored")
            case "stepped":
                return RankStepped(rank, number, worker.step, None)
            case "start" | "stop" | "snapshot":
                return BeginDeposit(rank, number, worker.doing, worker.step)
            case "write":
                made = tuple(print_of(tensor, worker.step) for tensor in held.tensors)
                return RankDeposited(rank, number, made, f"r{rank}", none, none, 1, {})
            case "finish":
                return RankFinished(rank, number, worker.step)
            case _:
                raise AssertionError(worker.doing)


class SimulatedHost:
    """One host: its agent with the real law, its workers and its store."""

    def __init__(self, world: "World", name: str, slots: int) -> None:
        self.world, self.name, self.slots = world, name, slots
        self.store: dict[int, HostManifest] = {}
        self.sealed: dict[str, HostManifest] = {}
        self.number = 0
        self.is_silent = self.is_full = self.cannot_start = False
        self.begin()

    def begin(self) -> None:
        """A new agent process on this host, with what its store holds."""
        self.log: list[str] = []
        self.untold: list[Report] = []
        self.work: list[Callable[[], Event | None]] = []
        self.wants_to_join, self.is_in = True, False
        self.hands = SimulatedHands(self)
        state = HostState(Settings(self.name, True, 120.0), self.slots, Clock.now)
        self.agent = Agent(state, self.hands, Loop())

    # ------------------------------------------------------------------ the store

    def held_by(self, worker: Worker, number: int) -> Collection:
        """Return what a rank holds: all, or every so-manieth tensor."""
        current = self.agent.state
        found = next(r for r in (current.round, current.ahead) if r is not None
                     and r.number == number)  # fmt: skip
        world = found.workers.placement.world_size
        tensors = [
            tensor
            for place, tensor in enumerate(TENSORS)
            if self.world.is_replicated or place % world == worker.rank
        ]
        return Collection.of((tensor, whole(tensor.shape)) for tensor in tensors)

    def manifest(
        self, step: int, tensors: Iterable[Tensor], about: dict[str, Any], ranks: tuple[int, ...]
    ) -> HostManifest:
        rows = Collection.of((tensor, whole(tensor.shape)) for tensor in tensors)
        count = len(rows)
        return HostManifest(
            generation=-1, step=step, host=self.name, about=about, ranks=ranks, collection=rows,
            file=np.zeros(count, np.int64), begin=16 * np.arange(count),
            fingerprint=np.array([print_of(t, step) for t in rows.tensors], np.uint64),
            files=(StoredFile("rank-0.safetensors", 16 * max(count, 1)),), scalars={},
            rank_state={},
        )  # fmt: skip

    def seal(self, action: actions.Seal) -> Event:
        assert isinstance(action.slot, EverySlot)
        written = [*action.parts, *(int(order.path) for order, _ in action.taken_over)]
        tensors = {t.name: t for rank in written for t in action.slot.held[rank].tensors}
        about = {**action.about, "time": Clock.now}
        made = self.manifest(action.step, tensors.values(), about, tuple(sorted(action.parts)))
        self.sealed[deposit_name(made)] = made
        return events.Sealed(action.round, action.slot, manifest_bytes(made))

    def fetch(self, start: commands.Start, wants: Any) -> Event:
        number = start.workers.round
        parts = {host: manifest_of_bytes(s.manifest, host) for host, s in start.sources.items()}
        wanted = {tensor.name: tensor for each in wants.values() for tensor in each.tensors}
        given: set[str] = set()
        for name, part in parts.items():
            has_it = self.world.can_reach(name, part.generation)
            given |= {t.name for t in part.collection.tensors} if has_it else set()
        if not wanted.keys() <= given:
            return events.WorkFailed(number, "a host is gone that holds what is wanted")
        one = next(iter(parts.values()))
        none = JsonText.of({})
        source = Source(None, one.step, 1, none, none, 2)  # type: ignore[arg-type]
        mine = self.store.get(one.generation)
        names = dict(wanted)
        if mine is not None:
            names |= {tensor.name: tensor for tensor in mine.collection.tensors}
        made = self.manifest(one.step, names.values(), dict(one.about), one.ranks)
        made = replace(made, generation=one.generation, committed=one.committed)
        self.store[one.generation] = made
        sources = dict.fromkeys(wants, source)
        return events.Fetched(number, sources, manifest_bytes(made), 0.0, 0.0, 0, 0)

    def commit(self, action: actions.TryCommit) -> Iterable[Event]:
        number, there = action.generation, self.store.get(action.generation)
        if there is not None and deposit_name(there) == action.deposit:
            return [events.CommitDone(number)]
        if action.deposit not in self.sealed:
            return () if action.is_again else [events.NothingToCommit(number, "sealed")]
        if self.is_full:
            return [events.CommitWaits(number)]
        made = self.sealed.pop(action.deposit)
        self.store[number] = replace(made, generation=number, committed=action.committed)
        return [events.CommitDone(number)]

    # ------------------------------------------------------------------ the network

    @property
    def incarnation(self) -> str:
        return f"{self.name}{self.number}"

    def enter_job(self) -> None:
        """Become part of the job, if it is taken in."""
        self.number += 1
        self.wants_to_join, self.told, self.received = False, 0, 0
        self.untold.clear()
        request = Join(
            "j", self.name, self.incarnation, StoreIdentity("m", hash(self.name) % 1000, 0),
            self.slots, ("h", 1), tuple(manifest_bytes(part) for part in self.store.values()),
            tuple(manifest_bytes(part) for part in self.sealed.values()), (),
            JsonText.of(self.world.spec.to_json()),
        )  # fmt: skip
        try:
            self.world.desk.handle(self, travelled(request))  # type: ignore[arg-type]
        except ScalaiError as error:
            self.agent.feed(events.CoordinatorLost(str(error)))
            return
        self.is_in = True
        if self.number > 1:
            self.agent.feed(events.Rejoined())

    def exchange(self, *, is_repeated: bool = False) -> None:
        """Report one thing, and fetch commands. What is repeated was heard before."""
        if not self.is_in:
            return
        try:
            if self.untold:
                number = self.told + 1
                tell = Tell("j", self.name, self.incarnation, number, Named(self.untold[0]))
                for _ in range(2 if is_repeated else 1):
                    self.world.desk.handle(self, travelled(tell))  # type: ignore[arg-type]
                self.told = number
                self.untold.pop(0)
                self.world.happened += 1
            current = self.agent.state.round
            seen = self.hands.seen(current)
            poll = Poll(
                "j", self.name, self.incarnation, 0 if is_repeated else self.received,
                current.number if current else 0, seen.newest if seen else 0, None,
            )  # fmt: skip
            answer: Any = self.world.desk.handle(self, poll)  # type: ignore[arg-type]
            found = travelled(answer)
        except ScalaiError as error:
            self._refused(error)
            return
        for number, command in enumerate(found.commands, found.first):
            if number > self.received and self.agent.exit is None:
                self.world.happened += 1
                self.received = number
                self.agent.obey(command.message)

    def _refused(self, error: ScalaiError) -> None:
        farewell: Any = self.world.desk.handle(
            self,  # type: ignore[arg-type]
            Farewell("j", self.name, self.incarnation),
        )
        self.is_in = False
        if farewell is not None:
            self.agent.obey(farewell)
        else:
            self.agent.feed(events.Expelled(str(PeerError(str(error)))))


@dataclass(slots=True)
class World:
    """The coordinator's desk and the hosts around it; nothing happens but what a test does."""

    folder: Any
    flags: tuple[str, ...] = ("--nnodes", "1:4", "--max-restarts", "9")
    is_replicated: bool = True
    hosts: dict[str, SimulatedHost] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    started: list[tuple[int, int | None]] = field(default_factory=list)
    """Rounds, and the generations that they began from."""
    ghosts: list[SimulatedHost] = field(default_factory=list)
    """Agents that were paused, and replaced by others of their hosts."""
    happened: int = 0
    """Counts what the hosts have done."""
    spec: JobSpec = field(init=False)
    desk: Desk = field(init=False)

    def __post_init__(self) -> None:
        config = self.folder / "elastic.toml"
        config.write_text(
            "[model]\nglobal_batch_size = 12\n[probe]\nkind = 'none'\n"
            "[resize]\nsettle_s = 1.0\ndrain_timeout_s = 60.0\nbuild_timeout_s = 20.0\n"
            "start_timeout_s = 600.0\n"
        )
        given = ["--elastic", str(config), "--job", "j", "--nproc-per-node", "2", *self.flags]
        self.spec = JobSpec.read(parse_options([*given, "script.py"]))
        self._open()

    def _open(self) -> None:
        """A coordinator begins, and knows nothing."""
        patience = Patience(poll_s=0.0)
        stores: Any = NoStores()
        self.desk = Desk(self.spec, "127.0.0.1", stores, self.log.append, patience)
        live = self.live
        start = live._start

        def checked(action: Any) -> None:
            self.check_start(action.generation)
            self.started.append((action.round, action.generation))
            start(action)

        live._start = checked

    @property
    def live(self) -> Any:
        return self.desk._live

    @property
    def phase(self) -> Phase:
        found: Phase = self.live.state.phase
        return found

    # ------------------------------------------------------------------ what is true

    def newest_whole(self) -> int | None:
        """Return the newest generation that hosts in the job hold wholly on their disks."""
        pieces: dict[int, set[str]] = {}
        for host in self.hosts.values():
            if host.is_in and not host.is_silent:
                for number, part in host.store.items():
                    pieces.setdefault(number, set()).update(
                        tensor.name for tensor in part.collection.tensors
                    )
        whole_ones = [number for number, names in pieces.items() if len(names) == len(TENSORS)]
        return max(whole_ones, default=None)

    def check_start(self, generation: int | None) -> None:
        """No committed state is passed over."""
        newest = self.newest_whole()
        assert newest is None or (generation is not None and generation >= newest), (
            f"a round begins from {generation}, and generation {newest} is whole"
        )

    def can_reach(self, name: str, generation: int) -> bool:
        """Whether a host's data plane gives out a generation."""
        host = self.hosts.get(name)
        return host is not None and not host.is_silent and generation in host.store

    def is_training(self) -> bool:
        """Whether every worker of the present round trains."""
        state = self.live.state
        if state.phase is not Phase.RUNNING or not state.current:
            return False
        groups = [
            self.hosts[name].hands._groups.get(state.round)
            for name in state.current.active
            if name in self.hosts
        ]
        return len(groups) == len(state.current.active) and all(
            group is not None
            and all(w.doing == "train" and w.exit is None for w in group.workers.values())
            for group in groups
        )

    # ------------------------------------------------------------------ what happens

    def add(self, name: str, slots: int = 2) -> None:
        """A host's agent starts, with what its store holds if it was there before."""
        if name in self.hosts and self.hosts[name].agent.exit is None:
            return
        if name in self.hosts:
            self.hosts[name].begin()
        else:
            self.hosts[name] = SimulatedHost(self, name, slots)

    def kill(self, name: str, *, is_disk_lost: bool) -> None:
        """A host's agent dies with its workers."""
        host = self.hosts.get(name)
        if host is None:
            return
        self.desk.gone(host)  # type: ignore[arg-type]
        if is_disk_lost:
            del self.hosts[name]
            return
        store, sealed, number = host.store, host.sealed, host.number
        fresh = SimulatedHost(self, name, host.slots)
        fresh.store, fresh.sealed, fresh.number = store, sealed, number
        self.hosts[name] = fresh

    def restart(self) -> None:
        """The whole job is started again, on what the hosts' stores hold."""
        for name in list(self.hosts):
            self.kill(name, is_disk_lost=False)
        self.ghosts.clear()
        self.log.clear()
        self._open()

    def replace(self, name: str) -> None:
        """A host's agent is paused for good or bad, and another one is started on its store."""
        host = self.hosts.get(name)
        if host is not None and host.is_in:
            self.kill(name, is_disk_lost=False)
            self.ghosts.append(host)

    def wake_ghosts(self) -> None:
        """Agents that were replaced go on, and call as if nothing had been."""
        for ghost in self.ghosts:
            if ghost.agent.exit is None and ghost.is_in:
                ghost.exchange()

    def cut(self, name: str) -> None:
        """A host's connections break; it makes new ones when it next calls."""
        if name in self.hosts:
            self.desk.gone(self.hosts[name])  # type: ignore[arg-type]

    def leave(self, name: str) -> None:
        if name in self.hosts:
            self.hosts[name].agent.feed(events.LeaveAsked())

    def scale(self, nproc: int) -> None:
        """A person asks for another number of workers, of which there may be none."""
        person: Any = None
        with contextlib.suppress(ScalaiError):
            self.desk.handle(person, Scale(nproc, None, None, dry_run=False))

    def kill_worker(self, name: str, rank: int) -> None:
        host = self.hosts.get(name)
        for number, group in list(host.hands._groups.items()) if host else []:
            worker = group.workers.get(rank)
            if host is not None and worker is not None and worker.exit is None:
                worker.exit = -9
                host.agent.worker_gone(number, rank)

    def act(self, name: str, what: str, *, is_repeated: bool = False) -> None:
        """Let something of a host go on."""
        host = self.hosts.get(name)
        if host is None or host.is_silent or host.agent.exit is not None:
            return
        if host.wants_to_join:
            self.happened += 1
            host.enter_job()
        elif what == "net":
            host.exchange(is_repeated=is_repeated)
        elif what == "work" and host.work:
            self.happened += 1
            event = host.work.pop(0)()
            if event is not None:
                host.agent.feed(event)
        elif what == "workers":
            self._let_work(host)

    def _let_work(self, host: SimulatedHost) -> None:
        for number, group in list(host.hands._groups.items()):
            for worker in group.workers.values():
                if worker.exit is None and not worker.is_hung and worker.call is None:
                    if worker.doing != "train":
                        self.happened += 1
                        host.hands.ask(number, worker)
                    elif group.agreed is not None and worker.step >= group.agreed:
                        worker.doing = "stop"
                if host.agent.state.exit is not None:
                    return

    def train(self) -> None:
        """Make one step, if all ranks of the job can: as a collective does."""
        state = self.live.state
        if not state.current:
            return
        workers: list[tuple[Group, Worker]] = []
        for name in state.current.active:
            host = self.hosts.get(name)
            group = host.hands._groups.get(state.round) if host else None
            if group is None:
                return
            workers += [(group, worker) for worker in group.workers.values()]
        for group, worker in workers:
            stop = group.agreed if group.agreed is not None else group.proposed
            if worker.doing != "train" or worker.exit is not None or worker.is_hung:
                return
            if stop is not None and worker.step >= stop:
                return
        for _, worker in workers:
            worker.step += 1

    def tick(self, seconds: float = TICK_S) -> None:
        """Time passes, for all at once. The coordinator looks more often: else it would take itself
        for one that had stood still."""
        end = Clock.now + seconds
        while Clock.now < end:
            Clock.now = min(end, Clock.now + LOOK_S)
            with self.desk._lock:
                self.desk.tick()
        for host in self.hosts.values():
            if not host.is_silent and host.agent.exit is None:
                host.agent.feed(events.Ticked(Clock.now, host.hands.seen(host.agent.state.round)))

    def go_on(self, seconds: float) -> None:
        """Let everything happen that can, for so long."""
        end = Clock.now + seconds
        while Clock.now < end and self.phase is not Phase.ENDED:
            for _ in range(ROUNDS_A_TICK):
                before = self.happened
                for name in list(self.hosts):
                    for what in ("net", "work", "workers"):
                        self.act(name, what)
                if self.happened == before:
                    break
            self.train()
            self.tick(TICK_S if Clock.now + TICK_S < end else 1.0)

    def heal(self) -> None:
        """Faults stop: what hung goes on, who was silent speaks, who had no room has."""
        self.ghosts.clear()
        for host in self.hosts.values():
            host.is_silent = host.is_full = host.cannot_start = False
            for group in host.hands._groups.values():
                for worker in group.workers.values():
                    worker.is_hung = False

    def bye(self, name: str) -> None:
        """An agent ends by itself."""
        host = self.hosts.get(name)
        if host is not None and host.is_in:
            self.desk.handle(host, Bye("j", name, host.incarnation))  # type: ignore[arg-type]
