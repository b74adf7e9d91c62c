"""Hosts with the real law of a host, whose workers, stores and durable directory are simulated, in
virtual time.

A state is four tensors, whole on whoever holds them; the fingerprint of one tells its step.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scalai.core.errors import PeerError, ReplacedError, ScalaiError
from scalai.core.host import actions, events
from scalai.core.host.actions import Action
from scalai.core.host.events import Event
from scalai.core.host.standby import Standby
from scalai.core.host.state import HostSettings, HostState, Round
from scalai.core.host.succession import underway
from scalai.core.job.deadlines import STALL_S
from scalai.core.job.spacing import Schedule
from scalai.core.messages import commands, reports
from scalai.core.messages.shared import JsonText, Named
from scalai.core.messages.worker_messages import (
    AwaitFreeze,
    AwaitPieces,
    AwaitRound,
    BeginSnapshot,
    Hello,
    Imports,
    Publish,
    RankFailed,
    RankFinished,
    RankFrozen,
    RankRestored,
    RankStepped,
    RankWritten,
    ReadOrder,
    Source,
    Stand,
    WorkerRequest,
)
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import whole
from scalai.core.tensors.replicas import to_keep
from scalai.launch.agent.loop import Agent, Loop
from scalai.launch.coordinator.calls import Farewell, HostLists, Join, Poll, StoreIdentity, Tell
from scalai.store.manifest import HostManifest, StoredFile
from scalai.store.parts import pieces_of, snapshot_name, summary_bytes
from support.simulated_workers import TENSORS, Clock, EverySlot, Group, Worker, print_of
from support.wire import travelled

if TYPE_CHECKING:
    from support.two_laws import World

NONE = JsonText.of({})
IMPORTS = Imports(("torch",), ("/",))


Found = Event | list[Event] | None
"""Results of work beside the loop."""


class SimulatedHands:
    """Does on simulated workers and files what the law of a host decides."""

    def __init__(self, host: "SimulatedHost") -> None:
        self._host = host
        self.groups: Any = {}
        """``Group`` by round."""
        self._calls: dict[int, tuple[str, Worker]] = {}
        """Pending calls: of a worker's script (``call``), of its thread that waits for a failure
        (``thread_call``), or of the one that writes a snapshot (``copy_call``)."""
        self._last_call = 0

    def generations(self) -> frozenset[int]:
        return frozenset(self._host.store)

    def seen(self, current: Round | None) -> events.GroupSeen | None:
        group = None if current is None else self.groups.get(current.number)
        if current is None or group is None:
            return None
        workers, agreed = group.workers.values(), group.agreed
        return events.GroupSeen(
            newest=max((worker.step for worker in workers), default=0),
            save=self._host.world.save_of(current.number),
            looks=int(Clock.now),
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
            case actions.SendReport(report):
                host.unsent.append(report)
            case actions.AnswerCall(call, value, error):
                self._answered(call, value, is_refused=bool(error))
            case actions.AnswerHello(call, workers, _, is_at_brink):
                # What is at the brink waits there for its round, or is built without storage.
                self._answered(call, is_at_brink and workers.round % 4 == 1)
            case actions.StartGroup(workers):
                if host.cannot_start:
                    return [events.Failed(action, "no process")]
                schedule = Schedule(workers.snapshot_every)
                made = {rank: Worker(rank, schedule=schedule) for rank in workers.placement.ranks}
                self.groups[workers.round] = Group(made, workers.placement.world_size)
                level = Standby.BRINK if workers.round % 2 else Standby.MODELS
                return [events.Done(action, level if action.is_standby else None)]
            case actions.BeginGroup(number):
                assert number in self.groups, "only started workers begin their round"
            case actions.EndGroup(number):
                newest = self.groups.pop(number).newest()
                host.is_spoilt &= not host.has_spoilt
                host.has_spoilt = False
                host.work.append(lambda: events.Done(action, newest))  # its memory is in use
            case actions.PollGroup(number):
                return self._poll(number)
            case commands.Prepare(number, stop):
                self.groups[number].proposed = stop
                return [reports.Prepared(number, stop, self.groups[number].newest())]
            case commands.Agree(number, stop, proves):
                over = self._poll(number)
                if over:
                    return over
                self.groups[number].agreed = stop
                for worker in self.groups[number].workers.values():
                    worker.proves = proves
                return [events.Done(action)]
            case commands.Space(number, begin, every):
                self.groups[number].spaced = Schedule(every, begin)
                return [events.Done(action, self.groups[number].newest())]
            case commands.Withdraw(number):
                self.groups[number].proposed = self.groups[number].agreed = None
            case actions.WarmUp(_, is_last):
                if is_last:
                    host.work.append(lambda: events.Done(action))
            case actions.Kill(number, ranks):
                for rank in ranks:
                    self.groups[number].workers[rank].exit = -9
            case actions.Rejoin():
                host.wants_to_join = True
            case _:
                return self._of_the_store(action)
        return ()

    def _of_the_store(self, action: Action) -> Iterable[Event]:
        host = self._host
        later = host.work.append
        match action:
            case actions.Reserve(_, held):
                slot = EverySlot(dict(held))
                is_full = host.is_full
                later(
                    lambda: events.Failed(action, "full") if is_full else events.Done(action, slot)
                )
            case actions.Seal():
                later(lambda: host.seal(action))
            case actions.FetchWanted():
                later(lambda: host.fetch(action))
            case commands.Commit():
                return [host.commit(action)]
            case actions.DiscardSealed(kept):
                host.sealed = {n: m for n, m in host.sealed.items() if n in kept}
            case commands.DropSnapshot(name):
                host.sealed.pop(name, None)
            case commands.Drop(generation):
                host.store.pop(generation, None)
            case commands.Examine(generation):
                later(lambda: host.examine(generation))
            case commands.Doubt(generation):
                left = host.store.get(generation)
                found = None if left is None else summary_bytes(left)
                host.unsent.append(reports.Doubted(generation, found))
            case commands.Replicate():
                later(lambda: host.replicate(action))
            case commands.Retire(before):
                later(lambda: host.world.disk.retire(before))
            case commands.Archive() | commands.FinishArchive():
                later(lambda: host.world.disk.obey(host, action))
            case commands.CheckHealth(order):
                later(lambda: reports.HealthChecked(order, not host.is_sick, "no device"))
            case commands.Knock(order, peers):
                names = [name for name, _ in peers]
                later(lambda: reports.Knocked(order, host.world.unheard(host.name, names)))
            case commands.Look():
                host.unsent.append(reports.Attached(host.found(), ()))
        return ()

    # ------------------------------------------------------------------ workers

    def _poll(self, number: int) -> list[Event]:
        workers = self.groups[number].workers.values()
        failed = tuple(f"rank {w.rank} exited with {w.exit}" for w in workers if w.exit)
        is_chance = any((worker.exit or 0) < 0 for worker in workers)
        is_over = bool(failed) or all(worker.exit == 0 for worker in workers)
        return [events.GroupOver(number, failed, False, is_chance)] if is_over else []

    def _answered(self, call: int, value: object, *, is_refused: bool = False) -> None:
        kind, worker = self._calls.pop(call)
        if kind == "copy_call":
            worker.copy_call = None
            worker.copy = "write" if worker.copy == "begin" and value is not None else ""
        elif is_refused:
            return  # it waits to be ended
        elif kind == "thread_call":
            worker.thread_call = None
            if worker.thread != "watch":
                worker.thread = "rescue" if value is not None else "end"
            else:
                worker.thread = "frozen"
                if worker.copy == "begin":  # it is given up; what is copied may still be told
                    worker.copy = ""
        elif worker.exit is None:
            worker.call = None
            self._go_on(worker, value)

    def _go_on(self, worker: Worker, value: object) -> None:
        """Let a worker's script go on with an answer."""
        match worker.doing:
            case "hello":
                worker.doing = "wait" if value else "publish"
            case "wait":
                worker.doing = "publish"
            case "publish" if isinstance(value, Source):
                worker.source = worker.step = value.step
                worker.doing = "pieces" if self._host.is_short else "restored"
            case "pieces":
                worker.doing = "restored" if value is None else "pieces"
            case "publish":
                worker.doing = "start"
            case "start" | "stop" | "snapshot":
                worker.doing = f"write {worker.doing}" if value is not None else "train"
            case "write start" | "write stop" | "write snapshot":
                if value is not None:
                    return  # once more, for another rank
                if worker.doing == "write stop" and worker.proves:
                    worker.doing = "proof"
                    return
                if worker.doing == "write stop":
                    worker.exit = 0
                worker.doing = "train" if worker.source is not None else "stepped"
                worker.source = worker.source or 0
            case "restored":
                worker.doing = "stepped"
            case "stepped":
                worker.doing, worker.thread = "train", "watch"
                worker.step += 1
            case "stand":
                worker.doing = "train"
            case "proof" | "finish":
                worker.exit = 0

    def _call(self, kind: str, worker: Worker, request: WorkerRequest) -> None:
        self._last_call += 1
        self._calls[self._last_call] = kind, worker
        setattr(worker, kind, self._last_call)
        self._host.agent.feed(events.Called(self._last_call, travelled(request)))

    def ask(self, number: int, worker: Worker) -> None:
        """Let a worker do what it does next."""
        world_size = self.groups[number].world_size
        is_broken = worker.doing == "publish" and world_size in self._host.world.cannot_run
        if is_broken or (worker.doing == "restored" and self._host.cannot_read(worker, number)):
            worker.exit = 1
        else:
            self._call("call", worker, self._request(number, worker))

    def fail(self, number: int, worker: Worker, reason: str) -> None:
        """The script of a worker raises."""
        worker.is_hung = True
        self._call("call", worker, RankFailed(worker.rank, number, reason))

    def ask_thread(self, number: int, worker: Worker) -> None:
        """Let the thread of a worker do what it does next."""
        request: WorkerRequest = AwaitFreeze(worker.rank, number)
        if worker.thread == "frozen":
            step = None if worker.is_torn else worker.step
            request = RankFrozen(worker.rank, number, step, "torn")
        elif worker.thread != "watch":
            request = self._written(number, worker, worker.step)
        self._call("thread_call", worker, request)

    def ask_copy(self, number: int, worker: Worker) -> None:
        """Let the thread of a worker go on that writes a snapshot beside the training."""
        request: WorkerRequest = BeginSnapshot(worker.rank, number, "snapshot", worker.snapped)
        if worker.copy == "write":
            request = self._written(number, worker, worker.snapped)
        self._call("copy_call", worker, request)

    def _written(self, number: int, worker: Worker, step: int) -> WorkerRequest:
        held = self._host.held_by(worker, number).tensors
        made = tuple(print_of(tensor, step) for tensor in held)
        rank, seconds = worker.rank, self._host.seconds
        return RankWritten(rank, number, step, made, f"r{rank}", NONE, NONE, 1, seconds)

    def _request(self, number: int, worker: Worker) -> WorkerRequest:
        rank, host = worker.rank, self._host
        numbers = host.world.numbers(self.groups[number].world_size)
        imports = IMPORTS if rank == min(self.groups[number].workers) else None
        if worker.doing == "proof":  # of a round beside the present one, perhaps
            return RankStepped(rank, number, worker.step, imports, numbers)
        held = host.held_by(worker, number)
        match worker.doing.partition(" ")[0]:
            case "hello":
                return Hello(rank, number, imports)
            case "wait":
                return AwaitRound(rank, number)
            case "publish":
                return Publish(rank, number, True, held, held, f"r{rank}", NONE, False)
            case "pieces":
                return AwaitPieces(rank, number)
            case "restored":
                host.has_spoilt = host.is_spoilt
                step = (worker.source or 0) + host.is_spoilt
                found = [print_of(t, step + host.is_read_wrong(t.name)) for t in held.tensors]
                return RankRestored(rank, number, np.array(found, np.uint64), {}, "restored")
            case "stepped":
                return RankStepped(rank, number, worker.step, imports, numbers)
            case "start" | "stop" | "snapshot":
                return BeginSnapshot(rank, number, worker.doing, worker.step)
            case "write":
                return self._written(number, worker, worker.step)
            case "stand":
                return Stand(rank, number, worker.step, host.world.save_of(number) or 0)
            case "finish":
                return RankFinished(rank, number, worker.step)
            case _:
                raise AssertionError(worker.doing)


