"""What may happen to a job: the events that ``resize.advance`` takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from scalai.core.job.function_proof import Numbers
from scalai.core.job.membership import Assign, Generation
from scalai.core.job.remembered import Remembered
from scalai.core.job.spacing import Measured
from scalai.core.job.underway import Underway

NOT_COVERED = "the snapshots that survive do not cover the state"


@dataclass(frozen=True, slots=True)
class HostJoined:
    """An agent came; of a host that takes part already: in place of another one, whose workers are
    gone. ``covered`` are the generations that the hosts now present hold wholly, oldest
    first; ``has_parts``: it holds a part of some generation, so the job has a state that must not
    be lost. Of what it brings these are ``obsolete``: numbers of generations that the job has
    passed. ``sealed`` are generations that are known, with the hosts whose sealed part belongs to
    it and was not renamed yet."""

    host: str
    slots: int
    covered: tuple[Generation, ...]
    has_parts: bool
    at: float
    obsolete: tuple[int, ...] = ()
    sealed: tuple[tuple[int, tuple[str, ...]], ...] = ()
    has_check: bool = False
    """Whether it has a health check, which it passes before it runs workers."""
    underway: Underway | None = None
    """The round that its workers are in, which another coordinator has begun."""
    last_round: int = 0
    """The highest number of a round that it has heard of."""
    remembered: Remembered | None = None
    """What it has kept of the job under another coordinator."""


@dataclass(frozen=True, slots=True)
class HostLeaving:
    """A host was told to leave: it drains. ``source`` says by whom; it has ``left_s`` seconds to go
    (None: no haste), after which it is gone whatever becomes of its drain where that ``is_final``.
    It holds so many bytes of the newest generation. A later one of the same host says what holds
    from then on."""

    host: str
    at: float
    source: str = ""
    left_s: float | None = None
    is_final: bool = False
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostStaying:
    """Every notice was withdrawn by which a host was to leave."""

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
class Stalled:
    """Workers of one host that make no steps: since when ``step`` was made, in seconds.
    ``longest_s``: how long the longest pause took that ended by itself; ``usual_s``: how long a
    step of this round takes at most, as a rule, 0 where that is not known yet; ``is_within``: all
    workers of the host say to be within a step; ``where`` they stand, by rank, as far as they have
    said so."""

    ranks: tuple[int, ...]
    step: int
    for_s: float
    longest_s: float = 0.0
    usual_s: float = 0.0
    is_within: bool = False
    where: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passes: what settles and what has a deadline depends on it. ``newest`` is the furthest
    step that any agent has told of; ``stalled``: of hosts whose workers make no steps."""

    at: float
    newest: int
    stalled: Mapping[str, Stalled] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Built:
    """Every worker of this host has built its model for the standby round."""

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
    round: int
    stop: int
    newest: int


@dataclass(frozen=True, slots=True)
class Held:
    """A host's workers cannot stop yet: ``what`` must end before, such as a save of the training's
    own that is in flight. They train on meanwhile. Told again while it lasts, with another
    ``what``."""

    host: str
    round: int
    stop: int
    what: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """Every living worker of this host stands at the stop, and has written nothing. ``differing``
    names what they hold as replicas and is not the same on all."""

    host: str
    round: int
    stop: int
    differing: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """A host's workers have written or died; its part is sealed."""

    host: str
    round: int


@dataclass(frozen=True, slots=True)
class Judged:
    """Whether the union of the snapshots is a state (``is_covered``), its step and number, and the
    hosts that have a part; else the ``reason`` (asked for by ``Judge``)."""

    is_covered: bool
    step: int = 0
    number: int = 0
    hosts: frozenset[str] = frozenset()
    reason: str = NOT_COVERED


