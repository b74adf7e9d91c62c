"""Rate limit for fetching replicas beside a training, to bound the slowdown of its steps.

The rate is learnt: steps are timed in windows with replicas coming all the time, and in windows
without any; their medians are compared. Too slow steps halve the rate; else it rises by a fixed
step. It stays high enough to finish before the next generation's replicas are due: the training
would wait for them then.

Source: additive increase and multiplicative decrease as for the congestion of networks (Chiu and
Jain, 1989); differs in: the signal is the time of the training's own steps.
"""

from dataclasses import dataclass, replace
from enum import Enum
from statistics import median

FIRST_RATE = 2e8
"""Bytes a second before the first measurement."""
LEAST_RATE = 8e6
"""Bytes a second: below it, the giving host would take this host for lost."""
MOST_RATE = 1e11
RISE = 5e7
"""Rise of the rate, in bytes a second."""
FALL = 0.5
WINDOW_S, WINDOW_STEPS, LONG_S = 2.0, 4, 10.0
"""Least window: steps are seen to the tenth of a second. A window of ``LONG_S`` may have fewer
steps."""
KNOWN = 5
"""Least windows of a kind for a decision."""
KEPT = 15
"""Windows without replicas in the usual step time."""
USED = 0.8
"""Least share of the rate in use: below it, the limit lies elsewhere."""
IN_TIME = 0.7
"""Share of the time until the next replicas are due: these must be there by then."""


class Traffic(Enum):
    """Traffic to this host beside the training."""

    NONE = "none"
    REPLICAS = "replicas"
    OTHER = "other"
    """Not limited, and no measurement for the rate."""


@dataclass(frozen=True, slots=True)
class PaceWindow:
    """Steps of one round beside one kind of traffic.

    ``step``, ``since`` (seconds) and ``size_bytes`` (bytes of replicas) are those at its begin.
    """

    round: int
    traffic: Traffic
    step: int
    since: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReplicaLook:
    """An observation at ``now``, in seconds: round and step, kind of traffic, and bytes of replicas
    since the agent began.
    """

    now: float
    round: int
    step: int
    traffic: Traffic
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReplicaPace:
    """The knowledge so far.

    Attributes:
        slowdown: Largest slowdown of a step (0.01 = 1 %); 1 or more: no limit.
        rate: Bytes a second.
        free, busy: Seconds of a step in windows without replicas, and with replicas at this rate,
            newest last.
        came: Bytes a second of replicas in each of the latter.
        seen: Newest look after the end of a step.
        window: Open window; None: it begins with the next step.
    """

    slowdown: float
    rate: float = FIRST_RATE
    free: tuple[float, ...] = ()
    busy: tuple[float, ...] = ()
    came: tuple[float, ...] = ()
    seen: ReplicaLook | None = None
    window: PaceWindow | None = None

    @property
    def step_s(self) -> float | None:
        """Median step, in seconds; None: unknown. A few long steps do not change it."""
        times = self.free if len(self.free) >= KNOWN else (*self.free, *self.busy)
        return median(times) if times else None

    @property
    def excess(self) -> float | None:
        """Slowdown of a step beside replicas (0.01 = 1 %); None: unknown."""
        if len(self.free) < KNOWN or len(self.busy) < KNOWN:
            return None
        usual = median(self.free)
        return median(self.busy) / usual - 1 if usual > 0 else None


def looked(pace: ReplicaPace, look: ReplicaLook) -> ReplicaPace:
    """Return the knowledge after a look.

    Steps of another round, or beside changing traffic, do not count.
    """
    seen, window = pace.seen, pace.window
    if seen is not None and look.round != seen.round:  # other degrees: other times
        pace = replace(pace, free=(), busy=(), came=())
        window = None
    if window is not None and look.traffic is not window.traffic:
        window = None
    is_new = seen is None or look.round != seen.round or look.step < seen.step
    window = None if is_new else window
    has_stepped = not is_new and seen is not None and look.step > seen.step
    if is_new or has_stepped:
        pace = replace(pace, seen=look)
    if not has_stepped or look.traffic is Traffic.OTHER:
        return replace(pace, window=window)
    if window is None:
        window = PaceWindow(look.round, look.traffic, look.step, look.now, look.size_bytes)
        return replace(pace, window=window)
    took_s, steps = look.now - window.since, look.step - window.step
    if took_s < WINDOW_S or (steps < WINDOW_STEPS and took_s < LONG_S):
        return replace(pace, window=window)
    next_window = replace(window, step=look.step, since=look.now, size_bytes=look.size_bytes)
    pace = replace(pace, window=next_window)
    if look.traffic is Traffic.NONE:
        return replace(pace, free=(*pace.free, took_s / steps)[-KEPT:])
    busy = (*pace.busy, took_s / steps)[-KEPT:]
    came = (*pace.came, (look.size_bytes - window.size_bytes) / took_s)[-KEPT:]
    return _decided(replace(pace, busy=busy, came=came))


def _decided(pace: ReplicaPace) -> ReplicaPace:
    excess = pace.excess
    if excess is None:
        return pace
    if excess > pace.slowdown:
        rate = max(LEAST_RATE, pace.rate * FALL)
    elif median(pace.came) >= USED * pace.rate:
        rate = min(MOST_RATE, pace.rate + RISE)
    else:
        rate = pace.rate
    return replace(pace, rate=rate, busy=(), came=())


@dataclass(frozen=True, slots=True)
class Limit:
    """Largest rate in bytes a second; None: any. ``is_hurried``: above the learnt rate, to be in
    time.
    """

    rate: float | None
    is_hurried: bool = False


def limit(pace: ReplicaPace, left_bytes: int, steps_left: int | None) -> Limit:
    """Return the limit for the rest.

    Args:
        pace: Knowledge so far.
        left_bytes: Bytes still to come.
        steps_left: Steps until the next generation is due; None: unknown; 0: the training waits for
            the rest.
    """
    if pace.slowdown >= 1:
        return Limit(None)
    if steps_left is None:
        return Limit(pace.rate)
    if steps_left <= 0:
        return Limit(None, is_hurried=True)
    step_s = pace.step_s
    if not step_s:
        return Limit(pace.rate)
    needed = left_bytes / (IN_TIME * steps_left * step_s)
    return Limit(max(pace.rate, needed), is_hurried=needed > pace.rate)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bytes let through; at their rate they are over at ``free_at``, in seconds."""

    free_at: float = 0.0


BURST_S = 0.1
"""Longest saving of unused rate, in seconds."""


def take(bucket: Bucket, count: int, rate: float | None, now: float) -> tuple[Bucket, float]:
    """Let bytes through; return the wait before the next ones, in seconds."""
    if rate is None:
        return Bucket(now), 0.0
    free_at = max(bucket.free_at, now - BURST_S) + count / rate
    return Bucket(free_at), max(0.0, free_at - now)


def is_noticeable(before: float, after: float) -> bool:
    """Return True if a change of the rate is worth a log line."""
    return not before / 1.5 < after < before * 1.5
