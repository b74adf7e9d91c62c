"""Reports of a host to the coordinator. Those of one incarnation of an agent are numbered and count
once, in order. The law of the job takes a report with its host (``events.Reported``)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scalai.core.job.function_proof import Numbers
from scalai.core.tensors.collection import Collection

# ---------------------------------------------------------------------- a start


@dataclass(frozen=True, slots=True)
class Built:
    """All workers of the host have built their models for the standby round."""

    round: int


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """The host cannot build a round beside the present one, or failed to."""

    round: int
    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class Holding:
    """``rows`` held by all workers of the host together, and the bytes that its store can hold.
    Comes before ``Published``, where replicas are kept."""

    round: int
    rows: Collection
    room_bytes: int

    def __post_init__(self) -> None:
        self.rows.check()


@dataclass(frozen=True, slots=True)
class Published:
    """All workers of the host have built their models, with these tensors."""

    round: int
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of the state have come from other hosts."""

    round: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Unproven:
    """Bytes from other hosts differ from their committed fingerprints."""

    round: int
    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class Restored:
    """All workers of the host have filled their memory: their ``rows``, with the fingerprints
    [rows] of the values that they read."""

    round: int
    rows: Collection
    fingerprints: npt.NDArray[np.uint64]
    seconds: Mapping[str, float]
    bytes_local: int
    bytes_remote: int

    def __post_init__(self) -> None:
        self.rows.check()
        if self.fingerprints.shape != (len(self.rows),):
            raise ValueError(f"{self.fingerprints.shape} fingerprints of {len(self.rows)} pieces")


@dataclass(frozen=True, slots=True)
class Stepped:
    """All workers of the host have made their first step, with these ``numbers``; or, behind their
    stop, one more up to the door of its update."""

    round: int
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class Unhooked:
    """The script of the host's workers trains, and nothing hooks its steps."""

    round: int


@dataclass(frozen=True, slots=True)
class Hooked:
    """The script has connected itself to the job after all."""

    round: int


# ---------------------------------------------------------------------- a stop


@dataclass(frozen=True, slots=True)
class Prepared:
    """The host wrote the proposed stop and then read its workers: ``newest`` is the furthest
    step."""

    round: int
    stop: int
    newest: int


@dataclass(frozen=True, slots=True)
class Held:
    """The host's workers cannot stop yet: ``what`` must end before, such as an asynchronous save of
    the training's own. They train on meanwhile. Repeated while it lasts, with another ``what``."""

    round: int
    stop: int
    what: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """All living workers of the host stand at the stop, and have written nothing. ``differing``
    names replicas whose values differ between them."""

    round: int
    stop: int
    differing: str = ""


@dataclass(frozen=True, slots=True)
class Stopped:
    """No worker of the host is alive; ``newest`` is their last step."""

    round: int
    newest: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """All workers of the host came to the end of their script."""

    round: int


# ---------------------------------------------------------------------- a failure


@dataclass(frozen=True, slots=True)
class WorkersFailed:
    """The round cannot go on. ``is_chance``: a signal was the cause, and the degrees are not to
    blame; ``is_refusal``: the workers cannot run the job so, and would say it again."""

    round: int
    reason: str
    out_of_memory: bool = False
    is_chance: bool = False
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Frozen:
    """Living workers of the host make no further update, and stand at these steps. Workers in the
    middle of an update, and silent ones, are left out."""

    round: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rescued:
    """The host's workers that stood at this step have written; there may be none."""

    round: int
    step: int


SILENT = "does not answer"
"""First words of the place of a rank that was stopped, or hangs in the kernel."""
FRAMES_APART = " < "
"""Between two frames of a place, the innermost first."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """Workers of a host without progress: seconds since ``step`` was made.

    Attributes:
        longest_s: Seconds of the longest pause that ended by itself.
        usual_s: Seconds of a usual slow step of this round; 0: unknown.
        is_within: Whether all workers of the host report that they are within a step.
        where: Place of a rank in its code, as far as known.
    """

    ranks: tuple[int, ...]
    step: int
    for_s: float
    longest_s: float = 0.0
    usual_s: float = 0.0
    is_within: bool = False
    where: tuple[tuple[int, str], ...] = ()


# ---------------------------------------------------------------------- snapshots and generations


@dataclass(frozen=True, slots=True)
class Sealed:
    """The host's part of a ``snapshot`` is sealed; ``manifest`` as bytes, None where all workers
    had died before they wrote. ``reason`` is ``stop``, ``snapshot``, ``start`` or ``emergency``."""

    round: int
    reason: str
    snapshot: str
    manifest: bytes | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Skipped:
    """The host has nothing of a ``snapshot`` on the way, and trains on."""

    round: int
    snapshot: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The host has renamed its sealed part to this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Grown:
    """The host holds more of a generation than before: the manifest of its part, as bytes."""

    manifest: bytes


@dataclass(frozen=True, slots=True)
class Replicated:
    """The host has fetched the replicas that it keeps for others: ``size_bytes`` came, and
    ``unchanged_bytes`` were there before. ``reason``: why it could not, empty where it could;
    ``is_lasting``: another try would fail too, for want of room."""

    order: int
    size_bytes: int
    reason: str = ""
    is_lasting: bool = False
    unchanged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Suspected:
    """These hosts gave bytes of a generation that differ from its committed fingerprints, or report
    damage themselves."""

    generation: int
    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Doubted:
    """The host has given up the fetched part of a doubted generation: the manifest of the rest,
    None where nothing is left."""

    generation: int
    manifest: bytes | None


@dataclass(frozen=True, slots=True)
class Examined:
    """The host has read its part of a generation again, in ``directory``: a line for each damaged
    piece, and the ``manifest`` of the rest as bytes, None where nothing is left."""

    generation: int
    damage: tuple[str, ...]
    directory: str
    manifest: bytes | None = None


# ---------------------------------------------------------------------- the durable directory


@dataclass(frozen=True, slots=True)
class Attached:
    """Contents of the durable directory: manifests as bytes, and the numbers of unreadable
    generations with the reason."""

    manifests: tuple[bytes, ...]
    damaged: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """The host's part is in the durable directory; or cannot be written there, for a ``reason``."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Archived:
    """The host's part is written to the durable directory, or appears there, as ``order`` asked; or
    cannot be, for a ``reason``."""

    order: int
    size_bytes: int = 0
    reason: str = ""


# ---------------------------------------------------------------------- the host itself


@dataclass(frozen=True, slots=True)
class Leaving:
    """A ``source`` told the host to drain. ``left_s``: seconds left (None: no haste); the host is
    gone then, drained or not, where that ``is_final``."""

    source: str = ""
    left_s: float | None = None
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Staying:
    """All notices to leave are withdrawn."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Workers that the host can run, by its device probe."""

    slots: int


@dataclass(frozen=True, slots=True)
class HealthChecked:
    """The health check asked for by ``order`` has ended; ``reason``: why it failed."""

    order: int
    is_healthy: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Knocked:
    """Hosts that this one does not hear, among those at which ``order`` had it knock."""

    order: int
    unheard: tuple[str, ...]


Report = (
    Built | NotBuilt | Holding | Published | Moved | Unproven | Restored | Stepped | Unhooked
    | Hooked | Prepared | Held | Arrived | Stopped | Finished | WorkersFailed | Frozen | Rescued
    | Sealed | Skipped | Committed | Grown | Replicated | Suspected | Doubted | Examined | Attached
    | Saved | Archived | Leaving | Staying | Slots | HealthChecked | Knocked
)  # fmt: skip
