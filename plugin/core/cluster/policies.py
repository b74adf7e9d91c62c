"""Policies by name. Each is a pure function of the question and its own memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from scalai.core.cluster.allotting import allot, sizes_of
from scalai.core.cluster.question import Answer, ClusterJob, Floats, Memory, Question


@dataclass(frozen=True, slots=True)
class Taste:
    """Constants of policies that weigh jobs by their remaining work.

    Attributes:
        elasticity: Supposed exponent of the speed by devices, below 1: the nearer to 1, the more
            the shortest job gets.
        stay_s: Time over which the standstill of a change is written off.
    """

    elasticity: float = 0.75
    stay_s: float = 240.0
    keep: float = 0.05


def shortest(question: Question, memory: Memory, taste: Taste = Taste()) -> Answer:
    """Serve the least remaining work most: weights of heSRPT, with each job's own speeds.

    Source:
        heSRPT (Berg, Vesilo, Harchol-Balter, 2020), the optimal shares of jobs with one speed
        curve; differs in: the weights behind these shares meet each job's predicted speeds.
    """
    works = [_work(job) for job in question.jobs]
    return _weighted(question, works, taste)


def goodput(question: Question, memory: Memory, taste: Taste = Taste()) -> Answer:
    """As ``shortest``, blind: a job's remaining work is expected to equal what it has done.

    The measure is Pollux's goodput: throughput times statistical efficiency.
    """
    works = [_attained(job) for job in question.jobs]
    return _weighted(question, works, taste)


def _work(job: ClusterJob) -> float:
    """Return the remaining seconds on one device; 0: it has not run, or does not say."""
    alone = _alone(job)
    if job.remaining is None or not job.standing.ran_s:
        return 0.0
    return job.remaining / alone


def _attained(job: ClusterJob) -> float:
    return job.done / _alone(job) if job.standing.ran_s else 0.0


def _alone(job: ClusterJob) -> float:
    """Return progress a second at the smallest size, spread over its devices."""
    least = job.limits.devices[0]
    return float(job.rates[least]) / least


def _weighted(question: Question, works: Sequence[float], taste: Taste) -> Answer:
    jobs = question.jobs
    order = sorted(range(len(jobs)), key=lambda at: (-works[at], -jobs[at].submitted_s))
    power = 1 / (1 - taste.elasticity)
    sizes = sizes_of(max((job.limits.devices[1] for job in jobs), default=0), question.per_host)
    worths: list[Floats] = [np.zeros(0)] * len(jobs)
    for rank, at in enumerate(order, 1):
        weight = (rank**power - (rank - 1) ** power) ** (1 / power)
        worths[at] = jobs[at].priority * weight * _speedups(jobs[at], sizes, question, taste)
    given = allot(worths, sizes, question.devices)
    by_size = sorted(range(len(jobs)), key=lambda at: -given[at])
    return Answer({jobs[at].name: given[at] for at in by_size if given[at]})


def _speedups(job: ClusterJob, sizes: Sequence[int], question: Question, taste: Taste) -> Floats:
    """Return the speed at each size over one device, less the standstill of a change."""
    speeds = np.full(len(sizes) + 1, -np.inf)
    speeds[0] = 0.0
    most = len(job.rates) - 1
    if not job.standing.ran_s:
        # Nothing is measured yet: one host at most.
        most = min(most, question.per_host)
    alone = _alone(job)
    least = job.limits.devices[0]
    lost = min(job.pause_s / taste.stay_s, 1.0)
    for place, size in enumerate(sizes, 1):
        if not least <= size <= most:
            continue
        speed = float(job.rates[size]) / alone
        speeds[place] = speed * (1 - lost) if size != job.devices else speed * (1 + taste.keep)
    return speeds
