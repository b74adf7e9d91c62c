"""Who takes part in a job, and what happens when that changes: state and event in, state and
actions out.

This module has the values; ``resize.advance`` has the rules. The coordinator is the loop around
``advance``: it feeds events in (a host joined, every worker has deposited) and carries the actions
out (send this command to these hosts). One pass through the phases is a resize:

    running -> preparing -> draining -> committing -> stopping -> starting -> running

Source: the membership of torch.distributed.elastic 2.13 (rendezvous/dynamic_rendezvous.py). Differs
in: the workers stop at one agreed step instead of where a signal finds them, and a change never
takes a state away before the next one lives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from scalai.core.degrees import Degrees


class Phase(Enum):
    """What the job as a whole is doing."""

    WAITING = "waiting"  # for enough hosts, or for a host whose store is needed
    STARTING = "starting"  # a round was assigned: relaunch, plan, move, restore, proof, first step
    RUNNING = "running"
    BUILDING = "building"  # the next round's workers build their models; the present ones train on
    PREPARING = (
        "preparing"  # a stop was proposed; every agent says whether its workers are below it
    )
    DRAINING = "draining"  # the stop was agreed; workers reach it and deposit
    COMMITTING = "committing"  # the deposits cover; every host renames its part
    STOPPING = "stopping"  # workers are made to exit
    SAVING = "saving"  # nobody stays: the generation goes to the durable directory
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Host:
    """An agent and its devices. ``order`` is the sequence number of its joining: survivors keep
    their relative order."""

    name: str
    slots: int
    order: int
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which hosts run how many workers at which degrees, and why. Hosts in rank order; 0 workers:
    idle, serves its store."""

    workers: tuple[tuple[str, int], ...]
    degrees: Degrees
    micro_batch_size: int | None
    reason: str

    @property
    def active(self) -> tuple[str, ...]:
        """Hosts that have workers."""
        return tuple(name for name, count in self.workers if count)

    def is_same_as(self, other: "Assignment") -> bool:
        """Whether the same workers would run at the same degrees; idle hosts do not count."""
        mine, its = ([entry for entry in a.workers if entry[1]] for a in (self, other))
        return mine == its and self.degrees == other.degrees


@dataclass(frozen=True, slots=True)
class Ahead:
    """A round whose workers are started before the present ones stop."""

    round: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Generation:
    """A committed state: its number, the optimizer step, and the hosts that hold parts of it."""

    number: int
    step: int
    hosts: frozenset[str]


Assign = Callable[[tuple[tuple[str, int], ...], Degrees | None], Assignment | None]
"""(hosts and their slots in rank order, present degrees) -> an assignment, or None where no world
fits yet."""


@dataclass(frozen=True, slots=True)
class Job:
    """The whole state of a job. ``awaited`` are the hosts whose answer ends the present phase."""

    assign: Assign
    settle_s: float = 0.0
    max_hosts: int = 1
    failures_left: int = 3
    has_durable_dir: bool = False
    is_elastic: bool = True
    """False: a plain job, whose workers are stopped and started anew as under torchrun."""
    build_timeout_s: float = 0.0
    """How long the next round's workers may build beside the present ones; 0: they never do."""
    has_state: bool = False
    phase: Phase = Phase.WAITING
    hosts: Mapping[str, Host] = field(default_factory=dict)
    joined: int = 0
    round: int = 0
    last_round: int = 0
    """The highest number given to a round, also to one that was built ahead and given up."""
    current: Assignment | None = None
    ahead: Ahead | None = None
    building_since: float | None = None
    was_built_ahead: bool = False
    """The present round was, so its first failure may come from that and is not counted."""
    generations: tuple[Generation, ...] = ()
    awaited: frozenset[str] = frozenset()
    stop: int = 0
    margin: int = 1
    newest: int = 0
    changed_at: float | None = None
    finished: frozenset[str] = frozenset()
    committing: int | None = None
    """Number of the generation whose parts hosts are renaming."""
    uncommitted: frozenset[str] = frozenset()
    """Hosts that have yet to rename their part of a snapshot; older generations stay until then."""

    @property
    def newest_generation(self) -> Generation | None:
        return self.generations[-1] if self.generations else None


def replace_assign(job: Job, assign: Assign) -> Job:
    """Return the job with other limits, without beginning a change."""
    return replace(job, assign=assign)


def replace_generations(job: Job, covered: tuple[Generation, ...]) -> Job:
    """Return the job with other generations known to be whole, oldest first."""
    return replace(job, generations=covered)


# ------------------------------------------------------------------------------------------------
# events


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

# ------------------------------------------------------------------------------------------------
# actions


@dataclass(frozen=True, slots=True)
class Build:
    """Start these workers beside the present ones; they build their models and wait."""

    ahead: Ahead


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the workers that were built ahead for this round."""

    round: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Propose a stop to these hosts."""

    hosts: tuple[str, ...]
    stop: int


@dataclass(frozen=True, slots=True)
class Agree:
    hosts: tuple[str, ...]
    stop: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Forget the proposed stop."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hurry:
    """Another host has deposited or is lost: workers of these that do not come to the stop in time
    hang, and must be given up."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Judge:
    """Unite the deposits of these hosts and answer with ``Judged``."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """These hosts rename their sealed part to this generation."""

    hosts: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Make the workers exit. ``has_deposited``: they leave by themselves, and may say goodbye."""

    hosts: tuple[str, ...]
    reason: str
    has_deposited: bool = False


@dataclass(frozen=True, slots=True)
class StartRound:
    """Start these workers from this generation (None: from the script's own initial state).
    ``steps_lost``: steps that were made and are in no generation; ``is_built``: the workers were
    started by ``Build``."""

    round: int
    assignment: Assignment
    generation: int | None
    steps_lost: int = 0
    is_built: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """Every rank has stepped: older generations may go, leaving hosts may exit."""

    round: int
    keep: int | None
    leaving: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveDurable:
    hosts: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Exit:
    """These agents end with this code."""

    hosts: tuple[str, ...]
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    """One line for the log."""

    text: str


Action = (
    Build | GiveUp | Prepare | Agree | Withdraw | Hurry | Judge | Commit | StopWorkers | StartRound
    | Release | SaveDurable | Exit | Say
)  # fmt: skip
Result = tuple[Job, tuple[Action, ...]]
