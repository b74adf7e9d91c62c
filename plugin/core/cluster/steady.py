"""A policy's answer for jobs that run: none loses its last devices, and a change by choice is worth
its standstill."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from scalai.core.cluster.question import Answer, ClusterJob, Memory, Policy, Question

SHARE = 0.05
"""Most of a job's time that changes by choice may cost."""
STAY_S = 240.0
"""Seconds over which a gain must pay the standstill."""
NEAR = 1 / 3
"""Part of a gain that lies within the noise of a live job's measured steps: a tenth of each step is
so much of the gain from one device to two."""
ROUNDS = 4
"""Most questions: each further one is without the growth that does not pay, so that others may take
it."""


def steady(policy: Policy) -> Policy:
    """Return a policy that answers as ``policy``, but for running jobs.

    A running job keeps its least devices: no engine takes a training back. It grows only if its
    last change is long past and the gain pays the standstill. It shrinks only if others need its
    devices, or if it is faster then. Where devices are lost, all of this gives way to their number.
    Among nearly equal gains the job with fewer devices grows, then the older one.
    """

    def answer(question: Question, memory: Memory) -> Answer:
        question = replace(question, near=NEAR)
        for _ in range(ROUNDS):
            found = policy(question, memory)
            unpaid = {
                job.name
                for job in question.jobs
                if 0 < job.devices < _allowed(job, found.devices) and not _pays(job, found.devices)
            }
            if not unpaid:
                break
            jobs = tuple(_no_larger(job) if job.name in unpaid else job for job in question.jobs)
            question = replace(question, jobs=jobs)
        given = _kept(question, found.devices)
        return Answer({name: count for name, count in given.items() if count}, found.memory)

    return answer


def _no_larger(job: ClusterJob) -> ClusterJob:
    least, _ = job.allowed
    allowed = min(least, job.devices), job.devices
    return replace(job, allowed=allowed, rates=job.rates[: job.devices + 1])


def _allowed(job: ClusterJob, wanted: Mapping[str, int]) -> int:
    """Devices that a policy gives a job. One that serves as asked does not look at its limits and
    sizes: then the next smaller size that the job can have, else its least."""
    devices = min(wanted.get(job.name, 0), job.allowed[1])
    if devices in (0, job.devices) or not len(job.rates) or _rate(job, devices) > 0:
        return devices
    below = _valid_below(job, devices)
    return below[-1] if below else min(_valid_below(job, job.allowed[1] + 1), default=0)


def _kept(question: Question, wanted: Mapping[str, int]) -> dict[str, int]:
    jobs = {job.name: job for job in question.jobs}
    # In the policy's order: the first are placed first.
    order = sorted(jobs, key=lambda name: list(wanted).index(name) if name in wanted else len(jobs))
    found = {name: _at_least(jobs[name], _allowed(jobs[name], wanted)) for name in order}
    running = [job for job in question.jobs if job.devices]

    def over() -> int:
        return sum(found.values()) - question.devices

    for job in sorted(running, key=lambda job: job.devices - found[job.name]):
        if over() > 0 and found[job.name] > job.devices:
            found[job.name] = job.devices
    for job in reversed(question.jobs):
        if over() > 0 and not job.devices:
            found[job.name] = 0
    while over() > 0 and (smaller := _smaller(question, found)) is not None:
        found[smaller[0]] = smaller[1]
    for job in sorted(running, key=lambda job: job.standing.since_s):
        shrinks = job.devices - found[job.name]
        if shrinks > 0 and over() + shrinks <= 0 and not _gains(job, found[job.name]):
            found[job.name] = job.devices
    return found


def _at_least(job: ClusterJob, wanted: int) -> int:
    if not job.devices or wanted >= job.allowed[0]:
        return wanted
    return min(_valid_below(job, job.devices), default=job.devices)


def _valid_below(job: ClusterJob, devices: int) -> list[int]:
    """Sizes below ``devices`` that the job can have."""
    return [int(size) for size in np.flatnonzero(job.rates > 0) if job.allowed[0] <= size < devices]


def _rate(job: ClusterJob, devices: int) -> float:
    return float(job.rates[devices]) if devices < len(job.rates) else 0.0


def _pays(job: ClusterJob, wanted: Mapping[str, int]) -> bool:
    return job.standing.since_s >= job.pause_s / SHARE and _gains(job, _allowed(job, wanted))


def _gains(job: ClusterJob, devices: int) -> bool:
    """Whether a job is faster with so many devices, by more than the standstill takes."""
    return _rate(job, devices) > _rate(job, job.devices) * (1 + job.pause_s / STAY_S)


def _smaller(question: Question, found: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the next job to shrink, with its next smaller size: the least priority, then the most
    devices; None: all have their least."""
    for job in sorted(question.jobs, key=lambda job: (job.priority, -found[job.name])):
        if below := _valid_below(job, found[job.name]):
            return job.name, below[-1]
    return None