def tensors_of(part: HostManifest | None) -> dict[str, Tensor]:
    """Return the tensors of a part, by name."""
    return {} if part is None else {tensor.name: tensor for tensor in part.collection.tensors}


class SimulatedHost:
    """One host: its agent with the real law, its workers and its store."""

    def __init__(self, world: "World", name: str, slots: int) -> None:
        self.world, self.name, self.slots = world, name, slots
        self.store: dict[int, HostManifest] = {}
        self.sealed: dict[str, HostManifest] = {}
        self.number = 0
        self.incarnation = ""
        self.is_silent = self.is_full = self.cannot_start = False
        self.is_short = False
        """Its workers wait for what other hosts have."""
        self.damaged: dict[int, dict[str, str]] = {}
        """Tensors of its part of a generation whose files have rotted, or were cut."""
        self.known_damage: dict[int, dict[str, str]] = {}
        """Those of them that its agent has found, by reading its part again."""
        self.reads: dict[str, str] = {}
        """What is wrong with the files that the workers of its present round read, by tensor."""
        self.seconds: dict[str, float] = {}
        """What its workers tell of a snapshot."""
        self.is_sick = self.is_known_sick = False
        """Its health check fails; and that it has failed last was told."""
        self.is_spoilt = self.has_spoilt = False
        """Of the next round that its workers restore in, what they restore is not what was
        committed."""
        self.ahead_s = (ord(name[0]) % 3 - 1) * 500.0
        """Its clock differs from those of others."""
        self.begin()

    @property
    def clock_s(self) -> float:
        return Clock.now + self.ahead_s

    def silence_s(self) -> float:
        """As that of its connection: nothing that it sends lies there unread."""
        return math.inf

    def begin(self) -> None:
        """A new agent process on this host, with what its store holds."""
        self.log: list[str] = []
        self.seen_steps: tuple[int, dict[int, int], float] = (0, {}, 0.0)
        """The steps of the workers of a round, and since when they are these."""
        self.unsent: list[reports.Report] = []
        self.work: list[Callable[[], Found]] = []
        self.wants_to_join, self.is_in = True, False
        self.term = 0
        """Of the coordinator that it has joined last."""
        self.hands = SimulatedHands(self)
        has_spare_cores = ord(self.name[0]) % 2 == 0
        settings = HostSettings(self.name, True, 120.0, cores=64 if has_spare_cores else 1)
        state = HostState(settings, self.slots, self.clock_s)
        self.agent = Agent(state, self.hands, Loop())

    # ------------------------------------------------------------------ the store

    def held_by(self, worker: Worker, number: int) -> Collection:
        """Return what a rank holds: all, its shard, or every so-manieth tensor."""
        current = self.agent.state
        found = next(r for r in (current.round, current.standby) if r is not None
                     and r.number == number)  # fmt: skip
        world = found.workers.placement.world_size
        shards = self.world.shards or (1 if self.world.is_replicated else world)
        held = TENSORS[worker.rank % shards :: shards]
        return Collection.of((tensor, whole(tensor.shape)) for tensor in held)

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
        about = {**action.about, "time": self.clock_s}
        made = self.manifest(action.step, tensors.values(), about, tuple(sorted(action.parts)))
        self.sealed[snapshot_name(made)] = made
        return events.Done(action, summary_bytes(made))

    def damage(self, what: str, count: int) -> None:
        """The files of some tensors of its newest part change, or are cut."""
        if self.store:
            number = max(self.store)
            names = list(tensors_of(self.store[number]))
            self.damaged.setdefault(number, {}).update(dict.fromkeys(names[:count], what))

    def sound(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of its part of a generation that are what was committed."""
        held, damaged = tensors_of(self.store.get(number)), self.damaged.get(number, {})
        return {name: tensor for name, tensor in held.items() if name not in damaged}

    def examine(self, number: int) -> None:
        """Read a part again: what is damaged counts no more."""
        left, part = self.sound(number), self.store.get(number)
        damaged = self.damaged.pop(number, {})
        found = {name: damaged[name] for name in sorted(damaged.keys() & tensors_of(part).keys())}
        lines = tuple(f"{name!r} is {how}" for name, how in found.items())
        if part is not None and lines:
            self.store[number] = self.like(part, left.values(), part.ranks)
            self.known_damage.setdefault(number, {}).update(found)
        kept = summary_bytes(self.store[number]) if part is not None else None
        self.unsent.append(reports.Examined(number, lines, "/d", kept))

    def examined(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return the damage that was found and has not come whole again, by generation."""
        told = {}
        for number, part in sorted(self.store.items()):
            held = tensors_of(part)
            found = sorted(self.known_damage.get(number, {}).items())
            told[number] = tuple(f"{name!r} is {how}" for name, how in found if name not in held)
        return tuple((number, lines) for number, lines in told.items() if lines)

    def like(
        self, part: HostManifest, tensors: Iterable[Tensor], ranks: tuple[int, ...]
    ) -> HostManifest:
        """Return a part of the same generation with these tensors."""
        made = self.manifest(part.step, tensors, dict(part.about), ranks)
        return replace(made, generation=part.generation, committed=part.committed)

    def is_read_wrong(self, name: str) -> bool:
        """Whether what its workers have read of a tensor is not what was committed."""
        return self.reads.get(name) == "rotten"

    def cannot_read(self, worker: Worker, number: int) -> bool:
        """Whether a worker fails by what it reads before it can tell of it."""
        held = self.held_by(worker, number).tensors
        return any(self.reads.get(it.name) in ("cut", "wrong for the script") for it in held)

    def fetch(self, action: actions.FetchWanted) -> Found:
        """Plan, and hand out what is here; the rest comes later, where something is missing."""
        start, wants = action.start, action.wants
        assert start.sources is not None
        own, given, wanted = self._sides(action)
        if not wanted.keys() <= given.keys():
            return events.Failed(action, "a host is gone that holds what is wanted")
        source = Source(None, start.sources.value.step, 1, NONE, NONE, 2)  # type: ignore[arg-type]
        round = start.workers.round
        planned = events.RestorePlanned(round, dict.fromkeys(wants, source), 0.0, 0, 0)
        self.is_short = not wanted.keys() <= own.keys()
        if not self.is_short:
            return [planned, *self.bring(action)]
        self.work.append(lambda: self.bring(action))
        return planned

    def bring(self, action: actions.FetchWanted) -> list[Event]:
        """What is missing comes from whoever has it still."""
        own, given, wanted = self._sides(action)
        if not wanted.keys() <= given.keys():
            return [events.Failed(action, "a host is gone that holds what is wanted")]
        if not wanted:  # its workers hold nothing
            return [events.Done(action)]
        one = next(iter(given.values()))
        damaged = self.damaged.get(one.generation, {})
        self.reads = {name: damaged[name] for name in wanted if name in own and name in damaged}
        made = self.like(one, {**wanted, **own}.values(), one.ranks)
        self.store[one.generation] = made
        came = events.PiecesHere(
            action.start.workers.round, dict.fromkeys(action.wants, ReadOrder.empty())
        )
        grown = reports.Grown(summary_bytes(made))
        return [*([came] if self.is_short else []), grown, events.Done(action)]

    def _sides(
        self, action: actions.FetchWanted
    ) -> tuple[dict[str, Tensor], dict[str, HostManifest], dict[str, Tensor]]:
        """Return tensors that it has, parts that have tensors, and tensors that it wants."""
        start, wants = action.start, action.wants
        assert start.sources is not None
        listed = start.sources.value
        wanted = {tensor.name: tensor for each in wants.values() for tensor in each.pieces.tensors}
        given: dict[str, HostManifest] = {}
        own = tensors_of(self.store.get(listed.generation))
        for place, name in enumerate(listed.hosts):
            if not self.world.can_reach(name, listed.generation):
                continue
            host = self.world.hosts[name]
            part, known = host.store[listed.generation], listed.reference(place)
            if pieces_of(part, known.rows).digest().hex() == known.digest:
                # What others have that is damaged is found when it comes.
                given |= dict.fromkeys(own if host is self else host.sound(part.generation), part)
        return own, given, wanted

    def replicate(self, command: commands.Replicate) -> Found:
        """Copy what this host is to keep for others, as far as these give it."""
        listed, ring = command.sources.value, command.ring.value
        number = listed.generation
        given = {
            name: self.world.hosts[name].store[number]
            for name in listed.hosts
            if self.world.can_reach(name, number)
        }
        damaged = sorted(
            name
            for name, part in given.items()
            if name != self.name and tensors_of(part) != self.world.hosts[name].sound(number)
        )
        if damaged:
            wrong = reports.Suspected(number, tuple(damaged), "it differs")
            return [wrong, reports.Replicated(command.order, 0, "it differs")]
        missing = [ward for ward in ring.wards(self.name) if ward in set(listed.hosts) - set(given)]
        reason = f"{missing} give nothing" if missing else ""
        wanted = to_keep(ring, self.name, {name: part.collection for name, part in given.items()})
        if self.is_full or not len(wanted):
            reason = "full" if self.is_full else reason
            return reports.Replicated(command.order, 0, reason, self.is_full)
        names = {wanted.tensors[row].name: wanted.tensors[row] for row in wanted.tensor.tolist()}
        names |= tensors_of(self.store.get(number))
        made = self.like(next(iter(given.values())), names.values(), ())
        self.store[number] = made
        done = reports.Replicated(command.order, 16, reason)
        return [reports.Grown(summary_bytes(made)), done]

    def found(self) -> tuple[bytes, ...]:
        """Make what the disk shows this host's own; return what it holds then."""
        self.world.disk.attach(self)
        return tuple(summary_bytes(part) for part in self.store.values())

    def commit(self, command: commands.Commit) -> Event:
        number, there = command.generation, self.store.get(command.generation)
        if there is None or snapshot_name(there) != command.snapshot:
            if command.snapshot not in self.sealed:
                return events.NothingToCommit(command, "sealed")
            if self.is_full:
                return events.Failed(command, "full")
            made = self.sealed.pop(command.snapshot)
            self.store[number] = replace(made, generation=number, committed=command.committed)
        return reports.Committed(number)

    # ------------------------------------------------------------------ the network

    def _ask(self, request: Any) -> Any:
        peer: Any = self
        return self.world.desk.handle(peer, travelled(request))

    def enter_job(self) -> None:
        """Become part of the job, if it is taken in."""
        self.number += 1
        self.world.joins += 1
        self.incarnation = f"{self.name}{self.world.joins}"  # no other agent ever had it
        self.wants_to_join, self.reported, self.received = False, 0, 0
        self.unsent.clear()
        named = HostLists()
        request = Join(
            "j", self.name, self.incarnation, StoreIdentity("m", hash(self.name) % 1000, 0),
            self.slots, ("h", 1), named.take(self.found()),
            named.take(map(summary_bytes, self.sealed.values())), (),
            JsonText.of(self.world.spec.to_json()),
            underway=underway(self.agent.state, self.hands.seen(self.agent.state.round)),
            last_round=self.agent.state.last_round, term=self.term,
            remembered=self.agent.state.remembered,
            has_check=self.world.has_checks, examined=self.examined(), hosts=named.lists,
        )  # fmt: skip
        try:
            answer = self._ask(request)
        except ScalaiError as error:
            self.agent.feed(events.JobLost(str(error)))
            return
        self.term = max(self.term, answer.term)
        self.is_in = True
        if self.number > 1:
            self.agent.feed(events.Done(actions.Rejoin()))

    def exchange(self, *, is_repeated: bool = False) -> None:
        """Report one thing, and fetch commands. What is repeated was heard before."""
        if not self.is_in:
            return
        try:
            if self.unsent:
                number = self.reported + 1
                tell = Tell("j", self.name, self.incarnation, number, Named(self.unsent[0]))
                for _ in range(2 if is_repeated else 1):
                    self._ask(tell)
                self.reported = number
                told = self.unsent.pop(0)
                if isinstance(told, reports.HealthChecked):
                    self.is_known_sick = not told.is_healthy
                self.world.happened += 1
            current = self.agent.state.round
            seen = self.hands.seen(current)
            poll = Poll(
                "j", self.name, self.incarnation, 0 if is_repeated else self.received,
                current.number if current else 0, seen.newest if seen else 0, self.stalled(), 0.0,
            )  # fmt: skip
            found = travelled(self._ask(poll))
        except ScalaiError as error:
            self._refused(error)
            return
        for number, command in enumerate(found.commands, found.first):
            if number > self.received and self.agent.exit is None:
                self.world.happened += 1
                self.received = number
                self.agent.obey(command.message)

    def stalled(self) -> reports.Stalled | None:
        """Return which workers of the present round have made no step for some time."""
        current = self.agent.state.round
        number = 0 if current is None else current.number
        group = self.hands.groups.get(number)
        steps = {} if group is None else {w.rank: w.step for w in group.workers.values()}
        if (number, steps) != self.seen_steps[:2]:
            self.seen_steps = number, steps, Clock.now
            return None
        for_s, lowest = Clock.now - self.seen_steps[2], min(steps.values(), default=0)
        ranks = tuple(rank for rank, step in steps.items() if step == lowest)
        return reports.Stalled(ranks, lowest, for_s) if ranks and for_s > STALL_S else None

    def _refused(self, error: ScalaiError) -> None:
        if isinstance(error, ReplacedError):
            self.is_in = False
            self.agent.feed(events.CoordinatorReplaced())
            return
        farewell = self._ask(Farewell("j", self.name, self.incarnation))
        self.is_in = False
        if farewell is not None:
            self.agent.obey(farewell)
        else:
            self.agent.feed(events.Expelled(str(PeerError(str(error)))))


@dataclass(slots=True)
class SimulatedDisk:
    """Parts by generation and host: those that are shown, and those that are written only."""

    shown: dict[int, dict[str, HostManifest]] = field(default_factory=dict)
    hidden: dict[int, dict[str, HostManifest]] = field(default_factory=dict)
    is_full: bool = False

    def obey(
        self, host: "SimulatedHost", command: commands.Archive | commands.FinishArchive
    ) -> None:
        """Do what a host is told, and have it report that."""
        number, order, reason = command.generation, command.order, ""
        part = host.store.get(number)
        if isinstance(command, commands.FinishArchive):
            self._show(number)
        elif self.is_full or part is None:
            reason = "the disk is full" if self.is_full else "it is gone"
        else:
            self.hidden.setdefault(number, {})[host.name] = part
        host.unsent.append(reports.Archived(order, 16, reason))

    def _show(self, number: int) -> None:
        self.shown.setdefault(number, {}).update(self.hidden.pop(number, {}))

    def attach(self, host: "SimulatedHost") -> None:
        """A host looks at it, and makes what is shown its own. Where one part is shown, all have
        been written."""
        for number in self.shown:
            self._show(number)
        for one, tensors in self.states():
            mine = host.store.get(one.generation)
            if mine is not None and snapshot_name(mine) == snapshot_name(one):
                tensors |= tensors_of(mine)
            host.store[one.generation] = host.like(one, tensors.values(), one.ranks)

    def retire(self, before: int) -> None:
        for entry in (self.shown, self.hidden):
            for number in [n for n in entry if n < before]:
                del entry[number]

    def states(self) -> Iterator[tuple[HostManifest, dict[str, Tensor]]]:
        """Yield each generation: a part of it that says what it is, and all tensors of it."""
        for number, parts in sorted(self.shown.items()):
            one = replace(next(iter(parts.values())), generation=number)
            yield one, {n: it for part in parts.values() for n, it in tensors_of(part).items()}

    def check(self) -> None:
        """What is shown is whole, and of one state."""
        for one, tensors in self.states():
            names = {snapshot_name(part) for part in self.shown[one.generation].values()}
            assert len(names) == 1, f"generation {one.generation} is of {names}"
            assert len(tensors) == len(TENSORS), f"generation {one.generation} is not whole"
