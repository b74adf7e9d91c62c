"""Input of a host's law (``law.advance``): the coordinator's commands, calls of workers, results of
actions, and reports of the agent's own parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scalai.core.host.actions import Action
from scalai.core.host.standby import Standby
from scalai.core.host.state import Call, SnapshotFiles
from scalai.core.messages.commands import Command, Commit
from scalai.core.messages.reports import Report
from scalai.core.messages.worker_messages import ReadOrder, Source, WorkerRequest


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


@dataclass(frozen=True, eq=False, slots=True)
class RestorePlanned:
    """The restore of a round is planned, in ``plan_s`` seconds: each rank's source, with all that
    this host holds. ``bytes_remote`` come from other hosts."""

    round: int
    sources: Mapping[int, Source]
    plan_s: float
    bytes_local: int
    bytes_remote: int


@dataclass(frozen=True, eq=False, slots=True)
class PiecesHere:
    """Pieces of other hosts are here and compared: orders to read them, by rank."""

    round: int
    orders: Mapping[int, ReadOrder]


Result = SnapshotFiles | Standby | bytes | int | None


@dataclass(frozen=True, slots=True)
class Done:
    """Work is done, with the result in the words of its action. ``Space``: furthest step of the
    workers once the interval is on their page."""

    work: Action
    result: Result = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Work has failed for want of room, of a file or of a process."""

    work: Action
    reason: str


@dataclass(frozen=True, slots=True)
class GroupOver:
    """The workers of a round have ended by themselves (``PollGroup``); without ``failures`` each
    came to the end of its script. ``out_of_memory`` and ``is_chance`` as in a reported failure."""

    round: int
    failures: tuple[str, ...] = ()
    out_of_memory: bool = False
    is_chance: bool = False


@dataclass(frozen=True, slots=True)
class NothingToCommit:
    """The snapshot of a ``Commit`` is not sealed here; ``found`` names the sealed ones."""

    command: Commit
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
class JobLost:
    """The coordinator is gone or refuses this host."""

    reason: str


@dataclass(frozen=True, slots=True)
class CoordinatorReplaced:
    """Another coordinator has taken the place of a lost one."""


Event = (
    Commanded | Called | WorkerGone | TimePassed | Done | Failed | RestorePlanned | PiecesHere
    | GroupOver | NothingToCommit | Holds | LeaveAsked | Noticed | NoticeWithdrawn | Expelled
    | JobLost | CoordinatorReplaced | Report
)  # fmt: skip
