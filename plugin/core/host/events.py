"""Input of a host's law (``law.advance``): the coordinator's commands, calls of workers, results of
actions, and reports of the agent's own parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scalai.core.host.state import Call, Slot
from scalai.core.messages.commands import Command, Space
from scalai.core.messages.reports import Report
from scalai.core.messages.worker_messages import Source, WorkerRequest


@dataclass(frozen=True, slots=True)
class GroupSeen:
    """The present group of workers, by their control page and the kernel.

    Attributes:
        newest: Furthest completed step of any worker.
        save: Iteration of the training's own save in flight.
        looks: Number of the workers' looks for the end of a save.
        reached: Ranks at the agreed stop.
        ended: Exit code of ended workers by rank; 0 also for a wait at the end of the script.
    """

    newest: int = 0
    save: int | None = None
    looks: int = 0
    reached: frozenset[int] = frozenset()
    ended: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Commanded:
    """A command of the coordinator. ``seen``: the workers at its arrival, None without workers."""

    command: Command
    seen: GroupSeen | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Called:
    """A worker's call; it waits for the answer."""

    call: Call
    request: WorkerRequest


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The connection of a worker has ended. ``seen`` as in ``Commanded``."""

    round: int
    rank: int
    seen: GroupSeen | None = None


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time in seconds, from the agent's clock. ``seen`` as in ``Commanded``."""

    at: float
    seen: GroupSeen | None = None


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
    """No worker of a round is alive (``EndGroup``); ``newest`` is their last step."""

    round: int
    newest: int


@dataclass(frozen=True, slots=True)
class GroupOver:
    """The workers of a round have ended by themselves (``PollGroup``); without ``failures`` each
    came to the end of its script. ``out_of_memory`` and ``is_chance`` as in a reported failure."""

    round: int
    failures: tuple[str, ...] = ()
    out_of_memory: bool = False
    is_chance: bool = False


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreed stop is on the workers' page (``commands.Agree``)."""

    round: int
    stop: int


@dataclass(frozen=True, slots=True)
class Spaced:
    """The spacing of snapshots is on the workers' page (``command``); ``newest`` was their furthest
    step afterwards."""

    command: Space
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
class SealDone:
    """A snapshot is sealed (``Seal``): its manifest, as bytes."""

    round: int
    slot: Slot
    manifest: bytes


@dataclass(frozen=True, eq=False, slots=True)
class WantedFetched:
    """All pieces for the workers of a round are on this host (``FetchWanted``): the source of each
    rank. Times in seconds."""

    round: int
    sources: Mapping[int, Source]
    plan_s: float
    move_s: float
    bytes_local: int
    bytes_remote: int


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """Work for a round has failed for want of room, of a file or of a process. ``round`` None: an
    action itself has failed, in the present round."""

    round: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class CommitWaits:
    """There is no room for the commit of a generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class NothingToCommit:
    """The snapshot of a generation is not sealed here; ``found`` names the sealed ones."""

    generation: int
    found: str


@dataclass(frozen=True, slots=True)
class Holds:
    """The store holds these generations."""

    generations: frozenset[int]


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """A first SIGTERM or SIGINT: the host drains."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """A ``source`` announces the removal of this host in ``left_s`` seconds (None: at some time).
    It replaces an earlier notice of the same source."""

    source: str
    left_s: float | None


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn:
    """A source takes its notice back."""

    source: str


@dataclass(frozen=True, slots=True)
class Expelled:
    """The job goes on without this host, after a pause or a cut of its network."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rejoined:
    """The host is part of the job again."""


@dataclass(frozen=True, slots=True)
class JobLost:
    """The coordinator is gone or refuses this host, or the host cannot join again."""

    reason: str


@dataclass(frozen=True, slots=True)
class CoordinatorReplaced:
    """Another coordinator has taken the place of a lost one."""


Event = (
    Commanded | Called | WorkerGone | TimePassed | GroupStarted | GroupNotStarted | GroupEnded
    | GroupOver | Agreed | Spaced | Reserved | NoRoom | SealDone | WantedFetched | WorkFailed
    | CommitWaits | NothingToCommit | Holds | LeaveAsked | Noticed | NoticeWithdrawn | Expelled
    | Rejoined | JobLost | CoordinatorReplaced | Report
)  # fmt: skip
