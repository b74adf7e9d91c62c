"""Who may join a job, and with which state."""

import time
from collections.abc import Iterable
from typing import Any

from scalai.core import events
from scalai.core.errors import UsageError
from scalai.core.membership import Phase
from scalai.launch.job import JobSpec
from scalai.launch.live_job import LiveJob
from scalai.launch.roster import Agent
from scalai.runtime.messages import Peer
from scalai.store.manifest import HostManifest, manifest_from_message

Json = Any


class Admission:
    """Lets agents in with what their stores hold, or refuses them.

    Args:
        spec: What the job is; agents that bring another one are refused.
        live: The job.
    """

    def __init__(self, spec: JobSpec, live: LiveJob) -> None:
        self._spec, self._live = spec, live

    def join(
        self, peer: Peer, host: str, slots: int, address: list[Json], parts: list[Json],
        sealed: list[Json], spec: Json,
    ) -> Json:  # fmt: skip
        """Take an agent in.

        Args:
            address: Where its data plane listens: interface, port.
            parts: Manifests of the committed generations in its store.
            sealed: Manifests of what is sealed there and not committed.
            spec: The job as the agent's command line states it.

        Raises:
            UsageError: It may not join; says why, and what to do.
        """
        self._check(host, spec)
        live = self._live
        manifests = [manifest_from_message(part, host) for part in parts]
        obsolete = [part.generation for part in manifests if self._is_obsolete(part)]
        live.roster.add(host, Agent(peer, (str(address[0]), int(address[1]))))
        live.timeline.begin(f"host {host} joined")
        live.count_from(max((part.generation for part in manifests), default=0))
        live.log(f"event=join host={host} slots={slots}")
        for part in manifests:
            live.sizing.learn(part.about)
            if part.generation in obsolete or not live.generations.add(part):
                live.command([host], command="drop", generation=part.generation)
                manifests = [kept for kept in manifests if kept is not part]
        self._take_sealed([manifest_from_message(part, host) for part in sealed])
        live.limit()
        covered = live.generations.covered()
        has_parts = bool(manifests or covered)
        live.feed(events.HostJoined(host, slots, covered, has_parts, time.monotonic()))
        return {"round": live.state.round}

    def _check(self, host: str, spec: Json) -> None:
        if host in self._live.roster:
            raise UsageError(
                f"an agent of host {host!r} is already in job {self._spec.job!r}. "
                "Give this one another --host-id, or stop the other."
            )
        difference = self._spec.difference(JobSpec.from_json(spec))
        if difference:
            raise UsageError(
                f"this agent brings another job: {difference}. Start all agents alike."
            )
        if self._live.state.phase is Phase.ENDED:
            raise UsageError(f"job {self._spec.job!r} has ended. Start it anew.")

    def _is_obsolete(self, part: HostManifest) -> bool:
        """Whether a joining host's part is of a state that the job has passed.

        Raises:
            UsageError: It is of another run of the job, and further than this one.
        """
        job, generations = self._live.state, self._live.generations
        newest = job.newest_generation
        if generations.is_known(part) or (job.round == 0 and not generations.is_foreign(part)):
            return False
        if newest is not None and part.step <= newest.step:
            return True
        raise UsageError(
            f"host {part.host!r} holds generation {part.generation} of step {part.step} of another "
            f"run of job {self._spec.job!r}; this run has begun without it"
            f"{f' and is at step {newest.step}' if newest else ''}. To go on from that state, stop "
            "this run and start all hosts together; to give it up, run scalai clean on that host."
        )

    def _take_sealed(self, sealed: Iterable[HostManifest]) -> None:
        """A host that comes back may bring what it had sealed, and not committed, when it died."""
        live = self._live
        for part in sealed:
            live.generations.deposit(part)
        for late, name, number in live.generations.late():
            live.command([late], command="commit", generation=number, deposit=name)
        is_waiting = live.state.phase is Phase.WAITING
        found = live.generations.whole_deposit() if is_waiting else None
        if found is not None:
            number = live.commit(found)
            live.log(f"event=recovered committed={number}")
            hosts = live.generations.parts(number)
            live.command(hosts, command="commit", generation=number, deposit=found)
