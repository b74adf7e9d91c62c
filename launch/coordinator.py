"""The coordinator: one small process a job, which agents and persons call.

It holds no tensor. Agents call it (``join``, ``poll``, ``tell``, ``bye``); commands to an agent are
numbered and wait until its ``poll`` says that it has them, and what agents tell is numbered too, so
that a connection that breaks costs nothing. Its host is the one that must not die; any agent may
drain, the first one too.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from scalai.core import events
from scalai.core.errors import PeerError, ScalaiError, UsageError
from scalai.core.membership import Phase, staying
from scalai.launch.admission import Admission
from scalai.launch.agent_events import AgentEvents
from scalai.launch.job import JobSpec
from scalai.launch.live_job import LiveJob
from scalai.launch.losses import Losses, Patience
from scalai.launch.rendezvous_store import RendezvousStores
from scalai.launch.resumption import resume
from scalai.launch.scaling import scale
from scalai.runtime.arguments import check_arguments
from scalai.runtime.messages import Address, Peer, Server
from scalai.store.places import check_host

TICK_S = 0.1
FAREWELL_S = 30.0
"""How long the coordinator of a job that has ended waits until every agent has its exit."""
SEND_S = 60.0
"""How long an agent may take to read an answer."""
READS = ("status", "spec", "farewell")
"""Calls that change nothing: where they fail the job is none the worse."""
Json = Any


class Coordinator:
    """Membership, generation numbers and the workers' rendezvous store of one job.

    Args:
        spec: What the job is; agents that bring another one are refused.
        address: Where to listen: (interface, port), port 0 for a free one.
        token: The job's secret; who does not have it is not listened to.
        say: Takes log lines.
        alone_s: How long it waits for a first or another agent before it ends.
        patience: How long it waits for agents that are away.
        stores: What workers meet at; a process of its own if not given.
    """

    def __init__(
        self,
        spec: JobSpec,
        address: tuple[str, int],
        token: bytes,
        say: Callable[[str], None],
        alone_s: float = 60.0,
        patience: Patience = Patience(),  # noqa: B008  # it is frozen
        stores: RendezvousStores | None = None,
    ) -> None:
        self._alone_s, self._patience = alone_s, patience
        self._spec = spec
        self._lock = threading.RLock()
        self._stores = stores or RendezvousStores(address[0])
        self._live = LiveJob(spec, address[0], self._stores, say, self._lock)
        self._admission = Admission(spec, self._live)
        self._agent_events = AgentEvents(self._live)
        self._losses = Losses(self._live, patience, TICK_S)
        try:
            self._server = Server(address, token, self._handle, self._gone, send_s=SEND_S)
        except PeerError:
            self._stores.end()
            raise

    @property
    def address(self) -> Address:
        return self._server.address

    def run(self) -> int:
        """Serve until the job has ended and every agent has been told, or until nobody has been
        there for long. Returns the job's exit code."""
        live = self._live
        alone_since, ended_at = time.monotonic(), None
        while True:
            time.sleep(TICK_S)
            with self._lock:
                self._tick()
                now = time.monotonic()
                if live.has_ended:
                    ended_at = ended_at or now
                    if self._is_farewell_over(now - ended_at):
                        break
                if live.roster.hosts():
                    alone_since = now
                elif now - alone_since > self._alone_s:
                    live.exit_code = 1
                    live.log(f"event=exit code=1 reason='no agent for {self._alone_s:.0f} s'")
                    break
        self._server.close()
        self._stores.end()
        return live.exit_code

    def _tick(self) -> None:
        live = self._live
        try:
            self._losses.look()
            live.feed(events.Ticked(time.monotonic(), live.roster.newest()))
        except Exception as error:  # our own slip: agents would wait for a loop that has ended
            live.crash(error)

    def _is_farewell_over(self, took_s: float) -> bool:
        """Whether every agent of a job that has ended has its exit, or had the time for it."""
        late = self._live.roster.unanswered()
        if late and took_s > FAREWELL_S:
            self._live.log(f"event=unanswered hosts={late}: they have not fetched their exit")
        return not late or took_s > FAREWELL_S

    # ------------------------------------------------------------------ calls of agents

    def _handle(self, peer: Peer, method: str, arguments: Mapping[str, Json]) -> Json:
        calls: Mapping[str, Callable[..., Json]] = {
            "join": self._join,
            "poll": self._poll,
            "tell": self._tell,
            "bye": self._bye,
            "farewell": self._farewell,
            "status": self._status,
            "scale": self._scale,
            "resume": self._resume,
            "spec": self._read_spec,
        }
        if method not in calls:
            raise UsageError(f"{method!r} is not a call of the coordinator.")
        # Before any lock: whoever holds it makes no agent seem silent.
        self._live.roster.heard(arguments.get("host"), arguments.get("incarnation"))
        check_arguments(calls[method], {"peer": peer, **arguments}, method)
        if method == "join":
            self._stores.wait_ready()  # without the lock, so that it holds up nobody else
        with self._lock:
            try:
                return calls[method](peer, **arguments)
            except ScalaiError:
                raise
            except Exception as error:  # our own slip, and half of a change may be made
                if method not in READS:
                    self._live.crash(error)
                raise

    def _gone(self, peer: Peer) -> None:
        with self._lock:
            self._live.roster.unlinked(peer)

    def _join(
        self, peer: Peer, host: str, incarnation: str, store: Json, slots: int,
        address: list[Json], parts: list[Json], sealed: list[Json], spec: dict[str, Json],
        damaged: list[tuple[int, str]] | None = None,
    ) -> Json:  # fmt: skip
        """Take an agent in, as ``Admission.join``; a second time it changes nothing.

        Args:
            incarnation: A random name of the agent process's present try to take part.
            store: What tells its store from any other.
        """
        roster = self._live.roster
        check_host(host)
        _check_spec(spec)
        present = roster[host] if host in roster else None
        if present is not None and present.incarnation == incarnation:
            present.linked(peer)
            return self._admission.answer()
        replaces = present is not None and self._losses.is_replaceable(present, store)
        answer = self._admission.join(
            peer, host, slots, address, parts, sealed, spec, damaged or (), replaces=replaces
        )
        roster.name(host, incarnation, store)
        return answer

    def _poll(
        self, peer: Peer, host: str, incarnation: str, received: int, round: int, newest: int,
        stalled: dict[str, Json] | None = None,
    ) -> Json:  # fmt: skip
        """Return the commands behind number ``received``, once there are any.

        Args:
            newest: The furthest step of its workers of this ``round``.
            stalled: Those that make no steps, as of ``ProgressWatch``.
        """
        roster = self._live.roster
        agent = roster.find(host, incarnation)
        agent.linked(peer)
        agent.acknowledge(received)
        is_present = round == self._live.state.round
        agent.stalled = stalled if is_present else None
        if is_present:
            agent.newest = newest
        assert agent.ready is not None
        if not agent.has_commands and not agent.is_dismissed:
            agent.ready.wait(self._patience.poll_s)
            agent.heard()
            agent = roster.find(host, incarnation)  # unless it was lost or replaced meanwhile
        return agent.waiting()

    def _tell(
        self, peer: Peer, host: str, incarnation: str, number: int, event: str,
        facts: dict[str, Json],
    ) -> None:  # fmt: skip
        """Hear an agent's event, once: a number that was heard before is one told again."""
        agent = self._live.roster.find(host, incarnation)
        agent.linked(peer)
        if number > agent.told:
            agent.told = number
            if host in self._live.roster:  # else it was released in between
                self._agent_events.hear(host, event, facts)

    def _bye(self, peer: Peer, host: str, incarnation: str) -> None:
        """An agent ends by itself: nobody needs to wait for it."""
        self._live.roster.find(host, incarnation)
        if host in self._live.roster:
            self._live.log(f"event=bye host={host}")
            self._live.lose(host)

    def _farewell(self, peer: Peer, host: str, incarnation: str) -> Json:
        """Return the command by which a job that has ended ends its agents, None while it goes on:
        an agent that was part of it asks, and is not any more. One that was not (it was part of
        another job that listened here) gets None: the end of this one says nothing of its state.
        """
        live = self._live
        if live.farewell is None or not live.roster.has_had(host, incarnation):
            return None
        live.log(f"event=farewell host={host}: it was cut off, and learns that the job is over")
        return live.farewell

    # ------------------------------------------------------------------ calls of persons

    def _read_spec(self, peer: Peer) -> Json:
        return self._spec.to_json()

    def _status(self, peer: Peer) -> Json:
        job, reports = self._live.state, self._live.timeline.reports
        newest = job.newest_generation
        return {
            "job": self._spec.job,
            "phase": job.phase.value,
            "round": job.round,
            "world_size": job.current.degrees.world_size if job.current else 0,
            "degrees": str(job.current.degrees) if job.current else None,
            "reason": job.current.reason if job.current else None,
            "hosts": {h: {"slots": s} for h, s in staying(job)},
            "workers": dict(job.current.workers) if job.current else {},
            "generation": newest.number if newest else None,
            "generation_step": newest.step if newest else None,
            "step": self._live.roster.newest(),
            "no_progress": self._live.roster.stalled(),
            "held": dict(job.held) if job.phase is Phase.PREPARING else {},
            "restarts_left": job.failures_left,
            "waiting_hosts": {h: round(until - job.now) for h, until in job.barred.items()},
            "failed_changes": [f"{f.assignment.degrees}: {f.reason}" for f in job.failed],
            "last_resize": reports[-1] if reports else None,
        }

    def _resume(self, peer: Peer, generation: int, dry_run: bool) -> Json:
        return resume(self._live, generation, dry_run=dry_run)

    def _scale(
        self, peer: Peer, nproc: int | None, nnodes: int | None, degrees: str | None, dry_run: bool
    ) -> Json:
        return scale(self._live, nproc, nnodes, degrees, dry_run=dry_run)


def _check_spec(spec: dict[str, Json]) -> None:
    """Raise ``UsageError`` where an agent's command line is none."""
    try:
        JobSpec.from_json(spec)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ScalaiError):
            raise
        raise UsageError(f"an agent brings no job: {error!r}. Do the versions differ?") from error
