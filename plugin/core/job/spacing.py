"""How many steps lie between two snapshots of a job, and what it has measured for that."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median
from typing import Literal

from scalai.core.job.young_daly import MTBF_HOURS, interval_s, mtbf_s, steps_of

FIRST_STEPS = 50
"""Steps between snapshots until one was measured."""
KEPT = 5
"""So many measurements make up what is usual: one that is far off changes nothing."""
NOTICEABLE = 1.25
"""A number of steps is changed for one that differs by this factor, not for a nearer one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a snapshot on the way was seen to cost on the host that it cost most, in seconds: by how
    much it made the training longer, how long a usual step takes, how long all of it was written.
    None: not known."""

    cost_s: float | None
    step_s: float | None
    write_s: float | None


@dataclass(frozen=True, slots=True)
class Choice:
    """A number of steps, and what it was chosen by."""

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
        every: So many; 0: there are none on the way.
        is_auto: Whether the job chooses them.
        mtbf_hours: What is assumed that a worker trains between two failures.
        lead_s: A change is told so long before it counts: by then every host has heard of it, or is
            lost.
        costs, steps: Newest measurements, in seconds, newest last.
        write_s: How long the newest snapshot was written.
        replicate_s: How long replicas of it were made, until when the next one has no room.
        failures: Failures while the job has trained,
        worker_s: for so many seconds, times its workers.
        counted_at: Until when that is counted; None: the job does not train.
        told: The steps that the workers of the present round know.
        built: Those that workers know which were built for the next one.
        said: By what it was last said that they are chosen; empty: it was not.
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

    @property
    def step_s(self) -> float | None:
        """A usual step, in seconds; None: none was measured."""
        return median(self.steps) if self.steps else None

    def with_measured(self, found: Measured) -> "Spacing":
        """Return it with what another snapshot has cost; what is no number is left out."""
        return replace(
            self,
            costs=_kept(self.costs, found.cost_s, least=0.0),
            steps=_kept(self.steps, found.step_s, least=1e-9),
            write_s=max(_kept((), found.write_s, least=0.0), default=self.write_s),
        )

    def counted(self, now: float, workers: int | None) -> "Spacing":
        """Return it at another time. ``workers``: so many train; None: none do."""
        if workers is None:
            return self if self.counted_at is None else replace(self, counted_at=None)
        took_s = 0.0 if self.counted_at is None else max(0.0, now - self.counted_at)
        return replace(self, worker_s=self.worker_s + took_s * workers, counted_at=now)

    def chosen(self, workers: int) -> Choice | None:
        """Return what so many workers are to do; None: it was not measured yet."""
        step_s = self.step_s
        if not self.costs or step_s is None:
            return None
        cost_s = median(self.costs)
        between_s = mtbf_s(workers, self.mtbf_hours, self.failures, self.worker_s)
        apart_s = interval_s(cost_s, between_s, self.write_s + self.replicate_s)
        return Choice(steps_of(apart_s, step_s), cost_s, step_s, between_s, apart_s)

    def lead(self, step_s: float) -> int:
        """Return how many steps before it counts a change is told, where one takes so long."""
        known = [each for each in (step_s, self.step_s) if each]
        return 2 + (steps_of(self.lead_s, min(known)) if known else 0)


def is_noticeable(every: int, other: int) -> bool:
    """Whether two numbers of steps differ by enough."""
    low, high = sorted((max(1, every), max(1, other)))
    return high != low and high >= NOTICEABLE * low


def _kept(values: Iterable[float], value: float | None, *, least: float) -> tuple[float, ...]:
    is_number = value is not None and isfinite(value) and value >= least
    return (*values, *((value,) if is_number and value is not None else ()))[-KEPT:]
