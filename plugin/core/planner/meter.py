"""How long a step of the present round takes, from the furthest step that the coordinator has heard
of. Reads no clock."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from scalai.core.job.spacing import Pace
from scalai.core.planner.reconfiguration import RELAUNCH_S


@dataclass(frozen=True, slots=True)
class ChangeTime:
    """Seconds in which training stands still for a change.

    Attributes:
        fixed_s: Of what does not depend on bytes: a step that ends, commit, relaunch, plan, proof,
            first step.
        moves_s: Of the bytes: snapshot, way, restore.

    Raises:
        ValueError: It is no time.
    """

    fixed_s: float = RELAUNCH_S
    moves_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.fixed_s and 0 <= self.moves_s and 0 < self.total_s < inf):
            raise ValueError(
                f"{self.fixed_s} s and {self.moves_s} s of its bytes is no time of a change"
            )

    @property
    def total_s(self) -> float:
        return self.fixed_s + self.moves_s


@dataclass(frozen=True, slots=True)
class Moves:
    """Seconds that the bytes of a job's last stop and of its last start took.

    Attributes:
        snapshot_s: On their way into a host's memory.
        arrival_s: From host to host, and into the devices.
    """

    snapshot_s: float = 0.0
    arrival_s: float = 0.0

    def reported(self, seconds: Mapping[str, float], *, is_stop: bool) -> "Moves":
        """Return it after a change of which the report has these seconds by phase.

        Args:
            is_stop: Whether its workers stopped for it, so that the pace counts their snapshot.
        """
        moves = replace(self, arrival_s=seconds.get("move", 0.0) + seconds.get("restore", 0.0))
        return replace(moves, snapshot_s=seconds.get("snapshot", 0.0)) if is_stop else moves


def change_time(pace: Pace, moves: Moves) -> ChangeTime | None:
    """Return what the last change took, as the parts of it were measured last; None: none was.

    Phases are the longest of what hosts report, so that they cannot take more than the part in
    which they lie.
    """
    if pace.write_s is None or pace.start_s is None:
        return None
    moved_s = min(moves.snapshot_s, pace.write_s) + min(moves.arrival_s, pace.start_s)
    total_s = pace.step_s + pace.write_s + pace.start_s
    return ChangeTime(max(total_s - moved_s, 0.0), moved_s) if total_s > 0 else None


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
