"""What a snapshot costs a training, as one of its workers sees it: how much longer the steps take
beside which it is written. Reads no clock."""

from dataclasses import dataclass, replace
from statistics import median

KEPT = 32
"""Steps whose times make up what is usual."""
KNOWN = 4
"""As long as there were fewer, it is not known."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Steps of a round until now, with what lies between them.

    Attributes:
        usual: Seconds of the newest steps beside which nothing was written, newest last.
        since: When the step under way began; None: not known.
        over_s: How much longer than usual the steps have taken beside the present snapshot, which
            is an estimate where a single step took less.
        is_open: Whether there is one.
        cost_s: What the last one has cost that is over, in seconds; None: not known.
    """

    usual: tuple[float, ...] = ()
    since: float | None = None
    over_s: float = 0.0
    is_open: bool = False
    cost_s: float | None = None

    @property
    def step_s(self) -> float | None:
        """A usual step, in seconds; None: not known yet. Few that take much longer do not change
        it."""
        return median(self.usual) if len(self.usual) >= KNOWN else None

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
            return replace(times, usual=(*self.usual[1 - KEPT :], took_s))
        step_s = self.step_s
        if step_s is None:
            return times
        return replace(times, over_s=self.over_s + took_s - step_s, is_open=True)
