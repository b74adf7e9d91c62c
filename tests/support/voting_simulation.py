"""The vote on a job's coordinator in virtual time: the real register (``VoteRegister``) and rules
of witnesses, over a wire that loses, delays and repeats messages and is cut in two, on hosts
that stand still and agents that forget.

A process is a thread that runs only while the world has it run, so that a seed says all that
happens.
"""

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from scalai.core import witness as rules
from scalai.core.electorate import NOTHING, Candidate, Electorate, Witness, choose, key_of
from scalai.core.errors import PeerError, SilentError
from scalai.core.witness import Known, Memory, Told, VoteRequest, WriteRecord
from scalai.launch.coordinator.ballots import ASK_S
from scalai.launch.coordinator.leases import HELD_S, HURRY_S, LEASE_S, RENEW_S, Entry, Watch
from scalai.launch.coordinator.votes import VoteRegister

TOKEN = b"token"
STUCK_S = 60.0
"""A step of the simulated world takes no time."""
Answer = Callable[[Memory, VoteRequest], tuple[Memory, Told]]


class Ended(BaseException):
    """The world ends, or this process was killed."""


class TwoHoldersError(AssertionError):
    """Two processes hold the lease at one time."""


class Process(threading.Thread):
    """What runs on a host, one step at a time."""

    def __init__(self, world: "World", work: Callable[["Process"], None]) -> None:
        super().__init__(daemon=True)
        self._world, self._work = world, work
        self._turn, self.is_killed, self.is_done = threading.Semaphore(0), False, False
        self.start()

    def run(self) -> None:
        self._turn.acquire()
        try:
            if not self.is_killed:
                self._work(self)
        except Ended:
            pass
        except BaseException as error:  # the world's thread raises it
            self._world.failure = error
        self.is_done = True
        self._world.turn.release()

    def step(self) -> None:
        """Let it run until it waits."""
        if not self.is_done:
            self._turn.release()
            self._world.turn.acquire()

    def pause(self) -> None:
        """Wait until the world says to go on."""
        self._world.turn.release()
        if not self._turn.acquire(timeout=STUCK_S):
            raise TimeoutError("the simulated world does not go on")
        if self.is_killed:
            raise Ended

    def sleep(self, seconds: float) -> None:
        self._world.at(seconds, self.step)
        self.pause()


@dataclass
class Host:
    """A machine: what its agent remembers and knows, and what runs on it."""

    name: str
    memory: Memory
    known: Known | None = None
    """By whom its agent looks for a successor; None: it was told of nobody."""
    told_term: int = 0
    kept: Electorate = field(default_factory=Electorate)
    """What the coordinator here has noted."""
    agent: Process | None = None
    holder: "Holder | None" = None

    def as_witness(self) -> Witness:
        return Witness(self.name, (self.name, 1), self.memory.name)


@dataclass
class Wire:
    """How messages fare: what part of them is lost, comes twice, or is late, and by how much."""

    lost: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    late_s: float = 30.0


class SimulatedBallots:
    """As ``Ballots``, from a host."""

    def __init__(self, world: "World", host: str, process: Process) -> None:
        self._world, self._host, self._process = world, host, process

    def ask(
        self, requests: Mapping[Witness, VoteRequest], is_enough: Callable[[list[Told]], bool]
    ) -> tuple[list[Told], dict[Witness, PeerError]]:
        told: list[Told] = []
        heard: set[Witness] = set()
        is_over = [not requests]

        def end() -> None:
            if not is_over[0]:
                is_over[0] = True
                self._process.step()

        def arrive(witness: Witness, answer: Told) -> None:
            if not is_over[0] and witness not in heard:
                heard.add(witness)
                told.append(answer)
                if len(heard) == len(requests) or is_enough(told):
                    end()

        for witness, request in requests.items():
            self._world.send(self._host, witness.host, request, partial(arrive, witness))
        self._world.at(ASK_S, end)
        if requests:
            self._process.pause()
        return list(told), {w: SilentError("silent") for w in requests if w not in heard}


