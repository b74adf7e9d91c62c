"""Policies by name. Each is a pure function of the question and its own memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalai.core.cluster.allotting import allot, settle, sizes_of
from scalai.core.cluster.baselines import fifo, fixed, optimus, tiresias, until_blocked
from scalai.core.cluster.history import Forecast
from scalai.core.cluster.question import Answer, ClusterJob, Floats, Memory, Policy, Question


@dataclass(frozen=True, slots=True)
class Taste:
    """Constants of policies that weigh jobs by their remaining work.

    Attributes:
        efficiency: Part of the ideal speed down to which a job is expected to grow.
        others: Weight of the delay of jobs with more work.
        stay_s: Time over which the standstill of a change is written off.
        keep: Advantage of the present size.
        lean: Exponent by which past service makes a job without a length count less.
        service_s: Device-seconds from which on it does.
    """

    efficiency: float = 0.5
    others: float = 1.0
    stay_s: float = 240.0
    keep: float = 0.05
    lean: float = 0.3
    service_s: float = 3600.0


TASTE = Taste()
_NEVER = 1e6


def shortest(question: Question, memory: Memory, taste: Taste = TASTE) -> Answer:
    """Serve the jobs first whose work, stated by its length, delays the completion of all most.

    Source:
        heSRPT (Berg, Vesilo, Harchol-Balter, 2020), shortest remaining time with shares; differs
        in: jobs have speeds of their own, so the worth of a unit of work is estimated.
    """
    sizes = _sizes(question)
    worths = _worths(question, [_work(job) for job in question.jobs], sizes, taste)
    return _answer(question, question.jobs, worths, sizes)


def goodput(question: Question, memory: Memory, taste: Taste = TASTE) -> Answer:
    """Be fair without lengths: each job's slowdown against an equal share counts, less for jobs
    that have had much.

    Source:
        Pollux (Qiao et al., OSDI 2021), section 3.3, "goodput" and the power mean of speedups over
        the fair share, exponent -1; differs in: an exact allotment, and weights by past service.
    """
    sizes = _sizes(question)
    share = -(-question.devices // max(len(question.jobs), 1))
    fair = max((place for place, size in enumerate(sizes, 1) if size <= share), default=1)
    worths = []
    for job in question.jobs:
        speeds = _speedups(job, sizes, question, taste)
        usual = float(speeds[: fair + 1].max())
        weight = job.priority * (1 + job.standing.service_s / taste.service_s) ** -taste.lean
        slowdown = np.full(len(speeds), np.inf)
        np.divide(max(usual, 1.0), speeds + 1e-3, out=slowdown, where=speeds >= 0)
        worths.append(-weight * slowdown)
    return _answer(question, question.jobs, worths, sizes)


def dynamic_program(question: Question, memory: Memory, taste: Taste = TASTE) -> Answer:
    """Allot devices, each with its best batch, for the greatest sum of scaling efficiencies.

    Every admitted job runs; where not all fit, the latest wait.

    Source:
        Saxena et al. (MASCOTS 2020), "job scaling factor" and its dynamic program; differs in: the
        standstill of a change is taken off.
    """
    admitted, least = list[ClusterJob](), 0
    for job in question.jobs:
        if least + job.allowed[0] <= question.devices:
            admitted.append(job)
            least += job.allowed[0]
    sizes = _sizes(question)
    worths = [job.priority * _speedups(job, sizes, question, taste) for job in admitted]
    for worth in worths:
        # To wait is worse than any size, and possible.
        worth[0] = -_NEVER
    return _answer(question, admitted, worths, sizes)


def qssf(question: Question, memory: Memory) -> Answer:
    """Serve as asked and to the end; waiting jobs by predicted device-seconds, the first blocks.

    Source:
        Helios (SC 2021), "quasi-shortest-service-first".
    """
    forecast = Forecast(question.ended)

    def service(job: ClusterJob) -> float:
        said = forecast.seconds(job.kind, "", job.asked)
        return (said or 0.0) * job.asked

    jobs = sorted(question.jobs, key=lambda job: (not job.devices, service(job), job.submitted_s))
    return Answer(until_blocked(jobs, question.devices))


POLICIES: Mapping[str, Policy] = {
    "fifo": fifo,
    "fixed": fixed,
    "tiresias": tiresias,
    "optimus": optimus,
    "goodput": goodput,
    "shortest": shortest,
    "dynamic-program": dynamic_program,
    "qssf": qssf,
}
"""All policies. ``optimus`` and ``shortest`` need jobs with stated lengths."""


def _work(job: ClusterJob) -> float:
    """Return the remaining seconds on one device; 0: it has not run, or does not say."""
    alone = _alone(job)
    if job.remaining is None or not job.standing.ran_s:
        return 0.0
    return job.remaining / alone


def _alone(job: ClusterJob) -> float:
    """Return progress a second at the smallest size with a rate, spread over its devices."""
    running = np.flatnonzero(job.rates > 0)
    return float(job.rates[running[0]]) / int(running[0]) if len(running) else 1.0


def _sizes(question: Question) -> list[int]:
    """Return the sizes to choose from: ``sizes_of``, each job's least one, and the present ones."""
    most = max((job.allowed[1] for job in question.jobs), default=0)
    own = {job.allowed[0] for job in question.jobs} | {job.devices for job in question.jobs}
    usual = sizes_of(min(most, question.devices), question.per_host)
    return sorted(own.union(usual) - {0})


