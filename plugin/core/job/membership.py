"""The state of a job: members, round and states, the input of the rules of membership.

``resize.advance`` has the rules: state and event (``events``) in, state and actions (``actions``)
out. The coordinator feeds events in (a host joined, every worker has written) and performs the
actions (send this command to these hosts). One pass through the phases is a resize:

   running -> preparing -> draining -> snapshotting -> committing -> stopping -> starting -> running

After a start that fails before its proof, hosts examine its source (``Examination``); after a later
failure the surviving workers write their state (``FailedRound``):

   running -> freezing -> rescuing -> committing -> stopping -> starting -> running

``deadlines`` has the limit of each phase and its consequence.

Source: the membership of torch.distributed.elastic 2.13 (rendezvous/dynamic_rendezvous.py). Differs
in: the workers stop at one agreed step instead of at a signal, and a change never removes a state
before the next one lives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter

from scalai.core.dataset.ledger import Lost
from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import Offload, Passes, Recompute
from scalai.core.job.copies import GenerationCopies
from scalai.core.job.fitness import Fitness, hearing_with
from scalai.core.job.function_proof import FunctionProof
from scalai.core.job.remembered import Takeover
from scalai.core.job.spacing import Pace, Spacing


class Phase(Enum):
    """Phase of the whole job."""

    WAITING = "waiting"  # for enough hosts, or for a host whose store is needed
    STARTING = "starting"  # a round was assigned: relaunch, plan, move, restore, proof, first step
    EXAMINING = "examining"  # a start failed before its proof: hosts read their parts again
    RUNNING = "running"
    BUILDING = "building"  # the next round's workers build their models; the present ones train on
    PREPARING = (
        "preparing"  # a stop was proposed; every agent says whether its workers are below it
    )
    DRAINING = "draining"  # the stop was agreed; workers come to it, and may still be sent on
    SNAPSHOTTING = (
        "snapshotting"  # every worker stands at the stop: they write their state and leave
    )
    FREEZING = "freezing"  # workers failed: those that live make no further update, and say where
    RESCUING = "rescuing"  # those that stand at one step write their state
    COMMITTING = "committing"  # the snapshots cover; every host renames its part
    STOPPING = "stopping"  # workers are made to exit
    SAVING = "saving"  # nobody stays: the generation goes to the durable directory
    ENDED = "ended"


RESIZABLE = (Phase.WAITING, Phase.STARTING, Phase.RUNNING, Phase.BUILDING)
"""Phases with room for a new change; in the others it is met when the next round is assigned."""

TRAINING = (Phase.RUNNING, Phase.BUILDING)
"""Phases of training without a stop under way."""

FALLIBLE = (Phase.STARTING, *TRAINING, Phase.PREPARING, Phase.DRAINING, Phase.SNAPSHOTTING)
"""Phases that need the workers; in the others these have done their work or are being stopped."""

ENDED_BY_A_LOSS = (*TRAINING, Phase.PREPARING, Phase.STARTING)
"""Phases whose round ends with the loss of a host with workers; later in a stop the others may hold
the whole state."""


@dataclass(frozen=True, slots=True)
class Host:
    """An agent and its devices.

    Attributes:
        order: Number of its join: survivors keep their relative order.
        leave_by: Deadline of a leaving host.
        is_short: The deadline is likely to come before the end of its drain.
    """

    name: str
    slots: int
    order: int
    is_leaving: bool = False
    leave_by: float | None = None
    is_short: bool = False
    has_check: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """Workers of each host, degrees, and the reason. Hosts in rank order; 0 workers: idle, serves
    its store."""

    workers: tuple[tuple[str, int], ...]
    degrees: Degrees
    micro_batch_size: int | None
    reason: str
    recompute: Recompute | None = None
    """Recomputed activations; None: by the script's flags."""
    offload: Offload | None = None
    """State in host memory; None: by the script's flags."""
    paces: tuple[int, ...] | None = None
    """Time of a pass on each replica, for its share of the batch; empty: all are alike, None:
    shares are even, and nothing is measured. Other ones are no other assignment."""
    active: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Hosts with workers. Computed once: every report of a host reads it."""
    members: frozenset[str] = field(init=False, repr=False, compare=False)
    """The same as a set."""

    def __post_init__(self) -> None:
        active = tuple([name for name, count in self.workers if count])
        object.__setattr__(self, "active", active)
        object.__setattr__(self, "members", frozenset(active))

    @property
    def passes(self) -> Passes:
        return Passes(self.micro_batch_size, self.recompute, self.offload)

    @property
    def layout(self) -> str:
        """Its degrees, with what its passes have beside the script's flags."""
        return f"{self.degrees}{self.passes.beside(self.passes)}"

    def is_same_as(self, other: "Assignment") -> bool:
        """Whether workers, degrees and passes are equal; idle hosts do not count."""
        mine, its = ([entry for entry in a.workers if entry[1]] for a in (self, other))
        return mine == its and self.has_layout_of(other)

    def has_layout_of(self, other: "Assignment") -> bool:
        """Whether degrees and passes are equal."""
        return self.degrees == other.degrees and self.passes == other.passes


