"""Runs a workload on a cluster under a policy, in virtual time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from scalai.core.cluster.application import Application, Asked, Limits, Placement
from scalai.core.cluster.placing import Hosts, place_most_free
from scalai.core.cluster.question import (
    Answer,
    ClusterJob,
    Ended,
    Floats,
    Policy,
    Question,
    Standing,
)
from scalai.core.cluster.speeds import (
    Noise,
    Pass,
    Speeds,
    StepModel,
    first_rates,
    fit,
    form_of,
    usual_size,
)

Place = Callable[
    [Sequence[str], Mapping[str, int], Mapping[str, Hosts], Sequence[int]], dict[str, Hosts]
]


@dataclass(frozen=True, slots=True)
class Submission:
    """A job of a workload."""

    name: str
    at_s: float
    kind: str
    asked: Asked


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a cluster.

    Attributes:
        every_s: Seconds between decisions.
        look_s: Seconds between looks: a decision follows a look that sees an event, too. None: none
            between decisions.
        pause_s: Standstill of a job whose devices change.
        pauses: The same by kind of job, where it is another.
        most_s: End of the simulation; jobs that have not ended then are an error.
    """

    hosts: int = 16
    per_host: int = 4
    every_s: int = 60
    pause_s: float = 30.0
    most_s: float = 40 * 86400.0
    look_s: int | None = None
    pauses: Mapping[str, float] = field(default_factory=dict)

    def pause_of(self, kind: str) -> float:
        return self.pauses.get(kind, self.pause_s)


@dataclass(frozen=True, slots=True)
class Resources:
    """Devices on equal hosts from a time on."""

    from_s: float
    hosts: int
    per_host: int


@dataclass(frozen=True, slots=True)
class Sight:
    """What a policy sees of a job.

    Attributes:
        rates: ``learned``: from the rows it has run; ``true``: from all measured tables (an
            oracle); ``none``: for policies that do not look at them.
        is_length_stated: ``remaining`` is known.
        is_batch_free: The batch follows the devices; else it is the one asked for.
        is_in_epochs: Rates and remaining work are in steps of the asked batch, from an oracle, as
            Optimus had them in the published runs.
    """

    rates: Literal["learned", "true", "none"] = "learned"
    is_length_stated: bool = False
    is_batch_free: bool = True
    is_in_epochs: bool = False


_NO_PASS = Pass(0, 0)