class Holder:
    """A coordinator: claims its term, and renews it as ``Lease`` does."""

    def __init__(self, world: "World", host: Host, known: Known, term: int) -> None:
        self._world, self.host, self._known, self.term = world, host, known, term
        self.renewed_at, self.is_granted, self.is_over = world.now, False, False
        self._register: VoteRegister | None = None
        self.process = Process(world, self._run)

    def is_held(self) -> bool:
        is_renewed = self._world.now - self.renewed_at < HELD_S
        is_alone = self._register is not None and self._register.is_alone
        return self.is_granted and not self.is_over and (is_renewed or is_alone)

    def end(self) -> None:
        self.is_over = self.process.is_killed = True

    def _run(self, process: Process) -> None:
        world, register = self._world, self._world.register(self.host, self._known, process, self)
        self.renewed_at, self._register = world.now, register
        entry = Entry(self.term, self.host.name, self.term)
        try:
            self.is_granted = register.claim(entry)
        except PeerError:
            pass
        while self.is_granted and not self.is_over:
            world.check()
            process.sleep(HURRY_S if register.is_changing else RENEW_S)
            if world.random.random() < world.pauses:
                process.sleep(world.random.uniform(0.0, 2 * LEASE_S))
            if not self.is_held() and world.random.random() < 0.5:
                break  # its loop has looked before it was renewed after all
            began = world.now
            try:
                newest = register.newest()
                if newest is not None and newest.term > self.term:
                    break
                entry = replace(entry, beat=entry.beat + 1)
                register.renew(entry)
                self.renewed_at = began
            except PeerError:
                continue
        self.is_over = True


class World:
    """Hosts, a wire between them, and what happens when.

    Args:
        seed: Says all.
        names: The hosts; the first one has the first coordinator.
        answer: What witnesses do, ``core.witness.answer`` or a broken one.
        keeps_name: A witness that was started again is taken for the one before: broken.
    """

    def __init__(
        self, seed: int, names: str, answer: Answer = rules.answer, *, keeps_name: bool = False
    ) -> None:
        self.random, self.now = random.Random(seed), 0.0
        self.failure: BaseException | None = None
        self.turn = threading.Semaphore(0)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._answer, self._keeps_name = answer, keeps_name
        self.wire, self.pauses = Wire(), 0.0
        self.group = dict.fromkeys(names, 0)
        self.holders: list[Holder] = []
        self.hosts = {name: Host(name, Memory(f"{name}-0")) for name in names}
        self.held_terms: set[int] = set()
        self._newest, self._is_off = NOTHING, False
        """Of the newest record that was ever sent: who has seen it may be the only one that looks.
        """
        first = self.hosts[names[0]]
        first.holder = self._begin(first, Known(Electorate()), 1)
        for host in self.hosts.values():
            self._start_agent(host)

    # ------------------------------------------------------------------ time

    def at(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), work))

    def run(self, seconds: float) -> None:
        """Let time pass. Raises ``TwoHoldersError``."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, work = heapq.heappop(self._due)
            work()
            self.check()
            if self.failure is not None:
                raise self.failure
        self.now = end

    def check(self) -> None:
        held = [holder for holder in self.holders if holder.is_held()]
        self.held_terms |= {holder.term for holder in held}
        if len(held) > 1:
            terms = [holder.term for holder in held]
            self.failure = TwoHoldersError(f"at {self.now:.1f} s terms {terms} are held")

    def close(self) -> None:
        """End all that runs."""
        processes = [host.agent for host in self.hosts.values()]
        for process in [*processes, *(holder.process for holder in self.holders)]:
            if process is not None:
                process.is_killed = True
                process.step()

    # ------------------------------------------------------------------ the wire

    def send(
        self, source: str, target: str, request: VoteRequest, arrive: Callable[[Told], None]
    ) -> None:
        """Send a request, and its answer back, as the wire has it."""
        if isinstance(request, WriteRecord) and request.record.key > self._newest:
            self._newest = request.record.key
            self._is_off = request.record.electorate.is_off

        def deliver() -> None:
            host = self.hosts[target]
            host.memory, told = self._answer(host.memory, request)
            self._carry(target, source, lambda: arrive(told))

        self._carry(source, target, deliver)

    def _carry(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        if self.group[source] != self.group[target]:
            return
        for _ in range(1 + (self.random.random() < self.wire.twice)):
            if self.random.random() < self.wire.lost:
                continue
            is_late = self.random.random() < self.wire.late
            latest = self.wire.late_s if is_late else 0.05
            self.at(self.random.uniform(0.001, latest), deliver)

    # ------------------------------------------------------------------ processes

    def register(
        self, host: Host, known: Known, process: Process, holder: Holder | None = None
    ) -> VoteRegister:
        """Return the real register, on this wire."""

        def agreed(electorate: Electorate) -> None:
            host.kept = electorate
            assert holder is not None
            for other in self.hosts.values():
                tell = self.random.uniform(0.0, 10.0)
                if self.group[other.name] == self.group[host.name]:
                    self.at(tell, partial(_tell, other, holder.term, electorate))

        found = VoteRegister(
            known, TOKEN,
            wanted=None if holder is None else lambda now, unfit: self._wanted(host, now, unfit),
            agreed=agreed, about_to=lambda electorate: setattr(host, "kept", electorate),
            clock=lambda: self.now,
        )  # fmt: skip
        simulated: Any = SimulatedBallots(self, host.name, process)
        found._ballots = simulated
        return found

    def _wanted(
        self, own: Host, present: tuple[Witness, ...], unfit: Callable[[Witness], bool]
    ) -> tuple[Witness, ...]:
        near = [h for h in self.hosts.values() if self.group[h.name] == self.group[own.name]]
        found = [h.as_witness() for h in near]
        return choose([Candidate(w) for w in found if not unfit(w)], present, own.name)

    def _begin(self, host: Host, known: Known, term: int) -> Holder:
        holder = Holder(self, host, known, term)
        self.holders.append(holder)
        self.at(0.0, holder.process.step)
        return holder

    def _start_agent(self, host: Host) -> None:
        host.agent = Process(self, lambda process: self._look(host, process))
        self.at(self.random.random(), host.agent.step)

    def _look(self, host: Host, process: Process) -> None:
        """An agent's loop: claim the lease where nobody renews it, as ``Succession`` does."""
        while True:
            process.sleep(self.random.uniform(0.5, 1.5))
            has_died = host.holder is not None and host.holder.process.is_killed
            if has_died and not host.kept.everyone:
                # There is no vote: the lock of the job's folder says who.
                assert host.holder is not None
                host.known = None
                host.holder = self._begin(host, Known(Electorate()), host.holder.term + 1)
                continue
            if host.known is None and has_died:
                host.known = Known(host.kept)
            if host.known is not None:
                self._watch(host, process)

    def _watch(self, host: Host, process: Process) -> None:
        told = host.known
        assert told is not None
        register = self.register(host, told, process)
        watch = Watch(register, lambda: self.now)
        while host.known is told:
            process.sleep(self.random.uniform(0.5, 1.5))
            try:
                entry, unchanged_s = watch.look()
                of_it = [
                    holder
                    for holder in self.holders
                    if holder.host is host and (entry is None or holder.term == entry.term)
                ]
                has_died = bool(of_it) and all(each.process.is_killed for each in of_it)
                if has_died and not host.kept.everyone:
                    return
                if register.known.is_off and not has_died:
                    continue
                if unchanged_s <= LEASE_S and not has_died:
                    continue
                process.sleep(self.random.uniform(0.0, 1.0))
                if watch.look()[0] != entry:
                    continue
            except PeerError:
                continue
            known = register.known
            term = 1 + max(known.term, key_of(known.record)[0])
            if host.holder is None or host.holder.is_over:
                host.holder = self._begin(host, known, term)

    # ------------------------------------------------------------------ faults

    def restart_agent(self, name: str) -> None:
        """An agent dies with what it has granted, and another one begins."""
        host = self.hosts[name]
        fresh = Memory(name + f"-{next(self._numbers)}")
        host.memory = replace(fresh, name=host.memory.name) if self._keeps_name else fresh
        host.known = None
        if host.agent is not None:
            host.agent.is_killed = True
        self._start_agent(host)

    def kill_coordinator(self) -> None:
        for holder in self.holders:
            if holder.is_held():
                holder.end()

    def holder(self) -> Holder | None:
        return next((holder for holder in self.holders if holder.is_held()), None)

    def can_elect(self) -> bool:
        """Whether a majority of the newest electorate is there."""
        memories = {host.memory.name for host in self.hosts.values()}
        records = [host.memory.record for host in self.hosts.values()]
        newest = max(records, key=key_of)
        if newest is None or newest.electorate.is_off or self._is_off:
            return False
        return newest.electorate.has_majority(memories) and any(
            host.known is not None for host in self.hosts.values()
        )


