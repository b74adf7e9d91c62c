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
ROUNDS = 4
"""Most questions again, without the growth of jobs that it does not pay: others may take it."""


def steady(policy: Policy) -> Policy:
    """Return a policy that answers as ``policy``, but for running jobs.

    A running job keeps its least devices: no engine takes a training back. It grows only if its
    last change is long past and the gain pays the standstill. It shrinks only if others need its
    devices, or if it is faster then. Where devices are lost, all of this gives way to their number.
    """

    def answer(question: Question, memory: Memory) -> Answer:
        found, asked = policy(question, memory), question
        for _ in range(ROUNDS):
            kept = {
                job.name
                for job in asked.jobs
                if 0 < job.devices < found.devices.get(job.name, 0)
                and not _pays(job, found.devices[job.name])
            }
            if not kept:
                break
            jobs = tuple(_no_larger(job) if job.name in kept else job for job in asked.jobs)
            asked = replace(asked, jobs=jobs)
            found = policy(asked, memory)
        given = _kept(question, found.devices)
        return Answer({name: count for name, count in given.items() if count}, found.memory)

    return answer


def _no_larger(job: ClusterJob) -> ClusterJob:
    least, _ = job.limits.devices
    limits = replace(job.limits, devices=(min(least, job.devices), job.devices))
    return replace(job, limits=limits, rates=job.rates[: job.devices + 1])


def _kept(question: Question, wanted: Mapping[str, int]) -> dict[str, int]:
    jobs = {job.name: job for job in question.jobs}
    # In the policy's order: the first are placed first.
    order = sorted(jobs, key=lambda name: list(wanted).index(name) if name in wanted else len(jobs))
    found = {name: _clamped(jobs[name], wanted.get(name, 0)) for name in order}

    def over() -> int:
        return sum(found.values()) - question.devices

    def running(is_so: str) -> list[ClusterJob]:
        return [
            job
            for name, job in jobs.items()
            if job.devices
            and (found[name] > job.devices if is_so == "grows" else found[name] < job.devices)
        ]

    for job in running("grows"):
        if not _pays(job, found[job.name]):
            found[job.name] = job.devices
    for job in sorted(running("grows"), key=lambda job: job.devices - found[job.name]):
        if over() > 0:
            found[job.name] = job.devices
    for job in reversed(question.jobs):
        if over() > 0 and not job.devices:
            found[job.name] = 0
    while over() > 0 and (smaller := _smaller(question, found)) is not None:
        found[smaller[0]] = smaller[1]
    for job in sorted(running("shrinks"), key=lambda job: job.standing.since_s):
        freed = job.devices - found[job.name]
        if over() + freed <= 0 and not _is_faster(job, found[job.name]):
            found[job.name] = job.devices
    return found


def _clamped(job: ClusterJob, wanted: int) -> int:
    if not job.devices or wanted >= job.limits.devices[0]:
        return wanted
    return min(_valid_below(job, job.devices), default=job.devices)


def _valid_below(job: ClusterJob, devices: int) -> list[int]:
    """Sizes below ``devices`` that the job can have."""
    valid = np.flatnonzero(job.rates > 0) if len(job.rates) else np.arange(devices)
    return [int(size) for size in valid if job.limits.devices[0] <= size < devices]


def _rate(job: ClusterJob, devices: int) -> float:
    return float(job.rates[devices]) if devices < len(job.rates) else 0.0


def _pays(job: ClusterJob, devices: int) -> bool:
    if job.standing.since_s < job.pause_s / SHARE:
        return False
    now = _rate(job, job.devices)
    return not now or _rate(job, devices) > now * (1 + job.pause_s / STAY_S)


def _is_faster(job: ClusterJob, devices: int) -> bool:
    return _rate(job, devices) > _rate(job, job.devices) * (1 + job.pause_s / STAY_S)


def _smaller(question: Question, found: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the next job to shrink, with its next smaller size: the least priority, then the most
    devices; None: all have their least."""
    for job in sorted(question.jobs, key=lambda job: (job.priority, -found[job.name])):
        if below := _valid_below(job, found[job.name]):
            return job.name, below[-1]
    return None