def _answer(
    question: Question, jobs: Sequence[ClusterJob], worths: Sequence[Floats], sizes: Sequence[int]
) -> Answer:
    given = allot(worths, sizes, question.devices)
    if question.near:
        given = settle(worths, sizes, given, [job.devices for job in jobs], question.near)
    largest = sorted(range(len(jobs)), key=lambda at: -given[at])
    return Answer({jobs[at].name: given[at] for at in largest if given[at]})


def _worths(
    question: Question, works: Sequence[float], sizes: Sequence[int], taste: Taste
) -> list[Floats]:
    """Return each job's worth by size: the completion time that a second at that speed saves.

    A unit of work less ends the job itself earlier, and all jobs with more work by the share of the
    devices that it would hold.
    """
    jobs = question.jobs
    worths: list[Floats] = [np.zeros(0)] * len(jobs)
    order = sorted(range(len(jobs)), key=lambda at: (-works[at], -jobs[at].submitted_s))
    for behind, at in enumerate(order):
        speeds = _speedups(jobs[at], sizes, question, taste)
        size, speed = _usual(speeds, sizes, taste)
        saved = (1 + taste.others * behind * size / max(question.devices, 1)) / speed
        worths[at] = jobs[at].priority * saved * speeds
    return worths


def _usual(speeds: Floats, sizes: Sequence[int], taste: Taste) -> tuple[int, float]:
    """Return the largest size whose devices are used well, with its speed."""
    for place in range(len(speeds) - 1, 0, -1):
        if speeds[place] >= taste.efficiency * sizes[place - 1]:
            return sizes[place - 1], float(speeds[place])
    place = int(speeds.argmax())
    return (sizes[place - 1], float(speeds[place])) if speeds[place] > 0 else (1, 1.0)


def _speedups(job: ClusterJob, sizes: Sequence[int], question: Question, taste: Taste) -> Floats:
    """Return the speed at each size over one device, less the standstill of a change."""
    speeds = np.full(len(sizes) + 1, -np.inf)
    speeds[0] = 0.0
    alone, (least, most), present = _alone(job), job.allowed, job.devices
    if not job.standing.ran_s:
        # Nothing is measured yet: one host at most.
        most = min(most, max(question.per_host, least))
    lost = min(job.pause_s / taste.stay_s, 1.0)
    for place, size in enumerate(sizes, 1):
        if least <= size <= min(most, len(job.rates) - 1) and job.rates[size] > 0:
            speed = float(job.rates[size]) / alone
            speeds[place] = speed * (1 + taste.keep if size == present else 1 - lost)
    return speeds
