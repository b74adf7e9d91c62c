"""What may happen to a job: the events that ``resize.advance`` takes."""

from dataclasses import dataclass

from scalai.core.membership import Assign, Generation


@dataclass(frozen=True, slots=True)
class HostJoined:
    """An agent came. ``covered`` are the generations that the hosts now present hold wholly, oldest
    first; ``has_parts``: it holds a part of some generation, so the job has a state that must not
    be lost."""

    host: str
    slots: int
    covered: tuple[Generation, ...]
    has_parts: bool
    at: float


@dataclass(frozen=True, slots=True)
class HostLeaving:
    """A first SIGTERM or SIGINT: the host drains."""

    host: str
    at: float


@dataclass(frozen=True, slots=True)
class HostLost:
    """The agent is gone without a word; its store counts as lost until it comes back. ``covered``
    as in ``HostJoined``."""

    host: str
    covered: tuple[Generation, ...]
    at: float


@dataclass(frozen=True, slots=True)
class SlotsChanged:
    """The device probe of a host reports another number."""

    host: str
    slots: int
    at: float


@dataclass(frozen=True, slots=True)
class Rescaled:
    """A person said ``scalai scale``: the limits inside ``assign`` changed, and perhaps how many
    hosts there may be (None: as before)."""

    assign: Assign
    at: float
    max_hosts: int | None = None


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passes; only settling depends on it. ``newest`` is the furthest step that any agent has
    told of."""

    at: float
    newest: int


@dataclass(frozen=True, slots=True)
class Built:
    """Every worker of this host has built its model for the round ahead."""

    host: str
    round: int


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """This host cannot build a round beside the present one, or failed to."""

    host: str
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A host wrote the proposed stop and then read its workers: ``newest`` is the furthest."""

    host: str
    stop: int
    newest: int


@dataclass(frozen=True, slots=True)
class Deposited:
    """A host's workers have deposited or died; its part is sealed."""

    host: str
    round: int


@dataclass(frozen=True, slots=True)
class Judged:
    """Whether the union of the deposits covers every tensor, their step and number, and the hosts
    that have a part (asked for by ``Judge``)."""

    is_covered: bool
    step: int = 0
    number: int = 0
    hosts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """A snapshot, or the state at the start, is sealed by every active host, without a stop, and
    covers."""

    hosts: tuple[str, ...]
    step: int
    number: int


@dataclass(frozen=True, slots=True)
class Committed:
    host: str
    generation: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """No worker of this host is alive; ``newest`` is the step that they had come to."""

    host: str
    round: int
    newest: int = 0


@dataclass(frozen=True, slots=True)
class WorkersFailed:
    host: str
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """Every worker of this host has made its first step, or has stored the state at the start."""

    host: str
    round: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Every worker of this host came to the end of its script."""

    host: str
    round: int


@dataclass(frozen=True, slots=True)
class Saved:
    """This host's part is in the durable directory."""

    host: str


@dataclass(frozen=True, slots=True)
class NotSaved:
    """This host's part could not be written to the durable directory."""

    host: str
    reason: str


Event = (
    HostJoined | HostLeaving | HostLost | SlotsChanged | Rescaled | Ticked | Built | NotBuilt
    | Prepared | Deposited | Judged | Snapshotted | Committed | Stopped | WorkersFailed | Stepped
    | Finished | Saved | NotSaved
)  # fmt: skip
