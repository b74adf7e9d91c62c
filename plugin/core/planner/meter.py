"""How long a step of the present round takes, from the furthest step that the coordinator has heard
of. Reads no clock."""

from dataclasses import dataclass, replace
from statistics import median

WARM_STEPS = 3
"""The first steps of a round are not usual ones."""
WINDOW_S, WINDOW_STEPS = 10.0, 5
"""What a window has at least: steps are heard of once a second."""
WINDOWS = 3
"""After so many the median is said, and again whenever there are twice as many."""
KEPT = 32


@dataclass(frozen=True, slots=True)
class Reading:
    """So many steps were made, and what a usual one took."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Meter:
    """What was seen of a round.

    Attributes:
        round: Whose steps these are.
        first: The step at which it was seen first.
        since: Step and time at which the present window began; None: none has.
        newest: The furthest step so far.
        windows: Seconds a step, of the newest windows.
        steps: How many they had together.
        said: Windows that there were when the median was said last.
    """

    round: int = 0
    first: int = 0
    since: tuple[int, float] | None = None
    newest: int = 0
    windows: tuple[float, ...] = ()
    steps: int = 0
    said: int = 0

    def look(self, round: int, step: int, now: float) -> tuple["Meter", Reading | None]:
        """Return it after ``step`` of a round that trains undisturbed was heard of.

        Args:
            now: Seconds of any clock that does not jump.
        """
        if round != self.round:
            return Meter(round, step, None, step), None
        if step <= self.newest:
            return self, None
        meter = replace(self, newest=step)
        if meter.since is None:
            is_warm = step - meter.first >= WARM_STEPS
            return (replace(meter, since=(step, now)) if is_warm else meter), None
        made, took_s = step - meter.since[0], now - meter.since[1]
        if made < WINDOW_STEPS or took_s < WINDOW_S:
            return meter, None
        windows = (*meter.windows[1 - KEPT :], took_s / made)
        meter = replace(meter, since=(step, now), windows=windows, steps=meter.steps + made)
        is_due = len(windows) >= max(WINDOWS, min(2 * meter.said, KEPT))
        if not is_due or (len(windows) == KEPT and meter.said == KEPT):
            return meter, None
        return replace(meter, said=len(windows)), Reading(meter.steps, median(windows))

    def interrupted(self) -> "Meter":
        """Return it after something that makes the window under way no usual one."""
        return replace(self, since=None, first=self.newest)
