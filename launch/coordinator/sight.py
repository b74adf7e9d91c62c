"""What gauges show of a job at one moment."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from scalai.core.job.membership import TRAINING, Job, staying
from scalai.core.job.replicating import is_to_be_replicated
from scalai.launch.coordinator.live_job import LiveJob


@dataclass(frozen=True, slots=True)
class JobSight:
    """A job at one moment.

    Attributes:
        at: Seconds of a monotonic clock.
        seconds: Spent so far, by use (``Spending``).
        is_training: Its workers can step.
        step: Furthest step of the present round.
        steps_made: Steps seen so far, repeated ones included.
        step_s: A usual step, in seconds; 0: unknown.
        samples: Samples of a step; None: unknown.
        hosts: Number of hosts by state.
        degrees: Sizes by axis.
        generation_age_s: Since the newest generation was made; None: none, or unknown.
        replicas_behind: Generations newer than the newest with replicas.
        leaving: Names of leaving hosts.
    """

    at: float
    seconds: Mapping[str, float]
    is_training: bool
    round: int
    step: int
    steps_made: int
    step_s: float
    samples: int | None
    workers: int
    idle: int
    hosts: Mapping[str, int]
    hosts_min: int
    hosts_max: int
    degrees: Mapping[str, int]
    generation_age_s: float | None
    generation_bytes: int
    replicas_behind: int
    restarts_left: int
    term: int
    leaving: frozenset[str]


class Lookout:
    """Looks at a job. Callers hold its lock; the time is linear in the number of hosts."""

    def __init__(self, live: LiveJob) -> None:
        self._live = live
        self._known: tuple[object, float | None, int] = (None, None, 0)

    def look(self) -> JobSight:
        live = self._live
        job, active = live.state, live.active()
        leaving = frozenset(name for name, host in job.hosts.items() if host.is_leaving)
        current = job.current
        workers = {name: n for name, n in current.workers if name in job.hosts} if current else {}
        slots = sum(count for _, count in staying(job))
        made, size = self._made()
        return JobSight(
            at=live.clock(),
            seconds=dict(live.spending.seconds),
            is_training=job.phase in TRAINING,
            round=job.round,
            step=job.newest,
            steps_made=live.steps_made,
            step_s=job.change.pace.step_s,
            samples=live.sizing.step_samples,
            workers=sum(workers.values()),
            idle=max(0, slots - sum(n for host, n in workers.items() if host not in leaving)),
            hosts={
                "training": len(active - leaving),
                "spare": len(job.hosts.keys() - active - leaving),
                "draining": len(leaving),
                "lost": len(current.members - job.hosts.keys()) if current else 0,
            },
            hosts_min=live.spec.min_hosts,
            hosts_max=job.settings.max_hosts,
            degrees=current.degrees.to_json() if current else {},
            generation_age_s=None if made is None else max(0.0, time.time() - made),
            generation_bytes=size,
            replicas_behind=_behind(job),
            restarts_left=job.budget.left,
            term=live.members.term,
            leaving=leaving,
        )

    def _made(self) -> tuple[float | None, int]:
        """Time of the newest generation in seconds since 1970, and its bytes on all hosts."""
        newest, held = self._live.state.newest_generation, self._live.generations
        key = None if newest is None else (newest.number, held.holders(newest.number))
        if key != self._known[0]:
            parts = () if key is None or not key[1] else held.parts(key[0]).values()
            times = [part.about.get("time") for part in parts]
            made = max((t for t in times if isinstance(t, int | float)), default=None)
            self._known = key, made, sum(part.size_bytes for part in parts)
        return self._known[1:]


def _behind(job: Job) -> int:
    if not is_to_be_replicated(job):
        return 0
    newest = job.copies.replicated[0] if job.copies.replicated else 0
    return sum(each.number > newest for each in job.states.generations)
