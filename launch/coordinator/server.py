"""The coordinator: one small process per job, called by agents and persons.

It holds no tensor. Its answers are in ``launch.coordinator.desk``. After its loss another one takes
its place (``launch.coordinator.next_coordinator``); any agent may drain, the first one too.
"""

import math
import signal
import time
from collections.abc import Callable
from typing import Literal

from scalai.core.errors import PeerError, RefusedError
from scalai.core.exit_codes import RESUMABLE
from scalai.core.job.membership import Phase
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.calls import CoordinatorRequest
from scalai.launch.coordinator.desk import Desk
from scalai.launch.coordinator.leases import HELD_S, Lease
from scalai.launch.coordinator.live_job import SayLine
from scalai.launch.coordinator.losses import Patience, PortProbe
from scalai.launch.coordinator.registers import NO_LEASE
from scalai.launch.coordinator.rendezvous_store import RendezvousStores
from scalai.launch.coordinator.watch import JobReaders
from scalai.launch.host_signals import HeardSignals
from scalai.runtime.calls import Address, Server

FAREWELL_S = 30.0
"""Longest wait of an ended job's coordinator for agents to fetch their exit, in seconds."""
STOOD_DOWN = 4
"""Exit code of a coordinator that has lost its lease."""
SUPERSEDED = (
    "This run ends, and its newest snapshots stay in the stores of its hosts. Do not start it "
    "again while that run lives"
)
SEND_S = 60.0
"""Time for an agent to read an answer, in seconds."""


