"""What a change of a running job has taken: what any change takes, and what its bytes took."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

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
