"""Share of the time in which a command may run beside a training, by the training's own steps.

Steps are timed in windows without the command and in longer ones with it, by turns. Its share rises
while they are surely not longer than stated, and falls as soon as they surely are; what noise
leaves open is decided by the mean. Where no step ends, as in a change of the job, the command rests
for a while: the job has the host for itself.
"""

from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, median, stdev

FIRST, LEAST = 0.1, 0.01
"""Share of the time, before the first decision, and at least."""
FREE_S, FREE_STEPS = 3.0, 2
"""Least window without the command, in seconds and steps."""
BUSY = 4
"""Length of a window with it, in windows without it."""
KNOWN, KEPT = 2, 6
"""Windows without it before the first one with it, and in the usual step time."""
FEW, MANY = 4, 12
"""Windows with it before a sure decision, and before any."""
SURE = 2.0
"""Standard errors of a sure decision."""
FALL, RISE = 0.5, 1.5
DRIFT = 1.25
"""Change of the share by a mean that is not sure."""
STANDS_S, STANDS_STEPS = 3.0, 5.0
"""A training without a step for this long, in seconds and in usual steps, stands still."""
LONGEST_S = 600.0
"""The same before a step was timed."""
YIELD_S = 60.0
"""Longest rest of the command while the training stands still: there may be none any more."""


@dataclass(frozen=True, slots=True)
class Window:
    """Steps with the command, or without it, from a step's end on."""

    is_busy: bool
    step: int
    since: float


@dataclass(frozen=True, slots=True)
class Background:
    """The knowledge so far.

    Attributes:
        slowdown: Largest slowdown of a step (0.01 = 1 %).
        share: Part of the time, 0 to 1, in which the command runs in a window with it.
        free: Seconds of a step in the newest windows without it.
        busy_s: The same of a window with it, until the next one without it is over.
        excess: Slowdown in each window with it at this share.
        round, step, at: Newest step that ended, and its time; round -1: none yet.
        window: None: it begins with the next step.
    """

    slowdown: float
    share: float = FIRST
    free: tuple[float, ...] = ()
    busy_s: float | None = None
    excess: tuple[float, ...] = ()
    round: int = -1
    step: int = 0
    at: float = 0.0
    window: Window | None = None

    @property
    def step_s(self) -> float:
        """A usual step, in seconds; 0: unknown."""
        return median(self.free) if self.free else 0.0

    @property
    def patience_s(self) -> float:
        """Longest time without a step in which the training counts as one that goes on."""
        return max(STANDS_S, STANDS_STEPS * self.step_s) if self.free else LONGEST_S

    def stands(self, now: float) -> bool:
        """Whether no step has ended for long."""
        return now - self.at > self.patience_s


def seen(state: Background, now: float, round: int, step: int) -> Background:
    """Return the knowledge after a look at the step that all workers of this host have ended."""
    if round != state.round or step < state.step:  # other degrees: other times
        return Background(state.slowdown, state.share, round=round, step=step, at=now)
    if step == state.step:
        return state
    window, busy_s = (None, None) if state.stands(now) else (state.window, state.busy_s)
    state = replace(state, step=step, at=now, busy_s=busy_s)
    if window is None:
        is_busy = len(state.free) >= KNOWN
        return replace(state, window=Window(is_busy, step, now))
    took_s, steps, times = now - window.since, step - window.step, BUSY if window.is_busy else 1
    if took_s < times * FREE_S or steps < times * FREE_STEPS:
        return replace(state, window=window)
    each_s = took_s / steps
    if window.is_busy:
        state = replace(state, busy_s=each_s)
    else:
        if state.busy_s is not None:  # between two without it: a training changes by itself
            excess = state.busy_s / fmean((state.free[-1], each_s)) - 1
            state = _decided(replace(state, excess=(*state.excess, excess), busy_s=None))
        state = replace(state, free=(*state.free, each_s)[-KEPT:])
    is_busy = not window.is_busy and len(state.free) >= KNOWN
    return replace(state, window=Window(is_busy, step, now))


def _decided(state: Background) -> Background:
    count = len(state.excess)
    if count < FEW:
        return state
    mean = fmean(state.excess)
    error = SURE * stdev(state.excess) / sqrt(count)
    if mean - error > state.slowdown:
        factor = FALL
    elif mean + error <= state.slowdown:
        factor = RISE
    elif count < MANY:
        return state
    else:
        factor = 1 / DRIFT if mean > state.slowdown else DRIFT
    return replace(state, share=max(LEAST, min(1.0, state.share * factor)), excess=())


def is_free(state: Background, now: float) -> bool:
    """Whether the training has stood still for so long that there may be none."""
    return now - state.at > max(YIELD_S, 2 * state.patience_s)


def share(state: Background, now: float) -> float:
    """Return the part of the time, 0 to 1, in which the command may run now."""
    if is_free(state, now):
        return 1.0
    is_busy = state.window is not None and state.window.is_busy
    return state.share if is_busy and not state.stands(now) else 0.0
