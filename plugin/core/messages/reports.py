"""Reports of a host to the coordinator, numbered by incarnation of the agent; each counts once, in
order. The job's law gets them with their host (``events.Reported``)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scalai.core.job.function_proof import Numbers
from scalai.core.tensors.collection import Collection

# ---------------------------------------------------------------------- a start


@dataclass(frozen=True, slots=True)
class Built:
    """All workers of the host have built their standby models; or the host cannot build a round
    beside the present one, or failed to, for a ``reason``."""

    round: int
    reason: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Holding:
    """Pieces (``rows``) of all workers of the host, and the bytes that fit into its store. Sent
    before ``Published`` in a job with replicas."""

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
    """Bytes of the state have arrived from other hosts."""

    round: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Unproven:
    """Bytes from other hosts differ from their committed fingerprints."""

    round: int
    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class Restored:
    """All workers of the host have filled their memory with ``rows``; ``fingerprints`` [rows]: of
    the values read."""

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
    """All workers of the host have made their first step, with these ``numbers``; or one more
    behind their stop, without its update."""

    round: int
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class Hooked:
    """The script of the host's workers trains without hooks on its steps (``is_hooked`` false), or
    has connected itself after all."""

    round: int
    is_hooked: bool = True


# ---------------------------------------------------------------------- a stop


@dataclass(frozen=True, slots=True)
class Prepared:
    """The host wrote the proposed stop, then read its workers: ``newest`` is the furthest step."""

    round: int
    stop: int
    newest: int


@dataclass(frozen=True, slots=True)
class Held:
    """The host's workers cannot stop before the end of ``what``, such as an asynchronous save of
    the script. They train on. Repeated while it lasts, with a new ``what``."""

    round: int
    stop: int
    what: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """All living workers of the host stand at the stop, and have written nothing. ``differing``:
    replicas with different values."""

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
    """The round cannot go on. ``is_chance``: by a signal, so the degrees are not to blame;
    ``is_refusal``: the workers cannot run the job, and a retry would not help."""

    round: int
    reason: str
    out_of_memory: bool = False
    is_chance: bool = False
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Frozen:
    """Living workers of the host make no further update, and stand at these steps; without those
    amid an update, and silent ones."""

    round: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rescued:
    """The host's workers at this step, if any, have written."""

    round: int
    step: int


SILENT = "does not answer"
"""First words of the place of a stopped rank, or of one hung in the kernel."""
FRAMES_APART = " < "
"""Separator of frames in a place, innermost first."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """Workers of a host without progress for ``for_s`` seconds since ``step``.

    Attributes:
        longest_s: Longest completed pause, in seconds.
        usual_s: Usual slow step of this round, in seconds; 0: unknown.
        is_within: All workers of the host are within a step.
        where: Known places of ranks in their code.
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
    """The host's part of a ``snapshot`` is sealed; ``manifest`` as bytes, None if all workers died
    before writing. ``reason``: ``stop``, ``snapshot``, ``start`` or ``emergency``."""

    round: int
    reason: str
    snapshot: str
    manifest: bytes | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Skipped:
    """The host has no part of a ``snapshot`` on the way, and trains on."""

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
    """The host has fetched its replicas for others: ``size_bytes`` arrived, ``unchanged_bytes``
    were there. ``reason``: of a failure, else empty; ``is_lasting``: a retry would fail too, for
    want of room."""

    order: int
    size_bytes: int
    reason: str = ""
    is_lasting: bool = False
    unchanged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Suspected:
    """These hosts gave bytes that differ from a generation's committed fingerprints, or report
    damage themselves."""

    generation: int
    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Doubted:
    """The host has dropped the fetched part of a doubted generation. ``manifest`` of the rest;
    None: nothing is left."""

    generation: int
    manifest: bytes | None


@dataclass(frozen=True, slots=True)
class Examined:
    """The host has read its part of a generation in ``directory`` again: a line for each damaged
    piece, and the ``manifest`` of the rest as bytes; None: nothing is left."""

    generation: int
    damage: tuple[str, ...]
    directory: str
    manifest: bytes | None = None


# ---------------------------------------------------------------------- the durable directory


@dataclass(frozen=True, slots=True)
class Attached:
    """Contents of the durable directory: manifests as bytes, and numbers of unreadable generations
    with the reason."""

    manifests: tuple[bytes, ...]
    damaged: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """The host's part is in the durable directory, or cannot be written there, for a ``reason``."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Archived:
    """The host's part is written to the durable directory, or appears there, by ``order``; or not,
    for a ``reason``."""

    order: int
    size_bytes: int = 0
    reason: str = ""


# ---------------------------------------------------------------------- the host itself


@dataclass(frozen=True, slots=True)
class Leaving:
    """A ``source`` told the host to drain. ``left_s``: seconds left (None: no haste); if
    ``is_final``, the host is gone then, drained or not."""

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
    """Result of the health check by ``order``; ``reason``: of a failure."""

    order: int
    is_healthy: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Knocked:
    """Peers of the probe by ``order`` without a connection to this host."""

    order: int
    unheard: tuple[str, ...]


Report = (
    Built | Holding | Published | Moved | Unproven | Restored | Stepped | Hooked | Prepared | Held
    | Arrived | Stopped | Finished | WorkersFailed | Frozen | Rescued | Sealed | Skipped
    | Committed | Grown | Replicated | Suspected | Doubted | Examined | Attached | Saved | Archived
    | Leaving | Staying | Slots | HealthChecked | Knocked
)  # fmt: skip
