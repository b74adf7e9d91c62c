"""Events of a job, input of its law (``resize.advance``): reports of hosts, and the coordinator's
own findings."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scalai.core.job.membership import Assign, Generation
from scalai.core.job.remembered import Remembered, Underway
from scalai.core.job.spacing import SnapshotCost
from scalai.core.messages.reports import Report, Stalled

NOT_COVERED = "the snapshots that survive do not cover the state"


@dataclass(frozen=True, slots=True)
class Reported:
    """A report of a host."""

    host: str
    report: Report


@dataclass(frozen=True, slots=True)
class HostJoined:
    """An agent came; it replaces the present agent of its host, whose workers are gone.

    Attributes:
        covered: Whole generations on the present hosts, oldest first.
        has_parts: It holds a part of some generation: a state that must not be lost.
        obsolete: Numbers of generations in its store that the job has passed.
        sealed: Known generations, each with hosts that have yet to rename their sealed part.
        has_check: It passes a health check before it runs workers.
        underway: Its workers' round, begun by another coordinator.
        last_round: Highest known round number.
        remembered: The job under another coordinator.
    """

    host: str
    slots: int
    covered: tuple[Generation, ...]
    has_parts: bool
    at: float
    obsolete: tuple[int, ...] = ()
    sealed: tuple[tuple[int, tuple[str, ...]], ...] = ()
    has_check: bool = False
    underway: Underway | None = None
    last_round: int = 0
    remembered: Remembered | None = None


@dataclass(frozen=True, slots=True)
class HostLeaving:
    """A host reports ``Leaving``, and holds ``size_bytes`` of the newest generation. A later one of
    the same host replaces it."""

    host: str
    at: float
    source: str = ""
    left_s: float | None = None
    is_final: bool = False
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostLost:
    """The agent is lost; its store counts as lost until it returns. ``covered`` as in
    ``HostJoined``."""

    host: str
    covered: tuple[Generation, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Rescaled:
    """A person ran ``scalai scale``: the limits inside ``assign`` changed, and perhaps
    ``max_hosts`` (None: unchanged)."""

    assign: Assign
    at: float
    max_hosts: int | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """A person chose the generation to go on from: newer ones are given up."""

    at: float


@dataclass(frozen=True, slots=True)
class SnapshotAsked:
    """A person asked for a generation beside the schedule."""

    at: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passes. ``newest``: furthest step of any agent; ``stalled``: hosts without steps."""

    at: float
    newest: int
    stalled: Mapping[str, Stalled] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judged:
    """Answer to ``JudgeStop`` and ``JudgeRescue``: the united snapshots are a state
    (``is_covered``) with its step, number and hosts, or not, with the ``reason``."""

    is_covered: bool
    step: int = 0
    number: int = 0
    hosts: frozenset[str] = frozenset()
    reason: str = NOT_COVERED


@dataclass(frozen=True, slots=True)
class SnapshotJudged:
    """Answer to ``JudgeSnapshot``: number and hosts of the state. ``measured``: cost of a snapshot
    on the way."""

    hosts: tuple[str, ...]
    step: int
    number: int
    measured: SnapshotCost | None = None


@dataclass(frozen=True, slots=True)
class Proven:
    """Answer to ``Prove``: the restored state of all workers is the committed one."""

    round: int


@dataclass(frozen=True, slots=True)
class ProofFailed:
    """The restored state differs from the committed one, or fetched bytes from their committed
    fingerprints.

    ``is_second``: an earlier proof of the generation failed, none has passed since, and no host has
    found damage. ``can_reread``: the hosts hold it wholly without fetched and unproven pieces.
    """

    round: int
    reason: str
    is_second: bool
    can_reread: bool


Event = (
    Reported | HostJoined | HostLeaving | HostLost | Rescaled | Resumed | SnapshotAsked | Ticked
    | Judged
    | SnapshotJudged | Proven | ProofFailed
)  # fmt: skip
