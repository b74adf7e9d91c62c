"""Hosts with the real law of a host, whose workers and stores are simulated, in virtual time.

A state is four tensors, whole on whoever holds them; the fingerprint of one tells its step.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from scalai.core.errors import PeerError, ReplacedError, ScalaiError
from scalai.core.host import actions, events
from scalai.core.host.events import Event
from scalai.core.host.state import HostSettings, HostState
from scalai.core.host.succession import underway
from scalai.core.job.deadlines import STALL_S
from scalai.core.messages import commands
from scalai.core.messages.reports import (
    Committed,
    Examined,
    Grown,
    HealthChecked,
    Replicated,
    Report,
    Stalled,
    Suspected,
)
from scalai.core.messages.shared import JsonText, Named
from scalai.core.messages.worker_messages import (
    Source,
)
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import whole
from scalai.core.tensors.replicas import to_keep
from scalai.launch.agent.loop import Agent, Loop
from scalai.launch.coordinator.calls import Farewell, Join, Poll, StoreIdentity, Tell
from scalai.launch.coordinator.named_once import HostLists
from scalai.store.manifest import HostManifest, StoredFile
from scalai.store.parts import pieces_of, snapshot_name, summary_bytes
from support.simulated_hands import SimulatedHands
from support.simulated_workers import TENSORS, Clock, EverySlot, Worker, print_of
from support.wire import travelled

if TYPE_CHECKING:
    from support.two_laws import World


Found = Event | list[Event] | None
"""Results of work beside the loop."""


class SimulatedHost:
    """One host: its agent with the real law, its workers and its store."""

    def __init__(self, world: "World", name: str, slots: int) -> None:
        self.world, self.name, self.slots = world, name, slots
        self.store: dict[int, HostManifest] = {}
        self.sealed: dict[str, HostManifest] = {}
        self.number = 0
        self.incarnation = ""
        self.is_silent = self.is_full = self.cannot_start = False
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
        self.unsent: list[Report] = []
        self.work: list[Callable[[], Found]] = []
        self.wants_to_join, self.is_in = True, False
        self.term = 0
        """Of the coordinator that it has joined last."""
        self.hands = SimulatedHands(self)
        state = HostState(HostSettings(self.name, True, 120.0), self.slots, self.clock_s)
        self.agent = Agent(state, self.hands, Loop())

    # ------------------------------------------------------------------ the store

    def held_by(self, worker: Worker, number: int) -> Collection:
        """Return what a rank holds: all, or every so-manieth tensor."""
        current = self.agent.state
        found = next(r for r in (current.round, current.standby) if r is not None
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
        about = {**action.about, "time": self.clock_s}
        made = self.manifest(action.step, tensors.values(), about, tuple(sorted(action.parts)))
        self.sealed[snapshot_name(made)] = made
        return events.Done(action, summary_bytes(made))

    def damage(self, what: str, count: int) -> None:
        """The files of some tensors of its newest part change, or are cut."""
        if self.store:
            number = max(self.store)
            names = [tensor.name for tensor in self.store[number].collection.tensors]
            self.damaged.setdefault(number, {}).update(dict.fromkeys(names[:count], what))

    def sound(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of its part of a generation that are what was committed."""
        part, damaged = self.store.get(number), self.damaged.get(number, {})
        tensors = () if part is None else part.collection.tensors
        return {tensor.name: tensor for tensor in tensors if tensor.name not in damaged}

    def examine(self, number: int) -> None:
        """Read a part again: what is damaged counts no more."""
        found, part = self.damaged.pop(number, {}), self.store.get(number)
        names = {tensor.name for tensor in part.collection.tensors} if part is not None else set()
        lines = tuple(f"{name!r} is {found[name]}" for name in sorted(found.keys() & names))
        if part is not None and lines:
            left = [t for t in part.collection.tensors if t.name not in found]
            self.store[number] = self.like(part, left, part.ranks)
            known = self.known_damage.setdefault(number, {})
            known |= {name: found[name] for name in found.keys() & names}
        kept = summary_bytes(self.store[number]) if part is not None else None
        self.unsent.append(Examined(number, lines, "/d", kept))

    def examined(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return the damage that was found and has not come whole again, by generation."""
        told = {}
        for number, part in sorted(self.store.items()):
            held = {tensor.name for tensor in part.collection.tensors}
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
        held = {tensor.name for tensor in self.held_by(worker, number).tensors}
        return any(self.reads.get(name) in ("cut", "wrong for the script") for name in held)

    def fetch(self, action: actions.FetchWanted) -> Found:
        start, wants = action.start, action.wants
        assert start.sources is not None
        listed = start.sources.value
        wanted = {tensor.name: tensor for each in wants.values() for tensor in each.pieces.tensors}
        given: dict[str, HostManifest] = {}
        mine = self.store.get(listed.generation)
        own = {tensor.name for tensor in mine.collection.tensors} if mine is not None else set()
        for place, name in enumerate(listed.hosts):
            if not self.world.can_reach(name, listed.generation):
                continue
            host = self.world.hosts[name]
            part, known = host.store[listed.generation], listed.reference(place)
            if pieces_of(part, known.rows).digest().hex() == known.digest:
                # What others have that is damaged is found when it comes.
                found = own if host is self else set(host.sound(listed.generation))
                given |= dict.fromkeys(found, part)
        if not wanted.keys() <= given.keys():
            return events.Failed(action, "a host is gone that holds what is wanted")
        none = JsonText.of({})
        source = Source(None, listed.step, 1, none, none, 2)  # type: ignore[arg-type]
        fetched = events.Gathered(dict.fromkeys(wants, source), 0.0, 0.0, 0, 0)
        if not wanted:  # its workers hold nothing
            return events.Done(action, fetched)
        one = next(iter(given.values()))
        damaged = self.damaged.get(one.generation, {})
        self.reads = {name: damaged[name] for name in wanted if name in own and name in damaged}
        names = dict(wanted)
        if mine is not None:
            names |= {tensor.name: tensor for tensor in mine.collection.tensors}
        made = self.like(one, names.values(), one.ranks)
        self.store[one.generation] = made
        return [Grown(summary_bytes(made)), events.Done(action, fetched)]

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
            name for name in given
            if name != self.name and len(given[name].collection.tensors)
            > len(self.world.hosts[name].sound(number))
        )  # fmt: skip
        if damaged:
            wrong = Suspected(number, tuple(damaged), "it differs")
            return [wrong, Replicated(command.order, 0, "it differs")]
        missing = [ward for ward in ring.wards(self.name) if ward in set(listed.hosts) - set(given)]
        reason = f"{missing} give nothing" if missing else ""
        wanted = to_keep(ring, self.name, {name: part.collection for name, part in given.items()})
        if self.is_full or not len(wanted):
            reason = "full" if self.is_full else reason
            return Replicated(command.order, 0, reason, self.is_full)
        one, mine = next(iter(given.values())), self.store.get(number)
        names = {wanted.tensors[row].name: wanted.tensors[row] for row in wanted.tensor.tolist()}
        if mine is not None:
            names |= {tensor.name: tensor for tensor in mine.collection.tensors}
        made = self.like(one, names.values(), ())
        self.store[number] = made
        done = Replicated(command.order, 16, reason)
        return [Grown(summary_bytes(made)), done]

    def found(self) -> tuple[bytes, ...]:
        """Make what the disk shows this host's own; return what it holds then."""
        self.world.disk.attach(self)
        return tuple(summary_bytes(part) for part in self.store.values())

    def commit(self, command: commands.Commit) -> Iterable[Event]:
        number, there = command.generation, self.store.get(command.generation)
        if there is not None and snapshot_name(there) == command.snapshot:
            return [Committed(number)]
        if command.snapshot not in self.sealed:
            return [events.NothingToCommit(command, "sealed")]
        if self.is_full:
            return [events.Failed(command, "full")]
        made = self.sealed.pop(command.snapshot)
        self.store[number] = replace(made, generation=number, committed=command.committed)
        return [Committed(number)]

    # ------------------------------------------------------------------ the network

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
            answer: Any = self.world.desk.handle(self, travelled(request))  # type: ignore[arg-type]
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
                    self.world.desk.handle(self, travelled(tell))  # type: ignore[arg-type]
                self.reported = number
                told = self.unsent.pop(0)
                if isinstance(told, HealthChecked):
                    self.is_known_sick = not told.is_healthy
                self.world.happened += 1
            current = self.agent.state.round
            seen = self.hands.seen(current)
            poll = Poll(
                "j", self.name, self.incarnation, 0 if is_repeated else self.received,
                current.number if current else 0, seen.newest if seen else 0, self.stalled(), 0.0,
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

    def stalled(self) -> Stalled | None:
        """Return which workers of the present round have made no step for some time."""
        current = self.agent.state.round
        group = None if current is None else self.hands.groups.get(current.number)
        steps = {w.rank: w.step for w in group.workers.values()} if group is not None else {}
        if current is None or (current.number, steps) != self.seen_steps[:2]:
            self.seen_steps = current.number if current else 0, steps, Clock.now
            return None
        for_s, lowest = Clock.now - self.seen_steps[2], min(steps.values(), default=0)
        ranks = tuple(rank for rank, step in steps.items() if step == lowest)
        return Stalled(ranks, lowest, for_s) if ranks and for_s > STALL_S else None

    def _refused(self, error: ScalaiError) -> None:
        if isinstance(error, ReplacedError):
            self.is_in = False
            self.agent.feed(events.CoordinatorReplaced())
            return
        farewell: Any = self.world.desk.handle(
            self,  # type: ignore[arg-type]
            Farewell("j", self.name, self.incarnation),
        )
        self.is_in = False
        if farewell is not None:
            self.agent.obey(farewell)
        else:
            self.agent.feed(events.Expelled(str(PeerError(str(error)))))