@dataclass(frozen=True, slots=True)
class Frozen:
    """Workers of this host that live make no further update, and stand at these steps. Those of
    which nothing is known, or that were in the middle of an update, are left out."""

    host: str
    round: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rescued:
    """Of this host's workers those that stood at this step have written; there may be none."""

    host: str
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class RescueJudged:
    """What was written of this step covers the state, and has this number, with the hosts that have
    a part; None: it does not (asked for by ``JudgeRescue``)."""

    step: int
    number: int | None
    hosts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Sealed:
    """A host has sealed its part of a ``snapshot`` without a stop: on the way, or of the state at
    the start (``reason``)."""

    host: str
    round: int
    reason: str
    snapshot: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A host has nothing of a ``snapshot`` that was to be made on the way, and trains on."""

    host: str
    round: int
    snapshot: str


@dataclass(frozen=True, slots=True)
class SnapshotJudged:
    """What these hosts have sealed without a stop covers the state, and has this number (asked for
    by ``JudgeSnapshot``). ``measured``: what it has cost, where it was made on the way."""

    hosts: tuple[str, ...]
    step: int
    number: int
    measured: Measured | None = None


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
    """``is_chance``: a signal killed them, which says nothing of the degrees; ``is_refusal``: they
    said that they cannot run this job, and will say it again."""

    host: str
    round: int
    reason: str
    is_chance: bool = False
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Progressed:
    """This host has come further in the start: ``what`` it has done, such as how much has come to
    it from others."""

    host: str
    round: int
    what: str


@dataclass(frozen=True, slots=True)
class Unhooked:
    """The script of this host's workers trains, and nothing hooks its steps."""

    host: str
    round: int


@dataclass(frozen=True, slots=True)
class Published:
    """Every worker of this host has built its model and said what it holds and wants."""

    host: str
    round: int


@dataclass(frozen=True, slots=True)
class Restored:
    """Every worker of this host has filled its memory."""

    host: str
    round: int


@dataclass(frozen=True, slots=True)
class Proven:
    """What all workers have restored is what was committed (asked for by ``Prove``)."""

    round: int


@dataclass(frozen=True, slots=True)
class ProofFailed:
    """What the workers have restored is not what was committed, or what a host fetched is not what
    the hosts that gave it had. ``is_second``: a proof of the same generation has failed before,
    none has passed since, and nobody has found damage; ``can_reread``: the hosts hold it wholly
    without what was fetched and never proven."""

    round: int
    reason: str
    is_second: bool
    can_reread: bool


@dataclass(frozen=True, slots=True)
class Examined:
    """A host has read its part of a generation again; ``is_damaged``: some of it is not what was
    committed, and counts no more."""

    host: str
    generation: int
    is_damaged: bool


@dataclass(frozen=True, slots=True)
class Suspected:
    """What these hosts gave of a generation to another one is not what they had committed."""

    hosts: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Replicated:
    """A host has fetched what it is to keep for others (asked for by ``Replicate``), so many bytes,
    and had ``unchanged_bytes`` more; ``reason``: why it could not, empty where it could;
    ``is_lasting``: it could not later on either, because it has no room."""

    host: str
    order: int
    size_bytes: int
    reason: str = ""
    is_lasting: bool = False
    unchanged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """A person said which generation to go on from: newer ones are given up."""

    at: float


@dataclass(frozen=True, slots=True)
class Stepped:
    """Every worker of this host has made its first step, with these ``numbers``; or, behind its
    stop, one more up to the door of its update."""

    host: str
    round: int
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class Hooked:
    """The script has connected itself to the job after all."""

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


@dataclass(frozen=True, slots=True)
class Archived:
    """This host's part is written to the durable directory, or appears there, whatever ``order``
    asked for; or it cannot be, for a ``reason``."""

    host: str
    order: int
    size_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Looked:
    """A host has told what its durable directory holds."""

    host: str
    at: float


@dataclass(frozen=True, slots=True)
class HealthChecked:
    """A host has run its health check, as ``order`` asked; ``reason``: why it is not healthy."""

    host: str
    order: int
    is_healthy: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Knocked:
    """A host has knocked at others, as ``order`` asked, and does not hear these."""

    host: str
    order: int
    unheard: tuple[str, ...]


Event = (
    HostJoined | HostLeaving | HostStaying | HostLost | SlotsChanged | Rescaled | Ticked | Built
    | NotBuilt | Prepared | Held | Arrived | SnapshotWritten | Judged | Frozen | Rescued
    | RescueJudged | Sealed | Skipped | SnapshotJudged | Committed
    | Stopped | WorkersFailed | Stepped | Progressed | Unhooked | Hooked | Finished | Saved
    | NotSaved | Archived | Looked | Replicated | Published | Restored | Proven | ProofFailed
    | Resumed | HealthChecked | Knocked | Examined | Suspected
)  # fmt: skip
