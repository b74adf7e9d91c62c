"""Measures seconds a step of the present round from the furthest reported step, and hosts whose
passes take longer than others'. Reads no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median, median_low

from scalai.core.degrees.degrees import Degrees
from scalai.core.job.spacing import Pace
from scalai.core.planner.reconfiguration import RELAUNCH_S


@dataclass(frozen=True, slots=True)
class ChangeTime:
    """Seconds of a change's pause of training.

    Attributes:
        fixed_s: Seconds independent of bytes: end of a step, commit, relaunch, plan, proof, first
            step.
        moves_s: Seconds of the bytes: snapshot, transfer, restore.

    Raises:
        ValueError: Negative, zero or infinite seconds.
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
    """Seconds of the bytes of a job's last stop and last start.

    Attributes:
        snapshot_s: Seconds into a host's memory.
        arrival_s: Seconds from host to host, and into the devices.
    """

    snapshot_s: float = 0.0
    arrival_s: float = 0.0

    def reported(self, seconds: Mapping[str, float], *, is_stop: bool) -> "Moves":
        """Return it after a change with these reported seconds by phase.

        Args:
            is_stop: Workers stopped for the change, so the pace counts their snapshot.
        """
        moves = replace(self, arrival_s=seconds.get("move", 0.0) + seconds.get("restore", 0.0))
        return replace(moves, snapshot_s=seconds.get("snapshot", 0.0)) if is_stop else moves


def change_time(pace: Pace, moves: Moves) -> ChangeTime | None:
    """Return the time of a change by the last measurement of each part; None: not measured.

    Phases are the maximum over hosts, limited to the part around them.
    """
    if pace.write_s is None or pace.start_s is None:
        return None
    moved_s = min(moves.snapshot_s, pace.write_s) + min(moves.arrival_s, pace.start_s)
    total_s = pace.step_s + pace.write_s + pace.start_s
    return ChangeTime(max(total_s - moved_s, 0.0), moved_s) if total_s > 0 else None


WARM_STEPS = 3
"""First steps of a round, not typical."""
WINDOW_S, WINDOW_STEPS = 10.0, 5
"""Least seconds and steps of a window: steps are reported once a second."""
WINDOWS = 3
"""Windows before the first median; it is repeated at each doubling."""
KEPT = 32


@dataclass(frozen=True, slots=True)
class Reading:
    """Number of measured steps, and typical seconds of one."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Meter:
    """Observations of a round.

    Attributes:
        first: First observed step.
        since: Step and time of the present window's begin; None: none.
        newest: Furthest step so far.
        windows: Seconds a step, of the newest windows.
        steps: Total steps of the windows.
        said: Number of windows at the last median.
    """

    round: int = 0
    first: int = 0
    since: tuple[int, float] | None = None
    newest: int = 0
    windows: tuple[float, ...] = ()
    steps: int = 0
    said: int = 0

    def look(self, round: int, step: int, now: float) -> tuple["Meter", Reading | None]:
        """Return it after a report of ``step`` in an undisturbed round.

        Args:
            now: Seconds of any steady clock.
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
        """Return it without the present window, after a disturbance."""
        return replace(self, since=None, first=self.newest)


SLOWER, AGAIN = 1.1, 1.05
"""Ratio of a host's passes to the usual host's, or its inverse: above the first one in each of
``WINDOWS`` windows it counts, and until their median is within the second one."""
Replicas = tuple[tuple[str, ...], ...]
"""Hosts of each replica."""


def replica_hosts(workers: Sequence[tuple[str, int]], degrees: Degrees) -> Replicas:
    """Return the hosts of each replica; ``workers``: of each host, in rank order."""
    found: list[dict[str, None]] = [{} for _ in range(degrees.dp)]
    hosts = (name for name, count in workers for _ in range(count))
    for rank, host in enumerate(hosts):
        found[degrees.coordinate(rank).dp_rank][host] = None
    return tuple(map(tuple, found))


def host_ratios(
    windows: Mapping[str, Sequence[float]], replicas: Replicas, before: Mapping[str, float]
) -> dict[str, float]:
    """Return the time of a pass on hosts that are slower or faster than the usual one, in its time.

    A replica is as slow as its slowest host, and hosts of one replica cannot be told apart.

    Args:
        windows: Seconds of a pass in the newest ``WINDOWS`` windows of each host.
        before: The last result: its hosts count as slower or faster for longer.
    """
    times = dict[str, list[float]]()
    for hosts in replicas:
        slowest = [max(each) for each in zip(*(windows[host] for host in hosts), strict=True)]
        for host in hosts:
            before_it = times.get(host, slowest)
            times[host] = [max(pair) for pair in zip(slowest, before_it, strict=True)]
    usual = median_low(median(its) for its in times.values())
    found = {}
    for host, its in times.items():
        ratio = median(its) / usual
        is_other = min(its) > SLOWER * usual or max(its) * SLOWER < usual
        stays_other = host in before and not 1 / AGAIN <= ratio <= AGAIN
        if is_other or stays_other:
            found[host] = ratio
    return found


def replica_paces(replicas: Replicas, ratios: Mapping[str, float]) -> tuple[int, ...]:
    """Return the time of a pass on each replica, in hundredths of the fastest one's; empty: all are
    alike."""
    paces = [max(ratios.get(host, 1.0) for host in hosts) for hosts in replicas]
    found = tuple(round(100 * pace / min(paces)) for pace in paces)
    return found if len(set(found)) > 1 else ()
