"""The agents of a job: last sign of life and waiting commands."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from scalai.core.errors import ReplacedError, StaleError
from scalai.core.exit_codes import RESUMABLE
from scalai.core.job.membership import Generation
from scalai.core.messages.commands import Command, Ending, Exit, Remember
from scalai.core.messages.reports import Stalled
from scalai.core.messages.shared import Named
from scalai.launch.coordinator.calls import CommandsDue, StoreIdentity
from scalai.launch.coordinator.registers import LEASES
from scalai.runtime.calls import Peer

MOST_KNOWN = 1 << 15
"""Number of former agents kept."""


class Member:
    """One incarnation of a host's agent.

    ``address``: of its data plane; ``newest``: furthest step of its workers; ``clock``: monotonic,
    in seconds.

    Commands are numbered from 1 and stay until acknowledged: a connection may break at any time.
    """

    def __init__(
        self,
        peer: Peer,
        address: tuple[str, int],
        domain: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.address, self.domain = address, domain
        """``domain``: failure domain shared with other hosts; "": none."""
        self.newest = 0
        self.stalled: Stalled | None = None
        """Workers without steps; None: all step."""
        self.incarnation = ""
        """Random name of the agent process for this join."""
        self.store: StoreIdentity | None = None
        """Identity of its store: agents with equal ones share its lock."""
        self.last_report = 0
        """Number of its last report."""
        self.ready: threading.Condition | None = None
        """Notified when commands wait; set by the members."""
        self.kept = (0, 0)
        """Order of its record of the job (``Remembered``)."""
        self.is_reported = False
        """Its silence was logged."""
        self.judge_again_s = 0.0
        """Silence before its loss is considered again, in seconds."""
        self.was_sent_exit = False
        """Its exit was sent; it may not have arrived."""
        self.is_dismissed = False
        """It has its exit."""
        self._peers = {peer}
        self._in_hand = set[Peer]()
        """Connections with an unanswered call."""
        self._commands: list[Command] = []
        self._received = 0
        self._heard_at = clock()
        self.unlinked_at: float | None = None
        """Time of its disconnection; None: connected."""

    @property
    def has_commands(self) -> bool:
        """Whether commands wait for its acknowledgement."""
        return bool(self._commands)

    def heard(self, peer: Peer) -> None:
        """Note its call in work. Needs no lock: a lock's holder must not make it seem silent."""
        self._in_hand.add(peer)

    def answered(self, peer: Peer) -> None:
        """Note the answer to its call. Needs no lock."""
        self._heard_at = self._clock()
        self._in_hand.discard(peer)

    def silence_s(self) -> float:
        """Seconds since its last answer; 0 with a call unread, in work, or without its answer."""
        if self._in_hand:
            return 0.0
        silence_s = self._clock() - self._heard_at
        return min([silence_s, *(peer.silence_s() for peer in list(self._peers))])

    def is_doubtful(self, before: float) -> bool:
        """Whether it is disconnected, silent since this time, or reported."""
        is_silent = not self._in_hand and self._heard_at < before
        return is_silent or self.unlinked_at is not None or self.is_reported

    def linked(self, peer: Peer) -> None:
        """Note a call by this connection."""
        self._peers.add(peer)
        self.unlinked_at = None

    def unlinked(self, peer: Peer) -> None:
        """Note the end of a connection, perhaps of its own."""
        if peer in self._peers:
            self._peers.discard(peer)
            if not self._peers:
                self.unlinked_at = self._clock()

    def unlinked_s(self) -> float | None:
        """Seconds since its disconnection; None: connected."""
        return None if self.unlinked_at is None else self._clock() - self.unlinked_at

    def excuse(self, seconds: float) -> None:
        """Subtract seconds of silence: nobody listened."""
        now = self._clock()
        self._heard_at = min(now, self._heard_at + seconds)
        if self.unlinked_at is not None:
            self.unlinked_at = min(now, self.unlinked_at + seconds)

    def command(self, command: Command) -> None:
        self._commands.append(command)
        if self.ready is not None:
            self.ready.notify_all()

    def acknowledge(self, received: int) -> None:
        """Drop the commands up to this number."""
        count = max(0, received - self._received)
        done, self._commands = self._commands[:count], self._commands[count:]
        self._received += len(done)
        self.is_dismissed |= any(isinstance(command, Exit) for command in done)
        for command in done:
            if isinstance(command, Remember):
                self.kept = command.known.value.order

    def waiting(self, term: int, keep_s: float) -> CommandsDue:
        """Unacknowledged commands, to be sent in this ``term``; ``keep_s``: duration of the next
        poll."""
        self.was_sent_exit |= any(isinstance(command, Exit) for command in self._commands)
        named = tuple(Named(command) for command in self._commands)
        return CommandsDue(term, self._received + 1, named, keep_s)


