"""How long the parts of a change take in a job, as they took last: what an estimate is made of."""

from dataclasses import dataclass

FIRST_WRITE_S = 5.0
"""What a snapshot at a stop is taken to need beside the time of its bytes, until one was
measured."""
FIRST_RATE = 5e8
"""Bytes a second of a host that it is taken to write, until a stop was measured."""
WEIGHT = 0.3
"""How much the newest step counts in what is usual."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of the parts of a change.

    Attributes:
        step_s: A usual step; 0: none was measured.
        write_s: From the stop until the next round is assigned; None: never measured.
        start_s: From there until every rank has stepped; None: never measured.
        since: When the part under way began; None: none is measured now.
        seen: The furthest step while the workers train, and when it was seen first.
    """

    step_s: float = 0.0
    write_s: float | None = None
    start_s: float | None = None
    since: float | None = None
    seen: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a drain is expected to take, in seconds: until the workers stand at one step, until
    their state is a generation, until the others have stepped. ``is_measured``: the snapshot of an
    earlier stop was."""

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


def estimate(pace: Pace, now: float, size_bytes: int) -> Estimate:
    """Return what a drain is expected to take from ``now`` on, of a host that holds so many bytes
    of the newest generation."""
    under_way_s = 0.0 if pace.seen is None else now - pace.seen[1]
    written_s, started_s = pace.write_s, pace.start_s or 0.0
    first_s = FIRST_WRITE_S + size_bytes / FIRST_RATE
    return Estimate(
        max(pace.step_s, under_way_s),
        first_s if written_s is None else written_s,
        started_s,
        written_s is not None,
    )