@dataclass(frozen=True, slots=True)
class StandbyRound:
    """A round with workers beside the present ones."""

    round: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class FailedChange:
    """An assignment that failed before all its workers had stepped. ``members``: its hosts with
    their join numbers; after a new join it may be retried."""

    assignment: Assignment
    members: frozenset[tuple[str, int]]
    reason: str


@dataclass(frozen=True, slots=True)
class FailedRound:
    """A failed round.

    Attributes:
        reason: Reason of the failure.
        steps: Steps of standing workers without an order to write.
        step: The step being written.
        is_counted: The failure has cost a restart.
        ending: Reason to end the job afterwards; empty: it goes on.
    """

    reason: str
    steps: frozenset[int] = frozenset()
    step: int | None = None
    is_counted: bool = False
    ending: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """A second look of all hosts at their parts of a ``generation``. Without damage, a failed proof
    (``is_proof``) drops the fetched pieces if the rest is whole (``can_reread``); any other failure
    is the workers', as in ``fail``."""

    generation: int
    reason: str
    is_proof: bool = False
    can_reread: bool = False
    is_chance: bool = False
    is_refusal: bool = False
    is_loss: bool = False
    is_damaged: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """The clock of the present phase: its start or last progress (None: set at the next tick), and
    the log lines since."""

    since: float | None = None
    reports: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A committed state: its number, its optimizer step, and the hosts with parts of it."""

    number: int
    step: int
    hosts: frozenset[str]


Assign = Callable[[tuple[tuple[str, int], ...], Assignment | None], Assignment | None]
"""(hosts and their slots in rank order, last assignment that ran) -> an assignment; None: no world
fits."""

WhyNot = Callable[[tuple[tuple[str, int], ...], Assignment | None], str]
"""(hosts and their slots in rank order, last assignment that ran) -> reason for no assignment, and
the way out; empty: unknown."""

LOST = ""
"""Placeholder in a past assignment for a host without its state."""

Place = Callable[[Assignment, Assignment, tuple[tuple[str, int], ...]], Assignment]
"""(assignment, the one before, hosts and their slots) -> the assignment with its hosts in the order
of the fewest bytes to move."""


Share = Callable[[Assignment], Assignment]
"""assignment -> the assignment with the measured ``paces`` of its replicas."""


def keep_order(
    target: Assignment, ran: Assignment, slots: tuple[tuple[str, int], ...]
) -> Assignment:
    """A ``Place`` without moves."""
    return target


def keep_even(target: Assignment) -> Assignment:
    """A ``Share`` without measurements."""
    return target


def says_nothing(hosts: tuple[tuple[str, int], ...], ran: Assignment | None) -> str:
    """A ``WhyNot`` without reasons."""
    return ""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Settings of a job, from its flags and its configuration.

    Attributes:
        assign, why_not, place, share: Choice of workers, degrees, order of hosts and shares.
        settle_s: Quiet seconds before a change is made.
        most_failures: Failures that the job survives; progress may refill its budget to them.
        is_loss_free: Loss of a host is a change, without the cost of a restart; training progress
            refills the budget.
        is_elastic: False: a plain job, restarted as by torchrun.
        has_durable_dir: It has a durable directory.
        archive_every_s: Seconds between two archives during training; 0: none.
        archive_keep: Generations kept there.
        has_emergency: Survivors of a failure write their state.
        replicas: Replicas of each piece that a loss would take away.
        build_timeout_s: Seconds for standby workers to build; 0: no standby.
        drain_timeout_s: Seconds for all workers to come to an agreed stop.
        quarantine_s: First wait of a flapping host, in seconds; 0: none.
        start_timeout_s: Seconds without progress of a start.
        hang_s: Most seconds without a step of any worker, also without a known usual step.
        proves: Changes with a proof of their function (``POLICIES``).
    """

    assign: Assign
    why_not: WhyNot = says_nothing
    place: Place = keep_order
    share: Share = keep_even
    settle_s: float = 0.0
    max_hosts: int = 1
    most_failures: int = 3
    is_loss_free: bool = False
    is_elastic: bool = True
    has_durable_dir: bool = False
    archive_every_s: float = 0.0
    archive_keep: int = 2
    has_emergency: bool = False
    replicas: int = 0
    build_timeout_s: float = 0.0
    drain_timeout_s: float = 120.0
    quarantine_s: float = 60.0
    start_timeout_s: float = 1800.0
    hang_s: float = 0.0
    proves: str = "never"


