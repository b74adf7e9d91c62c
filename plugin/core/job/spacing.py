"""Durations of a job, and the steps between its snapshots: the cost of a snapshot against the
training lost at a failure.

Source: J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17 (9), 1974; J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", Future Generation Computer Systems 22 (3), 2006: its
first-order term. Differs in: bounds, because both the cost and the rate are estimates, and a rare
long way back is worse for a person than its mean says.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from statistics import median
from typing import Literal

MTBF_HOURS = 50_000.0
"""Hours of a worker between two failures, by default. Meta's training of Llama 3 had 419 unexpected
interruptions in 54 days on 16,384 GPUs: one in 50,700 hours of a GPU ("The Llama 3 Herd of Models",
arXiv 2407.21783, section 3.3.4)."""

LEAST_S, MOST_S = 10.0, 3600.0
"""Snapshots are so far apart, at least and at most."""
CHEAP_S, CHEAP = 600.0, 1e-3
"""And at most so far, where that adds no more than this share to the training: a failure that comes
early in a job's life, or more often than assumed, then costs minutes."""
LEAST_DURATIONS = 4.0
"""And at least so many times as long as one is written."""
MOST_STEPS = 1_000_000
SEEN_S = 3600.0
"""Least time of a seen rate of failures, in seconds."""


def mtbf_s(workers: int, mtbf_hours: float, failures: int, worker_s: float) -> float:
    """Training time between two failures, in seconds.

    The higher of two rates: the assumed one, corrected slowly by the job's own failures, and the
    seen one, after a few failures.

    Args:
        workers: Training workers.
        mtbf_hours: Assumed hours of one worker between two failures; > 0.
        failures: Failures of this job so far, within
        worker_s: seconds of training, summed over its workers.
    """
    workers = max(1, workers)
    assumed = (1 + failures) / (mtbf_hours * 3600.0 + worker_s)
    seen = failures / max(worker_s, workers * SEEN_S)
    return 1.0 / (workers * max(assumed, seen))


def interval_s(cost_s: float, mtbf_s: float, write_s: float = 0.0) -> float:
    """Interval between two snapshots with the least lost time, in seconds of training.

    Args:
        cost_s: Seconds added to the training by one; not a number: 0.
        mtbf_s: Seconds between two failures; > 0.
        write_s: Seconds of writing one, its replicas included.
    """
    cost_s = cost_s if isfinite(cost_s) and cost_s > 0 else 0.0
    write_s = write_s if isfinite(write_s) and write_s > 0 else 0.0
    least_s = min(MOST_S, max(LEAST_S, LEAST_DURATIONS * write_s))
    return max(least_s, min(longest_s(cost_s), sqrt(2.0 * cost_s * mtbf_s)))


def longest_s(cost_s: float) -> float:
    """Longest interval between two snapshots, in seconds of training, by the cost of one; >= 0."""
    return min(MOST_S, max(CHEAP_S, cost_s / CHEAP))


def steps_of(interval_s: float, step_s: float) -> int:
    """Nearest number of steps to an interval, at least 1.

    Args:
        interval_s: In seconds.
        step_s: A usual step; > 0.
    """
    return max(1, round(min(MOST_STEPS, interval_s / step_s)))


FIRST_STEPS = 50
"""Steps between snapshots until one was measured."""
KEPT = 5
"""Measurements in a median: one outlier changes nothing."""
NOTICEABLE = 1.25
"""Least factor between two numbers of steps worth a change."""


@dataclass(frozen=True, slots=True)
class SnapshotCost:
    """Cost of a snapshot on the way on the slowest host, in seconds: longer training, a usual step,
    the whole writing. None: unknown."""

    cost_s: float | None
    step_s: float | None
    write_s: float | None


