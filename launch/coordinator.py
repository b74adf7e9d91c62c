"""The coordinator: one small process a job, which agents and persons call.

It holds no tensor. Agents call it (``join``, ``poll``, ``tell``); commands to an agent wait in a
queue that its ``poll`` empties. Its host is the one that must not die; any agent may drain, the
first one too.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from scalai.core import events
from scalai.core.errors import UsageError
from scalai.core.membership import Phase, staying
from scalai.launch.admission import Admission
from scalai.launch.agent_events import AgentEvents
from scalai.launch.job import JobSpec
from scalai.launch.live_job import LiveJob
from scalai.runtime.messages import Address, Peer, Server

POLL_S = 1.0
Json = Any


class Coordinator:
    """Membership, generation numbers and the workers' rendezvous store of one job.

    Args:
        spec: What the job is; agents that bring another one are refused.
        address: Where to listen: (interface, port), port 0 for a free one.
        token: The job's secret; who does not have it is not listened to.
        say: Takes log lines.
        alone_s: How long it waits for a first or another agent before it ends.
    """

    def __init__(
        self,
        spec: JobSpec,
        address: tuple[str, int],
        token: bytes,
        say: Callable[[str], None],
        alone_s: float = 60.0,
    ) -> None:
        self._alone_s = alone_s
        self._spec = spec
        self._changed = threading.Condition()
        self._live = LiveJob(spec, address[0], say, self._changed.notify_all)
        self._admission = Admission(spec, self._live)
        self._agent_events = AgentEvents(self._live)
        self._server = Server(address, token, self._handle, self._gone)

    @property
    def address(self) -> Address:
        return self._server.address

    def run(self) -> int:
        """Serve until the job has ended and every agent has been told, or until nobody has been
        there for long. Returns the job's exit code."""
        live = self._live
        alone_since = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait(0.1)
                for host in live.roster.silent():
                    live.lose(host)
                now = time.monotonic()
                live.feed(events.Ticked(now, live.roster.newest()))
                if live.state.phase is Phase.ENDED and not live.roster.has_commands():
                    break
                if live.roster.hosts():
                    alone_since = now
                elif now - alone_since > self._alone_s:
                    live.exit_code = 1
                    live.log(f"event=exit code=1 reason='no agent for {self._alone_s:.0f} s'")
                    break
        time.sleep(0.2)  # the last answers are on their way
        self._server.close()
        return live.exit_code

    # ------------------------------------------------------------------ calls of agents

    def _handle(self, peer: Peer, method: str, arguments: Mapping[str, Json]) -> Json:
        calls: Mapping[str, Callable[..., Json]] = {
            "join": self._admission.join,
            "poll": self._poll,
            "tell": self._tell,
            "status": self._status,
            "scale": self._scale,
            "spec": self._read_spec,
        }
        if method not in calls:
            raise UsageError(f"{method!r} is not a call of the coordinator.")
        with self._changed:
            answer = calls[method](peer, **arguments)
            self._changed.notify_all()
        return answer

    def _gone(self, peer: Peer) -> None:
        with self._changed:
            for host in self._live.roster.left(peer):
                self._live.lose(host)
            self._changed.notify_all()

    def _poll(self, peer: Peer, host: str, round: int, newest: int) -> Json:
        agent = self._live.roster.find(host)
        if agent is None:
            raise UsageError(f"host {host!r} is not in the job (any more).")
        agent.heard()
        if round == self._live.state.round:
            agent.newest = newest
        if not agent.has_commands:
            self._changed.wait(POLL_S)
        agent.heard()
        return agent.take()

    def _tell(self, peer: Peer, host: str, event: str, **facts: Json) -> Json:
        if host in self._live.roster:  # else it was released or lost in between
            self._agent_events.hear(host, event, facts)

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
            "restarts_left": job.failures_left,
            "last_resize": reports[-1] if reports else None,
        }

    def _scale(
        self, peer: Peer, nproc: int | None, nnodes: int | None, degrees: str | None, dry_run: bool
    ) -> Json:
        live, current = self._live, self._live.state.current
        assign = live.sizing.scaled(nproc, nnodes, degrees)
        hosts = staying(live.state)
        target = assign(hosts, current.degrees if current else None)
        if target is None:
            raise UsageError(
                f"no valid degrees for --nproc {nproc} --nnodes {nnodes} --degrees {degrees} on "
                f"the hosts {dict(hosts)}. Run scalai-run --check-elastic for the worlds that are "
                "valid."
            )
        if not dry_run:
            live.sizing.rescale(nproc, nnodes, degrees)
            live.timeline.begin("scale")
            live.feed(events.Rescaled(live.sizing.assign(), time.monotonic(), nnodes))
        return {
            "degrees": str(target.degrees),
            "workers": dict(target.workers),
            "reason": target.reason,
        }