@dataclass(frozen=True, slots=True)
class Budget:
    """Failures that a job survives.

    Attributes:
        tries: Possible chance failures of the present assignment.
        start_error: The script's error in the last start, before any round has stepped.
        was_start_killed: A signal ended the last start before its proof.
        trained_s: Seconds of training progress since ``left`` last rose.
        stepped_at: Time of the newest step, by the job's clock.
        hung: Furthest step at the last hang, and hangs without a step in between.
        ran_again: Step of the newest state when a step was last run again (-1: no state).
    """

    left: int = 3
    counted_round: int = 0
    tries: int = 0
    start_error: str = ""
    was_start_killed: bool = False
    trained_s: float = 0.0
    stepped_at: float | None = None
    hung: tuple[int, int] = (0, 0)
    ran_again: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Changes of a job, in progress and before.

    Attributes:
        at: Time of the last open change.
        again_at: Time of the next try after a withdrawn stop.
        withdrawn: Withdrawn stops since the last complete change.
        standby: The round being built beside the present one.
        last_round: Highest round number so far, standby rounds included.
        ran: Last assignment with a step of every rank: a failed change goes back to it.
        failed: Assignments that failed on the present hosts.
        pace: Durations of the parts of a change.
    """

    at: float | None = None
    again_at: float | None = None
    withdrawn: int = 0
    standby: StandbyRound | None = None
    last_round: int = 0
    ran: Assignment | None = None
    failed: tuple[FailedChange, ...] = ()
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The present round since its start.

    Attributes:
        source: Generation at its start; None: the script's own initial state.
        published: Hosts with built models.
        restored: Hosts with restored memory.
        is_proven: The restored state is the committed one.
        was_standby: Its workers were on standby: a first failure may come from that, and is free.
        progress: Newest act of each host's workers in the start.
        is_hooked: False: the script reports no steps; a change would begin anew.
        gone: Hosts lost since its start: a rejoined one has none of its workers.
        finished: Hosts at the end of their script.
    """

    source: int | None = None
    published: frozenset[str] = frozenset()
    restored: frozenset[str] = frozenset()
    is_proven: bool = False
    was_standby: bool = False
    progress: Mapping[str, str] = field(default_factory=dict)
    is_hooked: bool = True
    gone: frozenset[str] = frozenset()
    finished: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StopPoint:
    """A stop, proposed or agreed, at ``step``: ``margin`` steps beyond the furthest known one.
    ``held``: obstacle of each host's workers, such as a save."""

    step: int = 0
    margin: int = 1
    held: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class States:
    """States of a job on its hosts.

    Attributes:
        generations: Committed, whole ones on the present hosts, oldest first.
        has_state: There is a state worth keeping.
        committing: Generation with parts being renamed.
        uncommitted: Hosts that have yet to rename their part; older generations stay until then.
        sealed: Hosts that have sealed a snapshot of the present round, by its name, until all have.
        lost: Steps of earlier rounds dropped by a return. ``Lost.round`` is the round's number, or
            its name by ``of_run`` if another coordinator reported it.
        obstacle: Obstacle to the newest known state, and the ways out.
        is_held_back: While it waits, the job must not go back behind that state by itself.
        loss: Obstacle to all known states: damage that absent hosts cannot repair.
        looking: Hosts that have yet to report their durable directories.
        has_lost_all: No host of the last round is left: new ones may not have its state.
    """

    generations: tuple[Generation, ...] = ()
    has_state: bool = False
    committing: int | None = None
    uncommitted: frozenset[str] = frozenset()
    sealed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    lost: tuple[Lost, ...] = ()
    obstacle: str = ""
    is_held_back: bool = False
    loss: str = ""
    looking: frozenset[str] = frozenset()
    has_lost_all: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """The whole state of a job.

    Attributes:
        awaited: Hosts whose answer ends the present phase.
        now: Time of the last timed event, in seconds.
        round, current: The present round and its assignment.
        newest: The furthest known step.
        failure: Set until the workers are stopped, or the examination has ended.
    """

    settings: JobSettings
    phase: Phase = Phase.WAITING
    awaited: frozenset[str] = frozenset()
    now: float = 0.0
    wait: Wait = Wait()
    hosts: Mapping[str, Host] = field(default_factory=dict)
    round: int = 0
    current: Assignment | None = None
    newest: int = 0
    attempt: Attempt = field(default_factory=Attempt)
    change: Change = field(default_factory=Change)
    stop: StopPoint = field(default_factory=StopPoint)
    failure: FailedRound | Examination | None = None
    budget: Budget = Budget()
    states: States = field(default_factory=States)
    copies: GenerationCopies = field(default_factory=GenerationCopies)
    health: Fitness = field(default_factory=Fitness)
    takeover: Takeover = field(default_factory=Takeover)
    function: FunctionProof = field(default_factory=FunctionProof)
    spacing: Spacing = field(default_factory=Spacing)

    @property
    def emergency(self) -> FailedRound | None:
        return self.failure if isinstance(self.failure, FailedRound) else None

    @property
    def examination(self) -> Examination | None:
        return self.failure if isinstance(self.failure, Examination) else None

    @property
    def newest_generation(self) -> Generation | None:
        generations = self.states.generations
        return generations[-1] if generations else None