@dataclass(slots=True)
class _Running:
    """A job of the simulation, changed in place by its owner, ``_Cluster``."""

    submission: Submission
    application: Application
    limits: Limits
    fixed: int | None
    per_host: int
    hosts: Hosts = ()
    placement: Placement = ()
    form: Pass = _NO_PASS
    halt_s: float = 0.0
    progress: float = 0.0
    epoch: int = 0
    ran_s: float = 0.0
    service_s: float = 0.0
    starts: int = 0
    changed_s: float = 0.0
    ended_s: float | None = None
    rows: dict[tuple[int, int, float], tuple[float, float]] = field(default_factory=dict)
    noise: Noise | None = None
    model: StepModel | None = None
    speeds: Speeds | None = None
    rates: Floats | None = None
    tuned: tuple[Speeds, Placement] | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A job's devices from a time on."""

    name: str
    from_s: float
    devices: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds from submission to end by job, changes of devices by job, and the spans."""

    completion_s: Mapping[str, float]
    changes: Mapping[str, int]
    spans: tuple[Span, ...]

    @property
    def mean_s(self) -> float:
        return sum(self.completion_s.values()) / len(self.completion_s)


def simulate(
    workload: Sequence[Submission],
    applications: Mapping[str, Application],
    policy: Policy,
    rules: Rules,
    sight: Sight,
    *,
    limits: Mapping[str, Limits] | None = None,
    place: Place = place_most_free,
    resources: Sequence[Resources] = (),
) -> Outcome:
    """Return when each job of a workload ends.

    Args:
        limits: Stated limits by kind; absent: as measured.
        resources: Changes of the devices, in order of time. A decision follows each.
    """
    cluster = _Cluster(workload, applications, rules, sight, limits or {})
    now, decided, memory = 0.0, 0.0, dict[str, float]()
    look, known = rules.look_s or rules.every_s, None
    while cluster.waiting or cluster.active:
        now += look
        if now > rules.most_s:
            raise AssertionError(f"{len(cluster.active)} jobs have not ended after {now:.0f} s")
        cluster.run(now - look, look)
        cluster.admit(now)
        cluster.resources = next(
            (each for each in reversed(resources) if each.from_s <= now), cluster.resources
        )
        seen = cluster.resources, frozenset(cluster.active)
        if not cluster.active or (seen == known and now - decided < rules.every_s):
            continue
        known, decided = seen, now
        answer = policy(cluster.question(now), memory)
        memory = dict(answer.memory)
        cluster.apply(answer, now, place)
    return cluster.outcome()


_NO_RATES = np.zeros(0)


class _Cluster:
    def __init__(
        self,
        workload: Sequence[Submission],
        applications: Mapping[str, Application],
        rules: Rules,
        sight: Sight,
        limits: Mapping[str, Limits],
    ) -> None:
        self.rules, self.sight = rules, sight
        self.resources = Resources(0.0, rules.hosts, rules.per_host)
        self.waiting: list[_Running] = [
            _running(one, applications[one.kind], limits.get(one.kind), rules, sight)
            for one in sorted(workload, key=lambda one: one.at_s)
        ]
        self.active: dict[str, _Running] = {}
        self.ended: list[_Running] = []
        self._past: list[Ended] = []
        self._spans: list[Span] = []
        self._asked: dict[tuple[str, int | None], Floats] = {}
        self._true: dict[tuple[str, int | None, int], Floats] = {}

    def admit(self, now: float) -> None:
        while self.waiting and self.waiting[0].submission.at_s <= now:
            job = self.waiting.pop(0)
            self.active[job.submission.name] = job

    def run(self, now: float, seconds: float) -> None:
        for name, job in list(self.active.items()):
            _advance(job, now, seconds)
            if job.ended_s is not None:
                self.ended.append(self.active.pop(name))
                asked = job.submission.asked
                self._past.append(Ended(job.submission.kind, asked.devices, job.ran_s))
                self._spans.append(Span(name, job.ended_s, 0))

    def question(self, now: float) -> Question:
        return Question(
            now,
            tuple(self._view(job, now) for job in self.active.values()),
            self.resources.hosts,
            self.resources.per_host,
            tuple(self._past),
        )

    def apply(self, answer: Answer, now: float, place: Place) -> None:
        free = [self.resources.per_host] * self.resources.hosts
        held = {
            name: job.hosts
            for name, job in self.active.items()
            if job.hosts
            and all(host < len(free) and count <= free[host] for host, count in job.hosts)
        }
        found = place(tuple(answer.devices), answer.devices, held, free)
        for name, job in self.active.items():
            placed = found.get(name, ())
            if placed == job.hosts:
                continue
            job.hosts = placed
            job.placement = tuple(count for _, count in placed)
            self._spans.append(Span(name, now, sum(job.placement)))
            job.changed_s = now
            if placed:
                job.starts += 1
                job.halt_s = self.rules.pause_of(job.submission.kind)
                _tune(job)

    def outcome(self) -> Outcome:
        return Outcome(
            {one.submission.name: _lasted(one) for one in self.ended},
            {one.submission.name: max(one.starts - 1, 0) for one in self.ended},
            tuple(self._spans),
        )

    def _view(self, job: _Running, now: float) -> ClusterJob:
        rates, remaining = self._known(job)
        return ClusterJob(
            job.submission.name,
            job.submission.kind,
            job.submission.at_s,
            job.submission.asked.devices,
            job.limits.devices,
            Standing(sum(job.placement), job.ran_s, job.service_s, now - job.changed_s),
            rates,
            remaining,
            self.rules.pause_of(job.submission.kind),
        )

    def _known(self, job: _Running) -> tuple[Floats, float | None]:
        """Return rates and remaining work as far as ``sight`` reaches."""
        left = job.application.length - job.progress
        if self.sight.is_in_epochs:
            key = job.submission.kind, job.fixed
            if key not in self._asked:
                self._asked[key] = _asked_rates(job, self.rules.per_host)
            return self._asked[key], _epochs_left(job)
        if self.sight.rates == "none":
            return _NO_RATES, left if self.sight.is_length_stated else None
        if self.sight.rates == "true":
            now = job.submission.kind, job.fixed, job.epoch
            if now not in self._true:
                self._true[now] = _true_rates(job, self.rules.per_host)
            rates = self._true[now]
        else:
            rates = _learned_rates(job, self.rules.per_host)
        return rates, left if self.sight.is_length_stated else None


def _running(
    one: Submission, application: Application, limits: Limits | None, rules: Rules, sight: Sight
) -> _Running:
    allowed = limits or application.limits
    fixed = one.asked.batch if not sight.is_batch_free else None
    if allowed.batch[0] == allowed.batch[1]:
        fixed = allowed.batch[0]
    return _Running(one, application, allowed, fixed, rules.per_host)


def _lasted(job: _Running) -> float:
    assert job.ended_s is not None
    return job.ended_s - job.submission.at_s


def _advance(job: _Running, now: float, seconds: float) -> None:
    """Let a job run for some seconds with its devices."""
    devices = sum(job.placement)
    if not devices:
        return
    begin, left = now, seconds
    halt = min(job.halt_s, left)
    job.halt_s -= halt
    now, left = now + halt, left - halt
    while left > 0 and job.ended_s is None:
        rate = _true_rate(job, devices)
        end = job.application.ends[job.epoch]
        if job.progress + rate * left < end:
            job.progress += rate * left
            now, left = now + left, 0.0
        else:
            # Whole seconds, as the published runs counted.
            took = round((end - job.progress) / rate)
            job.progress, job.epoch = end, job.epoch + 1
            now, left = now + took, left - took
            if job.epoch == len(job.application.ends):
                job.ended_s = now
        if job.ended_s is None and job.fixed is None:
            _tune(job)
    job.ran_s += now - begin
    job.service_s += (now - begin) * devices


def _true_rate(job: _Running, devices: int) -> float:
    """Return progress a second in truth, and note what the job measures by running."""
    application, form = job.application, job.form
    batch = devices * form.local * form.passes
    step, sync = application.step_s(job.placement, form.local)
    sqr, var = application.noise(batch, job.epoch)
    noise = Noise(sqr, var, application.unit)
    if noise != job.noise:
        job.noise, job.speeds = noise, None
    row = len(job.placement), devices, form.local
    if row not in job.rows:
        job.rows[row] = step, sync
        job.model = job.speeds = None
    gain = (var + sqr) / (var * application.unit / batch + sqr)
    return gain / (step + (form.passes - 1) * (step - sync))


def _speeds(job: _Running) -> Speeds | None:
    if job.noise is None:
        return None
    if job.model is None:
        asked = job.submission.asked
        usual = form_of(asked.batch, usual_size(asked.devices, job.per_host), job.limits, 0)
        job.model = fit(job.rows, asked.devices, job.per_host, (usual.local, usual.passes))
    if job.speeds is None:
        job.speeds = Speeds(job.model, job.noise, job.limits, job.fixed)
        job.rates = None
    return job.speeds


def _tune(job: _Running) -> None:
    """Let the job choose its batch for its devices, as its own agent does beside the training."""
    devices = sum(job.placement)
    if job.fixed is not None:
        job.form = form_of(job.fixed, devices, job.limits, job.application.unit)
        return
    speeds = _speeds(job)
    if speeds is None:
        least, low = job.limits.batch[0], job.limits.local[0]
        first = max(least, low * devices)
        job.form = form_of(first, devices, job.limits, job.application.unit)
    elif job.tuned is None or job.tuned[0] is not speeds or job.tuned[1] != job.placement:
        job.form = speeds.form(len(job.placement), devices)
        job.tuned = speeds, job.placement


def _learned_rates(job: _Running, per_host: int) -> Floats:
    speeds = _speeds(job)
    if speeds is None:
        return first_rates(job.submission.asked.devices, job.limits.devices)
    if job.rates is None:
        job.rates = speeds.rates(per_host)
    return job.rates


def _true_rates(job: _Running, per_host: int) -> Floats:
    """Return an oracle's rates, from all tables, at the noise of the present epoch."""
    application, (least, most) = job.application, job.limits.devices
    rates = np.zeros(most + 1)
    for devices in range(least, most + 1):
        placement = packed(devices, per_host)
        for batch in [job.fixed] if job.fixed is not None else list(application.epochs):
            form = form_of(batch, devices, job.limits, application.unit)
            total = devices * form.local * form.passes
            if not application.has(placement, form.local) or not (
                job.limits.batch[0] <= total <= job.limits.batch[1]
            ):
                continue
            step, sync = application.step_s(placement, form.local)
            sqr, var = application.noise(total, job.epoch)
            gain = (var + sqr) / (var * application.unit / total + sqr)
            rates[devices] = max(rates[devices], gain / (step + (form.passes - 1) * (step - sync)))
    return rates


def packed(devices: int, per_host: int) -> Placement:
    """Return devices on the fewest hosts."""
    full, rest = divmod(devices, per_host)
    return (per_host,) * full + ((rest,) if rest else ())


def _asked_rates(job: _Running, per_host: int) -> Floats:
    """Return steps a second of the asked batch, by an oracle, for as many devices as hold it."""
    assert job.fixed is not None
    application = job.application
    most = min(job.limits.devices[1], job.fixed // job.limits.local[0])
    rates = np.zeros(most + 1)
    for devices in range(1, most + 1):
        form = form_of(job.fixed, devices, job.limits, application.unit)
        step, sync = application.step_s(packed(devices, per_host), form.local)
        rates[devices] = 1 / (step + (form.passes - 1) * (step - sync))
    return rates


def _epochs_left(job: _Running) -> float:
    """Return steps of the asked batch as the published Optimus counted them: from the end of the
    running epoch to the end of the last one, and one in the last."""
    assert job.fixed is not None
    last = len(job.application.ends) - 1
    if job.epoch >= last:
        return 1.0
    steps = job.application.steps_until
    return steps(job.fixed, last) - steps(job.fixed, job.epoch)
