"""Policies to compare with: first come first served, sizes as asked, Tiresias, Optimus."""

from collections.abc import Sequence

import numpy as np

from scalai.core.cluster.question import Answer, ClusterJob, Memory, Question

TIRESIAS_SERVICE_S = 16 * 3600
"""Device-seconds after which Tiresias puts a job behind the others."""


def in_order(jobs: Sequence[ClusterJob], devices: int) -> dict[str, int]:
    """Give each job its asked devices in turn, all at most, and pass over those that do not fit."""
    given, left = dict[str, int](), devices
    for job in jobs:
        size = min(job.asked, devices)
        if size <= left:
            given[job.name] = size
            left -= size
    return given


def until_blocked(jobs: Sequence[ClusterJob], devices: int) -> dict[str, int]:
    """Give each job its asked devices in turn, all at most, until one does not fit."""
    given, left = dict[str, int](), devices
    for job in jobs:
        size = min(job.asked, devices)
        if size > left:
            break
        given[job.name] = size
        left -= size
    return given


def fifo(question: Question, memory: Memory) -> Answer:
    """Serve jobs as asked, in order of submission, to the end; the next one waits for room."""
    jobs = sorted(question.jobs, key=lambda job: (not job.devices, job.submitted_s))
    return Answer(until_blocked(jobs, question.devices))


def fixed(question: Question, memory: Memory) -> Answer:
    """Serve jobs as asked, to the end, in order of submission; smaller ones fill the gaps."""
    jobs = sorted(question.jobs, key=lambda job: (not job.devices, job.submitted_s))
    return Answer(in_order(jobs, question.devices))


def tiresias(question: Question, memory: Memory) -> Answer:
    """Serve jobs as asked; those with much service wait behind the others, and lose their devices.

    Source:
        Tiresias (Gu et al., NSDI 2019), section 3.2, discretized two-dimensional least attained
        service; differs in: two queues, without promotion, as the runs of Pollux had it.
    """
    late = dict(memory)
    for job in question.jobs:
        service = job.standing.ran_s * job.asked
        if job.name not in late and service >= TIRESIAS_SERVICE_S:
            late[job.name] = question.now_s
    order = {job.name: place for place, job in enumerate(question.jobs)}
    jobs = sorted(
        question.jobs, key=lambda job: (job.name in late, late.get(job.name, 0.0), order[job.name])
    )
    return Answer(in_order(jobs, question.devices), {n: t for n, t in late.items() if n in order})


def optimus(question: Question, memory: Memory) -> Answer:
    """Give its least devices to each job, and each further one where it saves the most time.

    Source:
        Optimus (Peng et al., EuroSys 2018), section 4.1, "marginal gain"; differs in: workers
        alone, without parameter servers, as the runs of Pollux had it.
    """
    left = question.devices
    sizes: dict[str, int] = {}
    steps: dict[str, tuple[int, float]] = {}
    jobs = {job.name: job for job in question.jobs}
    for job in question.jobs:
        least = _more(job, 0) or 1
        sizes[job.name] = least if least <= left else 0
        left -= sizes[job.name]
        if sizes[job.name]:
            steps[job.name] = _step(job, least)
    while fitting := {n: gain for n, (more, gain) in steps.items() if gain > 0 and more <= left}:
        name = max(fitting, key=lambda name: fitting[name])
        sizes[name] += steps[name][0]
        left -= steps[name][0]
        steps[name] = _step(jobs[name], sizes[name])
    # The smallest are placed first.
    return Answer({name: sizes[name] for name in sorted(sizes, key=lambda name: sizes[name])})


def _more(job: ClusterJob, devices: int) -> int:
    """Return the devices that the next larger size with a rate has more; 0: there is none."""
    larger = np.flatnonzero(job.rates[devices + 1 :] > 0)
    return int(larger[0]) + 1 if len(larger) else 0


def _step(job: ClusterJob, devices: int) -> tuple[int, float]:
    """Return the devices more of the next larger size, and the seconds that each of them saves
    until the job's end."""
    assert job.remaining is not None, "Optimus knows each job's remaining work"
    if not (more := _more(job, devices)):
        return 0, 0.0
    saved = float(1 / job.rates[devices] - 1 / job.rates[devices + more])
    return more, job.remaining * saved / more