def excuse(job: Job, seconds: float) -> Job:
    """The job with a later start of its phase: for these seconds no host could be heard."""
    if job.wait.since is None:
        return job
    return replace(job, wait=replace(job.wait, since=job.wait.since + seconds))


def replace_assign(job: Job, assign: Assign) -> Job:
    """The job with other limits, without a change."""
    return replace(job, settings=replace(job.settings, assign=assign))


def replace_generations(job: Job, covered: tuple[Generation, ...]) -> Job:
    """The job with these whole generations, oldest first."""
    has_state = job.states.has_state or bool(covered)
    return replace(job, states=replace(job.states, generations=covered, has_state=has_state))


def lost_all(job: Job) -> Job:
    """The job after the loss of its last host."""
    return replace(job, states=replace(job.states, has_lost_all=True))


def replace_known(job: Job, known: tuple[str, ...]) -> Job:
    """The job with these keys of proven layouts."""
    return replace(job, function=replace(job.function, known=known))


def forget_sealed(job: Job, snapshot: str) -> Job:
    """The job without a committed or judged snapshot."""
    sealed = {name: waited for name, waited in job.states.sealed.items() if name != snapshot}
    return replace(job, states=replace(job.states, sealed=sealed))


def replace_obstacle(job: Job, obstacle: str, *, is_held_back: bool, loss: str = "") -> Job:
    """The job with another obstacle."""
    return replace(
        job, states=replace(job.states, obstacle=obstacle, is_held_back=is_held_back, loss=loss)
    )


def staying(job: Job) -> tuple[tuple[str, int], ...]:
    """Hosts of the next round, with their slots, in the current round's order.

    Barred and unconnected hosts stay out unless nothing fits without them; unchecked hosts always.
    """
    current = [name for name, _ in job.current.workers] if job.current else []
    there = [host for host in job.hosts.values() if not host.is_leaving]
    hosts = [host for host in there if host.name not in job.health.checks]
    place = {name: number for number, name in enumerate(current)}
    hosts.sort(key=attrgetter("order"))
    if place:
        hosts.sort(key=lambda host: place.get(host.name, len(place)))  # else in that order
    free = tuple([(host.name, host.slots) for host in hosts if host.name not in job.health.barred])
    if job.health.links.unheard:
        ran = job.change.ran.active if job.change.ran else ()
        heard = hearing_with(ran, free, job.health.links.unheard)
        if heard and job.settings.assign(heard, present(job)) is not None:
            return heard
    if len(free) == len(hosts) or (free and job.settings.assign(free, present(job)) is not None):
        return free
    return tuple((host.name, host.slots) for host in hosts)


def present(job: Job) -> Assignment | None:
    """The last assignment that ran, else the start in progress."""
    return job.change.ran or job.current


def active(job: Job) -> frozenset[str]:
    """Present hosts with workers in the current round."""
    if job.current is None:
        return frozenset()
    return job.current.members.intersection(job.hosts) - job.attempt.gone


def leaving(job: Job) -> frozenset[str]:
    """Draining hosts."""
    return frozenset(host.name for host in job.hosts.values() if host.is_leaving)