class Coordinator(Desk):
    """A desk that listens.

    Args:
        spec: The job; agents with another one are refused.
        address: (interface, port) to listen at; port 0: a free one.
        token: The job's secret; callers without it are not heard.
        alone_s: Wait for a first or another agent before it ends, in seconds.
        patience: Waits for absent agents.
        stores: Rendezvous stores; None: a process of its own.
        probe: As in ``Desk``.
    """

    def __init__(
        self,
        spec: JobSpec,
        address: tuple[str, int],
        token: bytes,
        say: SayLine,
        alone_s: float = 60.0,
        patience: Patience = Patience(),  # noqa: B008  # it is frozen
        stores: RendezvousStores | None = None,
        term: int = 1,
        *,
        is_successor: bool = False,
        probe: PortProbe | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stores = stores or RendezvousStores(address[0], say, ports=spec.ports)
        super().__init__(
            spec, address[0], stores, say, patience, term,
            is_successor=is_successor, probe=probe, clock=clock,
        )  # fmt: skip
        self._alone_s, self._alone_since = alone_s, clock()
        self._ended_at: float | None = None
        """Time of the job's end."""
        self.lease: Lease | None = None
        """Lease of the job's coordinator; None: no other machine can have it."""
        self.watch: JobReaders | None = None
        """Readers of what happens; None: only the log."""
        self.heard: HeardSignals | None = None
        """Signals to this process."""
        self.ended_by = ""
        """Reason of the job's end."""
        self._left_with: int | None = None
        """Exit code after a time without agents; None: the job's."""
        self._told = ""
        """Received signal; it ends the coordinator once no agents are left."""
        self.owns: Lease | None = None
        """Lease of the durable directory; None: no directory."""
        self._has_hung = False
        """The lease's register has not answered."""
        self._to_come = frozenset[str]()
        """Hosts of the round to adopt."""
        try:
            self._server = Server(
                address, token, CoordinatorRequest, self.handle, self.gone, send_s=SEND_S,
                ports=spec.ports,
                refused=lambda client, why: self.note_refusal(client, "to connect", why),
            )  # fmt: skip
        except PeerError:
            self._stores.end()
            raise
        self.live.machine = str(self._server.address[0])  # the command line may have a name

    def may_retire(self) -> bool:
        return self.owns is None or self.owns.is_fresh()

    def is_alone(self) -> bool:
        return self.lease is None

    @property
    def term(self) -> int:
        """Number of coordinators of the job so far."""
        return self.live.members.term

    def run_name(self) -> str:
        """Name of the job's run; "" until agents of a lost coordinator have brought it. Any thread
        may call it."""
        return "" if self.live.state.takeover.pending is not None else self.live.run

    @property
    def address(self) -> Address:
        return self._server.address

    def run(self) -> int:
        """Serve until the job has ended and every agent has its exit, or no agent came for
        ``alone_s`` seconds. Returns the job's exit code."""
        while (code := self.look()) is None:
            time.sleep(self.tick_s())
        return code

    def look(self) -> int | None:
        """Do everything due. Called every ``tick_s``; returns the exit code at the end."""
        with self.lock:
            if not self._has_place():
                return STOOD_DOWN
            self.tick()
            if self.watch is not None:
                self.watch.see(self.live)
            self._hear()
            if self._hands_over():
                return STOOD_DOWN
            if not self._is_done():
                return None
        self._server.close()
        self._stores.end()
        if self.lease is not None:
            self.lease.end(is_over=self.live.has_ended)
        if self.owns is not None and self.owns is not self.lease:
            self.owns.end(is_over=True)
        return self.live.exit_code if self._left_with is None else self._left_with

    def _has_place(self) -> bool:
        """Whether this coordinator still has its leases; without one it stands down. A run
        superseded by another one ends its job."""
        live = self.live
        self._note_missing()
        if self.owns is not None and self.owns.is_superseded and not live.has_ended:
            why = f"--durable-dir is not held: {self.owns.problem}"
            if not self.owns.has_another_run:
                return self._stand_down(why)
            live.end(RefusedError.exit_code, f"{why} {SUPERSEDED}")
        if self.lease is not None and not live.has_ended and not self._holds(self.lease):
            return self._stand_down(f"the lease is not held: {self.lease.problem}")
        return True

    def _is_done(self) -> bool:
        """Whether the job's end is told to everyone, or no agent came for too long."""
        live, now = self.live, self.live.clock()
        if live.has_ended:
            self._ended_at = self._ended_at or now
            if self._is_farewell_over(now - self._ended_at):
                self.ended_by = live.farewell.reason if live.farewell else ""
                return True
        if live.members.hosts():
            self._alone_since = now
        elif self._told and not live.has_ended:
            return self._leave(RESUMABLE, f"{self._told}, and no agent is in the job")
        elif now - self._alone_since > self._alone_s:
            return self._leave(1, f"no agent for {self._alone_s:.0f} s")
        return False

    def _hear(self) -> None:
        """Handle a signal. The coordinator stays for its agents: their own signals are drains, and
        end the job or leave it to the others."""
        number = None if self.heard is None else self.heard.next(0.0)
        if number is None:
            return
        self._told, hosts = signal.Signals(number).name, len(self.live.members.hosts())
        if hosts and not self.live.has_ended:
            self.live.log(
                f"event=signal {self._told}: the coordinator stays for {hosts} hosts, and ends "
                "with the last of them. Signal their agents to drain them"
            )

    def _leave(self, code: int, reason: str) -> Literal[True]:
        self._left_with = code
        stays = "what the stores hold stays there: start the same job again"
        self.ended_by = f"{reason}; {stays}"
        self.live.log(f"event=exit code={code} reason={self.ended_by!r}")
        return True

    def _holds(self, lease: Lease) -> bool:
        """Whether nobody else can be the coordinator.

        A hung register costs no coordinator its place: only hosts without this one claim the next
        term. So it stays while it hears all hosts of the time of the register's last answer.
        """
        if lease.is_fresh():
            self._has_hung = False
            return True
        if not lease.is_superseded and self.live.state.takeover.pending is not None:
            return True  # its hosts have yet to come
        members = self.live.members
        silences = [members[host].silence_s() for host in members.hosts()]
        hears_all = max(silences, default=HELD_S) < HELD_S
        has_lost = self.live.lost_at is not None and self.live.lost_at > lease.renewed_at
        if lease.is_superseded or not hears_all or has_lost:
            return False
        if not self._has_hung:
            self._has_hung = True
            self.live.log(
                f"event=lease_hangs {lease.problem} All hosts are heard, so this coordinator "
                "stays. If a host is lost before the register answers, it stands down"
            )
        return True

    def _note_missing(self) -> None:
        """Record a loss if hosts of the adopted round are missing."""
        live, over = self.live, self.live.state.takeover.pending
        if over is not None:
            found = over.of_newest(live.state.hosts).values()
            self._to_come = next((each.members for each in found), self._to_come)
            return
        if self._to_come - set(live.members.hosts()):
            live.note_loss()
        self._to_come = frozenset()

    def _stand_down(self, why: str) -> Literal[False]:
        """End without notice to agents: another coordinator may take this one's place. The
        rendezvous stores live as long as the workers."""
        self.live.log(f"event=stood_down {why} The workers train on.")
        self._server.close()
        return False

    def _hands_over(self) -> bool:
        """Leave the place to another host where this machine's own are drained: it may go at any
        time. Only with a register that a person has named is it known that all hosts reach it, and
        only between changes; a coordinator started by a person stays."""
        live = self.live
        is_named = live.spec.options.coordinator_lease not in (None, NO_LEASE)
        if self.lease is None or not is_named or not self.lease.is_fresh():
            return False
        if live.state.phase is not Phase.RUNNING or live.state.takeover.pending is not None:
            return False
        if self._alone_s == math.inf or not live.members.has_left(live.machine):
            return False
        live.log(
            "event=handed_over This machine's hosts are drained: another host takes this "
            "coordinator's place. The workers train on."
        )
        self._server.close()
        self.lease.end(is_over=False, is_free=True)
        return True

    def close(self) -> None:
        """End before any call."""
        self._server.close()
        self._stores.end()

    def _is_farewell_over(self, took_s: float) -> bool:
        """Whether every agent of an ended job has its exit, or had time for it."""
        late = self.live.members.unanswered()
        if late and took_s > FAREWELL_S:
            self.live.log(f"event=unanswered hosts={late}: they have not fetched their exit")
        return not late or took_s > FAREWELL_S
