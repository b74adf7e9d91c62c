"""Events of a job, input of its law (``resize.advance``): the reports of its hosts, and the facts
that the coordinator finds itself."""

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
        covered: Generations that the present hosts hold wholly, oldest first.
        has_parts: Whether it holds a part of some generation: a state that must not be lost.
        obsolete: Numbers of generations in its store that the job has passed.
        sealed: Known generations, each with the hosts that have yet to rename their sealed part.
        has_check: Whether it passes a health check before it runs workers.
        underway: The round of its workers, begun by another coordinator.
        last_round: The highest number of a round that it has heard of.
        remembered: The job as it was under another coordinator.
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
    """The agent is gone without a word; its store counts as lost until it comes back. ``covered``
    as in ``HostJoined``."""

    host: str
    covered: tuple[Generation, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Rescaled:
    """A person said ``scalai scale``: the limits inside ``assign`` changed, and perhaps the most
    hosts (None: as before)."""

    assign: Assign
    at: float
    max_hosts: int | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """A person chose the generation to go on from: newer ones are given up."""

    at: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passes. ``newest`` is the furthest step of any agent; ``stalled`` hosts make none."""

    at: float
    newest: int
    stalled: Mapping[str, Stalled] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judged:
    """Answer to ``JudgeStop``: whether the union of the snapshots is a state (``is_covered``), with
    its step, its number and the hosts of its parts; else the ``reason``."""

    is_covered: bool
    step: int = 0
    number: int = 0
    hosts: frozenset[str] = frozenset()
    reason: str = NOT_COVERED


@dataclass(frozen=True, slots=True)
class RescueJudged:
    """Answer to ``JudgeRescue``: the number of the state of this step and the hosts of its parts;
    None: it is none."""

    step: int
    number: int | None
    hosts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SnapshotJudged:
    """Answer to ``JudgeSnapshot``: the parts of these hosts are a state with this number.
    ``measured``: its cost, where it was made on the way."""

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
    fingerprints. ``is_second``: a proof of the same generation has failed before, none has passed
    since, and no host has found damage; ``can_reread``: the hosts hold it wholly without its
    fetched and unproven pieces."""

    round: int
    reason: str
    is_second: bool
    can_reread: bool


Event = (
    Reported | HostJoined | HostLeaving | HostLost | Rescaled | Resumed | Ticked | Judged
    | RescueJudged | SnapshotJudged | Proven | ProofFailed
)  # fmt: skip