@dataclass(frozen=True, slots=True)
class SnapshotInterval:
    """A number of steps, and its reasons."""

    every: int
    cost_s: float
    step_s: float
    mtbf_s: float
    interval_s: float

    def __str__(self) -> str:
        return (
            f"event=snapshot_every k={self.every} cost_s={self.cost_s:.3f} "
            f"step_s={self.step_s:.4g} mtbf_s={self.mtbf_s:.0f} interval_s={self.interval_s:.0f}"
        )


@dataclass(frozen=True, slots=True)
class Spacing:
    """The steps between two snapshots.

    Attributes:
        every: Steps; 0: none on the way.
        is_auto: The job chooses them.
        mtbf_hours: Assumed hours of a worker between two failures.
        lead_s: Seconds between the order of a change and its first step: by then every host has
            heard of it, or is lost.
        costs, steps: Measurements in seconds, newest last.
        write_s: Seconds of writing the newest snapshot.
        replicate_s: Seconds of its replicas; the next one has no room before.
        failures: Failures of the training job, within
        worker_s: seconds of training, summed over its workers.
        counted_at: Time of the last count; None: the job does not train.
        told: Steps known to the workers of the present round.
        built: Steps known to standby workers.
        said: Newest logged source of the choice; empty: none.
        asked: A person waits for a snapshot of a later step than this; None: nobody.
    """

    every: int = 0
    is_auto: bool = False
    mtbf_hours: float = MTBF_HOURS
    lead_s: float = 30.0
    costs: tuple[float, ...] = ()
    steps: tuple[float, ...] = ()
    write_s: float = 0.0
    replicate_s: float = 0.0
    failures: int = 0
    worker_s: float = 0.0
    counted_at: float | None = None
    told: int = 0
    built: int = 0
    said: Literal["", "assumed", "measured"] = ""
    asked: int | None = None

    @property
    def step_s(self) -> float | None:
        """A usual step, in seconds; None: none was measured."""
        return median(self.steps) if self.steps else None

    def with_measured(self, found: SnapshotCost) -> "Spacing":
        """The spacing with the cost of another snapshot; not a number: ignored."""
        return replace(
            self,
            costs=_kept(self.costs, found.cost_s, least=0.0),
            steps=_kept(self.steps, found.step_s, least=1e-9),
            write_s=max(_kept((), found.write_s, least=0.0), default=self.write_s),
        )

    def counted(self, now: float, workers: int | None) -> "Spacing":
        """The spacing at another time. ``workers``: number in training; None: none."""
        if workers is None:
            return self if self.counted_at is None else replace(self, counted_at=None)
        took_s = 0.0 if self.counted_at is None else max(0.0, now - self.counted_at)
        return replace(self, worker_s=self.worker_s + took_s * workers, counted_at=now)

    def chosen(self, workers: int) -> SnapshotInterval | None:
        """The choice for this number of workers; None: no measurement yet."""
        step_s = self.step_s
        if not self.costs or step_s is None:
            return None
        cost_s = median(self.costs)
        between_s = mtbf_s(workers, self.mtbf_hours, self.failures, self.worker_s)
        apart_s = interval_s(cost_s, between_s, self.write_s + self.replicate_s)
        return SnapshotInterval(steps_of(apart_s, step_s), cost_s, step_s, between_s, apart_s)

    def lead(self, step_s: float) -> int:
        """Steps between the order of a change and its start, at ``step_s`` seconds a step."""
        known = [each for each in (step_s, self.step_s) if each]
        return 2 + (steps_of(self.lead_s, min(known)) if known else 0)


def is_noticeable(every: int, other: int) -> bool:
    """Whether two numbers of steps differ by enough."""
    low, high = sorted((max(1, every), max(1, other)))
    return high != low and high >= NOTICEABLE * low


