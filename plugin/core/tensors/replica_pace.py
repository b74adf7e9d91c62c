"""How fast replicas may be fetched beside a training, so that its steps take only so much longer.

The rate is learnt: steps are timed in windows in which replicas come all the time, and in windows
in which none do; the medians of both are compared. Where steps take longer than they may, the rate
falls to half; else it rises by a fixed step. It never falls so low that replicas would not be there
before those of the next generation are due: the training would wait for them then.

Source: additive increase and multiplicative decrease as for the congestion of networks (Chiu and
Jain, 1989); differs in: the signal is the time of the training's own steps.
"""

from dataclasses import dataclass, replace
from enum import Enum
from statistics import median

FIRST_RATE = 2e8
"""Bytes a second, as long as nothing was measured."""
LEAST_RATE = 8e6
"""Bytes a second: less, and who gives to this host would think that it is gone."""
MOST_RATE = 1e11
RISE = 5e7
"""Bytes a second by which the rate rises at once."""
FALL = 0.5
WINDOW_S, WINDOW_STEPS, LONG_S = 2.0, 4, 10.0
"""What a window is at least: steps are seen to the tenth of a second. One that is so long may have
fewer steps."""
KNOWN = 5
"""Windows of a kind without which nothing is decided."""
KEPT = 15
"""Windows without replicas that make up what is usual."""
USED = 0.8
"""Share of the rate that must have come: else something else is what limits it."""
IN_TIME = 0.7
"""Share of the time until the next replicas are due in which these are to be there."""


class Traffic(Enum):
    """What comes to this host beside the training."""

    NONE = "none"
    REPLICAS = "replicas"
    OTHER = "other"
    """What is not slowed down, and says nothing of the rate."""


@dataclass(frozen=True, slots=True)
class PaceWindow:
    """Steps of one round beside one kind of traffic: how far the workers were when it began, when
    that was, and how many bytes of replicas had come by then."""

    round: int
    traffic: Traffic
    step: int
    since: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReplicaLook:
    """What is to be seen at a time, in seconds: the round and its step, what comes, and how many
    bytes of replicas have come since the agent began."""

    now: float
    round: int
    step: int
    traffic: Traffic
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReplicaPace:
    """What was learnt.

    Attributes:
        slowdown: By what part of its time a step may take longer; 1 or more: no rate is kept.
        rate: Bytes a second.
        free, busy: Seconds that a step took in windows without replicas, and with replicas at this
            rate, newest last.
        came: Bytes a second of replicas in each of the latter.
        seen: The newest look at which a step had ended.
        window: The one under way; None: it begins with the next step.
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
        """A usual step, in seconds; None: not known. Few that take much longer do not change it."""
        times = self.free if len(self.free) >= KNOWN else (*self.free, *self.busy)
        return median(times) if times else None

    @property
    def excess(self) -> float | None:
        """By what part of its time a step takes longer beside replicas; None: not known."""
        if len(self.free) < KNOWN or len(self.busy) < KNOWN:
            return None
        usual = median(self.free)
        return median(self.busy) / usual - 1 if usual > 0 else None


def looked(pace: ReplicaPace, look: ReplicaLook) -> ReplicaPace:
    """Return what is known after a look. Steps of another round, or beside changing traffic, count
    for nothing."""
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
    """Change the rate, where enough windows are known to say that it should."""
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
    """How many bytes a second may come; None: any. ``is_hurried``: more than the steps bear, so
    that replicas are there in time."""

    rate: float | None
    is_hurried: bool = False


def limit(pace: ReplicaPace, left_bytes: int, steps_left: int | None) -> Limit:
    """Return how fast what is left may come.

    Args:
        pace: What was learnt.
        left_bytes: What has yet to come.
        steps_left: Steps until the next generation is due; None: nobody knows of one. Where there
            are none left, the training waits for what has yet to come.
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
    """Bytes that were let through and are not over yet at the rate that they were let through at:
    ``free_at`` that time, in seconds."""

    free_at: float = 0.0


BURST_S = 0.1
"""For so long the rate may be saved up."""


def take(bucket: Bucket, count: int, rate: float | None, now: float) -> tuple[Bucket, float]:
    """Let bytes through; return how long to wait before the next ones, in seconds."""
    if rate is None:
        return Bucket(now), 0.0
    free_at = max(bucket.free_at, now - BURST_S) + count / rate
    return Bucket(free_at), max(0.0, free_at - now)


def is_noticeable(before: float, after: float) -> bool:
    """Whether a change of the rate is worth a line."""
    return not before / 1.5 < after < before * 1.5
