"""The coordinator: one small process a job, which agents and persons call.

It holds no tensor. Agents call it (``coordinator_calls``); commands to an agent are numbered and
wait until its ``Poll`` says that it has them, and reports of agents are numbered too, so that a
connection that breaks costs nothing. Its host is the one that must not die; any agent may
drain, the first one too.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from scalai.core import events
from scalai.core.commands import Exit
from scalai.core.errors import PeerError, ScalaiError, StaleError, UsageError
from scalai.core.jsonable import Json
from scalai.core.membership import Phase, staying
from scalai.core.messages import JsonText
from scalai.launch.admission import Admission
from scalai.launch.agent_events import AgentEvents
from scalai.launch.coordinator_calls import (
    AgentCall,
    Bye,
    Commands,
    CoordinatorRequest,
    Farewell,
    Join,
    Joined,
    Poll,
    Tell,
)
from scalai.launch.job import JobSpec
from scalai.launch.live_job import LiveJob
from scalai.launch.losses import Losses, Patience
from scalai.launch.person_calls import ReadSpec, Resume, Scale, Status
from scalai.launch.rendezvous_store import RendezvousStores
from scalai.launch.resumption import resume
from scalai.launch.scaling import scale
from scalai.runtime.calls import Address, Peer, Server
from scalai.store.places import check_host

TICK_S = 0.1
FAREWELL_S = 30.0
"""How long the coordinator of a job that has ended waits until every agent has its exit."""
SEND_S = 60.0
"""How long an agent may take to read an answer."""
READS = (Status, ReadSpec, Farewell)
"""Calls that change nothing: where they fail the job is none the worse."""


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
            self._server = Server(
                address, token, CoordinatorRequest, self._handle, self._gone, send_s=SEND_S
            )
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

    def _handle(self, peer: Peer, request: CoordinatorRequest) -> object:
        if request.job not in (None, self._spec.job):
            if isinstance(request, Farewell):
                return None
            raise self._of_another_job(request)
        if isinstance(request, AgentCall):
            # Before any lock: whoever holds it makes no agent seem silent.
            self._live.roster.heard(request.host, request.incarnation)
        if isinstance(request, Join):
            self._stores.wait_ready()  # without the lock, so that it holds up nobody else
        with self._lock:
            try:
                return self._answer(peer, request)
            except ScalaiError:
                raise
            except Exception as error:  # our own slip, and half of a change may be made
                if not isinstance(request, READS):
                    self._live.crash(error)
                raise

    def _of_another_job(self, request: CoordinatorRequest) -> ScalaiError:
        """Return why a call that is meant for another job is refused; an agent of that joins
        anew, and is refused for good."""
        is_member = isinstance(request, AgentCall) and not isinstance(request, Join)
        return (StaleError if is_member else UsageError)(
            f"job {request.job!r} is called, and the coordinator of job {self._spec.job!r} listens "
            "here. Look for that of the other: it may have ended."
        )

    def _answer(self, peer: Peer, request: CoordinatorRequest) -> object:
        match request:
            case Join():
                return self._join(peer, request)
            case Poll():
                return self._poll(peer, request)
            case Tell():
                self._tell(peer, request)
            case Bye(_, host, incarnation):
                self._bye(host, incarnation)
            case Farewell(_, host, incarnation):
                return self._farewell(host, incarnation)
            case Status():
                return JsonText.of(self._status())
            case Scale(nproc, nnodes, degrees, dry_run):
                return JsonText.of(scale(self._live, nproc, nnodes, degrees, dry_run=dry_run))
            case Resume(generation, dry_run):
                return JsonText.of(resume(self._live, generation, dry_run=dry_run))
            case ReadSpec():
                return JsonText.of(self._spec.to_json())
        return None

    def _gone(self, peer: Peer) -> None:
        with self._lock:
            self._live.roster.unlinked(peer)

    def _join(self, peer: Peer, join: Join) -> Joined:
        """Take an agent in, as ``Admission.join``; a second time it changes nothing."""
        roster, host = self._live.roster, join.host
        check_host(host)
        spec = _spec_of(join.spec)
        present = roster[host] if host in roster else None
        if present is not None and present.incarnation == join.incarnation:
            present.linked(peer)
            return self._admission.answer()
        replaces = present is not None and self._losses.is_replaceable(present, join.store)
        answer = self._admission.join(peer, join, spec, replaces=replaces)
        roster.name(host, join.incarnation, join.store)
        return answer

    def _poll(self, peer: Peer, poll: Poll) -> Commands:
        """Return the commands behind those that the agent has, once there are any."""
        roster = self._live.roster
        agent = roster.find(poll.host, poll.incarnation)
        agent.linked(peer)
        agent.acknowledge(poll.received)
        is_present = poll.round == self._live.state.round
        agent.stalled = poll.stalled if is_present else None
        if is_present:
            agent.newest = poll.newest
        assert agent.ready is not None
        if not agent.has_commands and not agent.is_dismissed:
            agent.ready.wait(self._patience.poll_s)
            agent.heard()
            # Unless it was lost or replaced meanwhile.
            agent = roster.find(poll.host, poll.incarnation)
        return agent.waiting()

    def _tell(self, peer: Peer, tell: Tell) -> None:
        """Hear a report once: a number that was heard before is one told again."""
        agent = self._live.roster.find(tell.host, tell.incarnation)
        agent.linked(peer)
        if tell.number > agent.told:
            agent.told = tell.number
            if tell.host in self._live.roster:  # else it was released in between
                self._agent_events.hear(tell.host, tell.report.message)

    def _bye(self, host: str, incarnation: str) -> None:
        """An agent ends by itself: nobody needs to wait for it."""
        self._live.roster.find(host, incarnation)
        if host in self._live.roster:
            self._live.log(f"event=bye host={host}")
            self._live.lose(host)

    def _farewell(self, host: str, incarnation: str) -> Exit | None:
        """Return the command by which a job that has ended ends its agents, None while it goes on:
        an agent that was part of it asks, and is not any more. One that was not (it was part of
        another job that listened here) gets None: the end of this one says nothing of its state.
        """
        live = self._live
        if live.farewell is None or not live.roster.has_had(host, incarnation):
            return None
        live.log(f"event=farewell host={host}: it was cut off, and learns that the job is over")
        return live.farewell

    def _status(self) -> Json:
        job, reports = self._live.state, self._live.timeline.reports
        stalled = self._live.roster.stalled()
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
            "no_progress": {host: asdict(each) for host, each in stalled.items()},
            "held": dict(job.held) if job.phase is Phase.PREPARING else {},
            "restarts_left": job.failures_left,
            "waiting_hosts": {h: round(until - job.now) for h, until in job.barred.items()},
            "failed_changes": [f"{f.assignment.degrees}: {f.reason}" for f in job.failed],
            "last_resize": reports[-1] if reports else None,
        }


def _spec_of(text: JsonText) -> JobSpec:
    """Return the job that an agent's command line states. Raises ``UsageError`` where it is
    none."""
    try:
        return JobSpec.from_json(text.value())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ScalaiError):
            raise
        raise UsageError(f"an agent brings no job: {error!r}. Do the versions differ?") from error