def _kept(values: Iterable[float], value: float | None, *, least: float) -> tuple[float, ...]:
    is_number = value is not None and isfinite(value) and value >= least
    return (*values, *((value,) if is_number and value is not None else ()))[-KEPT:]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A snapshot at each ``every``-th step behind ``begin``; 0: none.

    None at ``begin``: the schedule before may have had one just ahead of it.
    """

    every: int
    begin: int = 0

    def is_due(self, step: int) -> bool:
        """Whether a snapshot belongs to this step."""
        return bool(self.every) and step > self.begin and (step - self.begin) % self.every == 0

    def at(self, step: int, told: "Schedule | None") -> "Schedule":
        """Return the schedule at a step, after another one was ordered: from its own ``begin`` on.
        A worker that hears of it later is at once where all others are."""
        return told if told is not None and step >= told.begin else self


KEPT_STEPS = 32
"""Steps in a usual step's median."""
KNOWN_STEPS = 4
"""As long as there were fewer, it is not known."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of a round so far, and the times between them.

    Attributes:
        usual: Seconds of recent steps without a snapshot beside them, newest last.
        since: Start of the present step; None: unknown.
        over_s: Seconds beyond usual steps beside the present snapshot; an estimate, if a single
            step took less.
        is_open: A snapshot is in progress.
        cost_s: Cost of the last complete one, in seconds; None: unknown.
    """

    usual: tuple[float, ...] = ()
    since: float | None = None
    over_s: float = 0.0
    is_open: bool = False
    cost_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """A usual step, in seconds; None: not known yet. A few outliers do not change it."""
        return median(self.usual) if len(self.usual) >= KNOWN_STEPS else None

    def ended(self, now: float, *, is_beside: bool) -> "StepTimes":
        """Return it after a step that ends now. ``is_beside``: a snapshot was written beside it, or
        before it began."""
        if self.since is None:
            return replace(self, since=now)
        took_s = now - self.since
        times = replace(self, since=now)
        if not is_beside:
            if self.is_open:
                times = replace(times, over_s=0.0, is_open=False, cost_s=max(0.0, self.over_s))
            return replace(times, usual=(*self.usual[1 - KEPT_STEPS :], took_s))
        step_s = self.step_s
        if step_s is None:
            return times
        return replace(times, over_s=self.over_s + took_s - step_s, is_open=True)


FIRST_WRITE_S = 5.0
"""Assumed seconds of a snapshot at a stop beside the time of its bytes, until one was measured."""
FIRST_RATE = 5e8
"""Assumed bytes a second written by a host, until a stop was measured."""
WEIGHT = 0.3
"""Weight of the newest step in a usual one."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of the parts of a change.

    Attributes:
        step_s: A usual step; 0: unmeasured.
        write_s: From the stop to the next assignment; None: unmeasured.
        start_s: From there to a step of every rank; None: unmeasured.
        since: Start of the present part; None: none.
        seen: Furthest step in training, and the time of its first sight.
    """

    step_s: float = 0.0
    write_s: float | None = None
    start_s: float | None = None
    since: float | None = None
    seen: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class DrainEstimate:
    """Expected seconds of a drain: to a common stop, to a generation, to the others' step.
    ``is_measured``: by an earlier stop."""

    step_s: float
    write_s: float
    start_s: float
    is_measured: bool

    @property
    def total_s(self) -> float:
        return self.step_s + self.write_s + self.start_s

    def __str__(self) -> str:
        write = "as measured last" if self.is_measured else "assumed from its bytes"
        return (
            f"{self.total_s:.1f} s: a step {self.step_s:.1f}, the snapshot {self.write_s:.1f} "
            f"({write}), the start of the others {self.start_s:.1f}"
        )


def estimate(pace: Pace, now: float, size_bytes: int) -> DrainEstimate:
    """Expected duration of a drain from ``now`` on, of a host with these bytes of the newest
    generation."""
    under_way_s = 0.0 if pace.seen is None else now - pace.seen[1]
    written_s, started_s = pace.write_s, pace.start_s or 0.0
    first_s = FIRST_WRITE_S + size_bytes / FIRST_RATE
    return DrainEstimate(
        max(pace.step_s, under_way_s),
        first_s if written_s is None else written_s,
        started_s,
        written_s is not None,
    )
