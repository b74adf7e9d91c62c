"""What a job's time goes into: training, or a reason of a standstill. The reasons are categories of
Google's ml-goodput-measurement, in lower case."""

from collections.abc import Mapping

from scalai.core.job.membership import TRAINING, Job, Phase
from scalai.launch.coordinator.timeline import Kind

TRAINS = "training"
STARTUP, RECOVERY = "program_startup", "infrastructure_recovery"
SAVE, RESTORE = "checkpoint_save", "checkpoint_restore"
_BY_KIND: Mapping[Kind, str] = {
    "start": STARTUP, "recovery": RECOVERY, "grow": "elastic_scale_up",
    "shrink": "elastic_slice_down", "notice": "elastic_slice_down",
    "degrees": "elastic_reinitialization",
}  # fmt: skip
REASONS = (*dict.fromkeys(_BY_KIND.values()), SAVE, RESTORE)
_STEPPING = (*TRAINING, Phase.PREPARING, Phase.DRAINING)
_WRITING = (Phase.SNAPSHOTTING, Phase.COMMITTING, Phase.SAVING)
_REPAIRING = (Phase.FREEZING, Phase.RESCUING, Phase.EXAMINING)


def use_of(job: Job, kind: Kind) -> str | None:
    """What the present time goes into; None: the job is over.

    Args:
        kind: Of the present or the newest change.
    """
    phase = job.phase
    if phase is Phase.ENDED:
        return None
    if phase in _STEPPING or job.takeover.pending is not None:
        return TRAINS
    if phase in _REPAIRING:
        return RECOVERY
    if phase in _WRITING:
        return SAVE
    if job.change.ran is None:
        return STARTUP
    start, current = job.attempt, job.current
    if phase is Phase.STARTING and start.source is not None and not start.is_proven:
        # Counted: every report of a host asks.
        if current is not None and len(start.published) >= len(current.members):
            return RESTORE
    return RECOVERY if phase is Phase.WAITING else _BY_KIND[kind]


class Spending:
    """Adds up the seconds of each use."""

    def __init__(self, now: float, *, is_successor: bool = False) -> None:
        self.seconds = dict.fromkeys((TRAINS, *REASONS), 0.0)
        self._use: str | None = TRAINS if is_successor else STARTUP
        self._since = now

    def note(self, use: str | None, now: float) -> None:
        """Note the use from now on."""
        if self._use is not None:
            self.seconds[self._use] += max(0.0, now - self._since)
        self._use, self._since = use, now