class Members:
    """Agents by host: present ones, and released ones that fetch their last command.

    Args:
        lock: Held by callers, except for ``in_hand``.
    """

    def __init__(
        self,
        lock: "threading.RLock",
        term: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock, self.term, self._clock = lock, term, clock
        self._pausing = threading.Condition(lock)
        self._present: dict[str, Member] = {}
        self._released: dict[str, Member] = {}
        self._left = set[str]()
        """Machines of released agents."""
        self._incarnations: dict[tuple[str, str], None] = {}
        """The last ``MOST_KNOWN`` agents of the job."""
        self._named = set[str]()
        """Their hosts."""

    def __contains__(self, host: object) -> bool:
        return host in self._present

    def __getitem__(self, host: str) -> Member:
        return self._present[host]

    def hosts(self) -> tuple[str, ...]:
        return tuple(self._present)

    def doubtful(self, silent_s: float) -> list[str]:
        """Hosts with agents disconnected, silent for ``silent_s`` seconds, or reported as
        silent."""
        before = self._clock() - silent_s
        return [host for host, agent in self._present.items() if agent.is_doubtful(before)]

    def add(self, host: str, agent: Member) -> None:
        agent.ready = threading.Condition(self._lock)
        self._present[host] = agent
        self._released.pop(host, None)

    def name(self, host: str, incarnation: str, store: StoreIdentity | None) -> None:
        """Record the identity of a host's agent."""
        agent = self._present[host]
        agent.incarnation, agent.store = incarnation, store
        self._incarnations[host, incarnation] = None
        if len(self._incarnations) > MOST_KNOWN:
            self._incarnations = dict.fromkeys(list(self._incarnations)[-MOST_KNOWN // 2 :])
            self._named = {name for name, _ in self._incarnations} | set(self._present)
        self._named.add(host)

    def has_had(self, host: str, incarnation: str) -> bool:
        """Whether this agent is or was in the job."""
        return (host, incarnation) in self._incarnations

    def has_had_host(self, host: str) -> bool:
        """Whether an agent of this host is or was in the job."""
        return host in self._named

    @contextmanager
    def in_hand(self, host: str, incarnation: str, peer: Peer) -> Iterator[None]:
        """Mark an agent's call as in work until the end of the block. Needs no lock."""
        there = (self._present.get(host), self._released.get(host))
        callers = [a for a in there if a is not None and a.incarnation == incarnation]
        for agent in callers:
            agent.heard(peer)
        try:
            yield
        finally:
            for agent in callers:
                agent.answered(peer)

    def find(self, host: str, incarnation: str) -> Member:
        """A present or just released agent of the job.

        Raises:
            StaleError: Another incarnation of the host is in the job, or none.
            ReplacedError: It was in the job under another coordinator.
        """
        for agent in (self._present.get(host), self._released.get(host)):
            if agent is not None and agent.incarnation == incarnation:
                return agent
        if not self.has_had(host, incarnation):
            raise ReplacedError(f"this is coordinator {self.term} of the job: join it.")
        if host in self._present:
            raise StaleError(f"host {host!r} is in the job with another agent, which replaced it.")
        raise StaleError(f"host {host!r} is not in the job (any more).")

    def release(self, host: str) -> None:
        """Take an agent out of the job; it may still fetch its commands."""
        agent = self._released[host] = self._present.pop(host)
        self._left.add(agent.address[0])

    def has_left(self, machine: str) -> bool:
        """Whether agents of a machine were released and know it, and none is in the job."""
        return machine in self._left and all(each.address[0] != machine for each in self._all())

    def remove(self, host: str) -> None:
        """Take an agent out of the job, and wake up threads that wait for its commands."""
        agent = self._present.pop(host)
        if agent.ready is not None:
            agent.ready.notify_all()

    def unlinked(self, peer: Peer) -> None:
        """Note the end of a connection."""
        for agent in self._all():
            agent.unlinked(peer)

    def pause(self, seconds: float) -> None:
        """Let others have the lock for this time."""
        self._pausing.wait(seconds)

    def excuse(self, seconds: float) -> None:
        """Subtract seconds of silence of all agents: nobody listened."""
        for agent in self._all():
            agent.excuse(seconds)

    def forget_released(self, grace_s: float) -> None:
        """Drop released agents with their exit, or disconnected for too long."""
        self._released = {
            host: agent
            for host, agent in self._released.items()
            if not agent.is_dismissed and (agent.unlinked_s() or 0.0) <= grace_s
        }

    def __len__(self) -> int:
        return len(self._present)

    def newest(self) -> int:
        """Furthest step of any worker."""
        return max((agent.newest for agent in self._present.values()), default=0)

    def stalled(self) -> dict[str, Stalled]:
        """Workers without steps, by host."""
        return {host: agent.stalled for host, agent in self._present.items() if agent.stalled}

    def unanswered(self) -> list[str]:
        """Hosts with unfetched commands."""
        everyone = (*self._present.items(), *self._released.items())
        return [host for host, agent in everyone if agent.has_commands]

    def command(self, hosts: Iterable[str], command: Command) -> None:
        """Queue a command for these hosts, as far as they are in the job."""
        for host in hosts:
            if host in self._present:
                self._present[host].command(command)

    def _all(self) -> list[Member]:
        return [*self._present.values(), *self._released.values()]


# ---------------------------------------------------------------------- exit commands


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a job.

    Attributes:
        farewell: Command for every agent.
        finished_step: Step of the script's end; None: no end.
        is_crash: By a fault of the coordinator.
    """

    farewell: Exit
    finished_step: int | None = None
    is_crash: bool = False


def job_end(
    code: int, reason: str, *, round: int, finished_step: int | None, newest: Generation | None
) -> JobEnd:
    """The end of a job.

    Args:
        reason: Reason for the agents' logs.
        round: Last round; 0: the job has not begun.
        finished_step: Step of the script's end.
        newest: Newest generation.
    """
    ending = None
    if finished_step is not None:
        ending = Ending(finished_step, newest.number if newest else None)
    return JobEnd(Exit(code, reason, keeps_state(code, round), ending), finished_step)


def keeps_state(code: int, round: int) -> bool:
    """Whether an exiting agent keeps its store: a job that has not begun did not make it, and a
    failed job may be resumed."""
    return round == 0 or code not in (0, RESUMABLE)


def drained(members: Members, host: str, leaving: Collection[str], own: str, *, stays: bool) -> str:
    """Exit reason of a draining host.

    Args:
        members: The job's hosts.
        host: The draining host.
        leaving: All draining hosts.
        own: Address of the coordinator's machine.
        stays: No other machine can have the next coordinator.
    """
    behind = ""
    if stays and members[host].address[0] == own:
        behind = _left_behind(members, leaving, own)
    return f"drained: the job goes on without this host{behind}"


def _left_behind(members: Members, leaving: Collection[str], own: str) -> str:
    """Warning for a coordinator on a draining machine; "": a host stays there, or none stays at
    all."""
    staying = [name for name in members.hosts() if name not in leaving]
    if not staying or any(members[name].address[0] == own for name in staying):
        return ""
    return (
        f". Its coordinator stays on this machine ({own}), and no other can have the next one: "
        "keep it up until the job has ended. Where it goes sooner, hosts "
        f"{sorted(staying)} end within [resize] coordinator_timeout_s, exit code 1, and keep "
        f"their state. With a --durable-dir that all hosts reach, or {LEASES}, another host takes "
        "over"
    )