def _tell(host: Host, term: int, electorate: Electorate) -> None:
    if term >= host.told_term:
        host.told_term = term
        host.known = Known(electorate) if electorate.everyone else None


def history(world: World, steps: int = 14) -> None:
    """Have random faults strike, and end them."""
    chance = world.random
    world.run(chance.uniform(1.0, 12.0))
    for _ in range(steps):
        names = list(world.hosts)
        match chance.randrange(8):
            case 0 | 1:
                cut = chance.sample(names, chance.randint(1, len(names) // 2))
                world.group = {name: int(name in cut) for name in names}
            case 2:
                world.group = dict.fromkeys(names, 0)
            case 3:
                world.restart_agent(chance.choice(names))
            case 4:
                world.kill_coordinator()
            case 5:
                world.wire = Wire(chance.choice([0.0, 0.1, 0.3]), 0.2, chance.choice([0.0, 0.2]))
            case 6:
                world.pauses = chance.choice([0.0, 0.1, 0.3])
            case 7:
                holder = world.holder()
                if holder is not None:  # cut off alone
                    name = next(h.name for h in world.hosts.values() if h.holder is holder)
                    world.group = {other: int(other == name) for other in names}
        world.run(chance.choice([0.5, 3.0, 12.0, 25.0]))
    world.wire, world.pauses = Wire(), 0.0
    world.group = dict.fromkeys(world.hosts, 0)
