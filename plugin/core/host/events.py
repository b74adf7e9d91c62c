"""What may happen to a host: the events that ``law.advance`` takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scalai.core.host.state import Call, Slot
from scalai.core.messages.commands import Command
from scalai.core.messages.reports import Suspected
from scalai.core.messages.worker_messages import Source, WorkerRequest


@dataclass(frozen=True, slots=True)
class Seen:
    """How the present group of workers is, as their control page and the kernel have it.

    ``newest`` is the furthest step that any has ended; ``save`` the iteration of the save of the
    training's own that is in flight, and ``looks`` how often the workers have looked for its end.
    ``reached`` are ranks that have come to the agreed stop; ``ended`` the exit codes of those that
    have ended (0: or have come to their script's end and wait for the others).
    """

    newest: int = 0
    save: int | None = None
    looks: int = 0
    reached: frozenset[int] = frozenset()
    ended: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Commanded:
    """The coordinator has the host do something. ``seen``: how the workers were then, None where
    there are none."""

    command: Command
    seen: Seen | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Called:
    """A worker asks for something, and waits for the answer."""

    call: Call
    request: WorkerRequest


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The connection of a worker has ended. ``seen`` as of ``Commanded``."""

    round: int
    rank: int
    seen: Seen | None = None


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passes. ``seen`` as of ``Commanded``."""

    at: float
    seen: Seen | None = None


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """The workers of a round run."""

    round: int


@dataclass(frozen=True, slots=True)
class GroupNotStarted:
    """The workers of a round cannot be started."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """No worker of a round is alive (``EndGroup``); ``newest`` is the step that they had come
    to."""

    round: int
    newest: int


@dataclass(frozen=True, slots=True)
class GroupOver:
    """The workers of a round have ended by themselves (``Poll``): no ``failures`` means that every
    one came to the end of its script. ``out_of_memory`` and ``is_chance`` as of
    ``reports.Failed``."""

    round: int
    failures: tuple[str, ...] = ()
    out_of_memory: bool = False
    is_chance: bool = False


@dataclass(frozen=True, slots=True)
class Proposed:
    """The proposed stop was written, and then the workers were read (``Propose``)."""

    round: int
    stop: int
    newest: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreed stop was written (``Agree``)."""

    round: int
    stop: int


@dataclass(frozen=True, slots=True)
class Spaced:
    """It was written how many steps lie between snapshots from ``begin`` on, and then the workers
    were read (``Space``)."""

    round: int
    begin: int
    every: int
    newest: int


@dataclass(frozen=True, eq=False, slots=True)
class Reserved:
    """There are files for the next snapshot of a round (``Reserve``)."""

    round: int
    slot: Slot


@dataclass(frozen=True, slots=True)
class NoRoom:
    """There is no room for the next snapshot of a round."""

    round: int
    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class Sealed:
    """A snapshot is sealed (``Seal``): its manifest, as bytes."""

    round: int
    slot: Slot
    manifest: bytes


@dataclass(frozen=True, eq=False, slots=True)
class Fetched:
    """What the workers of a round restore is on this host (``Fetch``): for each rank what it reads.
    ``grown`` is the manifest of the host's part with what came from others, as bytes, None where
    nothing did. Times in seconds. ``suspected``: who gave what is damaged."""

    round: int
    sources: Mapping[int, Source]
    grown: bytes | None
    plan_s: float
    move_s: float
    bytes_local: int
    bytes_remote: int
    suspected: Suspected | None = None


@dataclass(frozen=True, slots=True)
class NotProven:
    """What came from other hosts is not what these had committed."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """So many bytes have come from other hosts for a round."""

    round: int
    bytes: int


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """Work for a round has failed for want of room, of a file or of a process."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommitDone:
    """A sealed snapshot has its number (``TryCommit``)."""

    generation: int


@dataclass(frozen=True, slots=True)
class CommitWaits:
    """There is no room for the commit of a generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class NothingToCommit:
    """The snapshot that is to be a generation is not sealed here; ``found`` says what is."""

    generation: int
    found: str


@dataclass(frozen=True, slots=True)
class Holds:
    """The store holds these generations."""

    generations: frozenset[int]


@dataclass(frozen=True, slots=True)
class Replicated:
    """What this host keeps for others is here (``Replicate``), so many bytes of it have come, and
    ``unchanged_bytes`` more it had: ``grown`` is the manifest of its part, as bytes, None where
    nothing came; or there is a ``reason`` why not, ``is_lasting`` where it has no room.
    ``suspected``: who gave what is damaged."""

    order: int
    grown: bytes | None
    size_bytes: int
    reason: str = ""
    is_lasting: bool = False
    unchanged_bytes: int = 0
    suspected: Suspected | None = None


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """A first SIGTERM or SIGINT: the host drains."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """A ``source`` says that this host will be taken away in so many seconds (None: at some time).
    What a source has said before holds no more."""

    source: str
    left_s: float | None


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn:
    """A source says that this host stays after all."""

    source: str


@dataclass(frozen=True, slots=True)
class SlotsChanged:
    """The device probe reports another number."""

    slots: int


@dataclass(frozen=True, slots=True)
class Knocked:
    """Of the hosts at which ``order`` had this one knock it does not hear these."""

    order: int
    unheard: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HealthChecked:
    """The health check that ``order`` asked for has ended; ``reason``: why it has failed."""

    order: int
    is_healthy: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Expelled:
    """The job goes on without this host, which was paused or cut off."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rejoined:
    """The host is part of the job again."""


@dataclass(frozen=True, slots=True)
class NotRejoined:
    """The host cannot join again."""

    reason: str


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """The coordinator is gone, or refuses this host."""

    reason: str


@dataclass(frozen=True, slots=True)
class CoordinatorReplaced:
    """Another coordinator has taken the place of one that is gone."""


@dataclass(frozen=True, slots=True)
class ActionFailed:
    """An action has failed for want of room, of a file or of a process."""

    reason: str


Event = (
    Commanded | Called | WorkerGone | Ticked | GroupStarted | GroupNotStarted | GroupEnded
    | GroupOver | Proposed | Agreed | Spaced | Reserved | NoRoom | Sealed | Fetched | NotProven
    | Moved
    | WorkFailed | CommitDone | CommitWaits | NothingToCommit | Holds | Replicated | LeaveAsked
    | Noticed | NoticeWithdrawn | SlotsChanged | HealthChecked | Knocked | Expelled | Rejoined
    | NotRejoined
    | CoordinatorLost | CoordinatorReplaced | ActionFailed
)  # fmt: skip
