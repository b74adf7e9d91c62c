"""Who takes part in a job, and how far it has come: the state that the rules of membership work on.

``resize.advance`` has the rules: state and event (``events``) in, state and actions (``actions``)
out. The coordinator is the loop around it: it feeds events in (a host joined, every worker has
written) and carries the actions out (send this command to these hosts). One pass through the
phases is a resize:

   running -> preparing -> draining -> snapshotting -> committing -> stopping -> starting -> running

Where a start fails before its proof, hosts examine what it has read (``examining``), and where
workers fail later on, those that live write what they have (``emergency``):

   running -> freezing -> rescuing -> committing -> stopping -> starting -> running

How long each may take, and what comes of it where it takes longer, is in ``deadlines``.

Source: the membership of torch.distributed.elastic 2.13 (rendezvous/dynamic_rendezvous.py). Differs
in: the workers stop at one agreed step instead of where a signal finds them, and a change never
takes a state away before the next one lives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter

from scalai.core.dataset.ledger import Lost
from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import Passes, Recompute
from scalai.core.job.checks import Check
from scalai.core.job.copies import Archiving, Replication
from scalai.core.job.function_proof import FunctionProof
from scalai.core.job.links import NOTHING_KNOWN, Links, hearing_with
from scalai.core.job.pace import Pace
from scalai.core.job.remembered import Remembered
from scalai.core.job.spacing import Spacing
from scalai.core.job.underway import TakingOver


class Phase(Enum):
    """What the job as a whole is doing."""

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
"""Phases in which a change begins something new; in the others it is met when the next round is
assigned."""

TRAINING = (Phase.RUNNING, Phase.BUILDING)
"""Phases in which the workers train and no stop is under way."""

FALLIBLE = (Phase.STARTING, *TRAINING, Phase.PREPARING, Phase.DRAINING, Phase.SNAPSHOTTING)
"""Phases that need the workers; in the others they have done their work or are being stopped."""

ENDED_BY_A_LOSS = (*TRAINING, Phase.PREPARING, Phase.STARTING)
"""Phases in which the loss of a host with workers ends the round; in a later one of a stop what the
others hold may be the whole state."""


@dataclass(frozen=True, slots=True)
class Host:
    """An agent and its devices. ``order`` is the sequence number of its joining: survivors keep
    their relative order. One that is leaving may have to be gone by a time (``leave_by``); it
    ``is_short`` where that is likely to come before its drain has ended."""

    name: str
    slots: int
    order: int
    is_leaving: bool = False
    leave_by: float | None = None
    is_short: bool = False
    has_check: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which hosts run how many workers at which degrees, and why. Hosts in rank order; 0 workers:
    idle, serves its store."""

    workers: tuple[tuple[str, int], ...]
    degrees: Degrees
    micro_batch_size: int | None
    reason: str
    recompute: Recompute | None = None
    """What is computed again; None: as the script's flags say."""
    active: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Hosts that have workers. Made once, because it is asked for with every report of a host."""
    members: frozenset[str] = field(init=False, repr=False, compare=False)
    """The same as a set."""

    def __post_init__(self) -> None:
        active = tuple([name for name, count in self.workers if count])
        object.__setattr__(self, "active", active)
        object.__setattr__(self, "members", frozenset(active))

    @property
    def passes(self) -> Passes:
        return Passes(self.micro_batch_size, self.recompute)

    @property
    def layout(self) -> str:
        """Its degrees, and what is computed again where that is not as the script's flags say."""
        return f"{self.degrees}{self.passes.beside(self.passes)}"

    def is_same_as(self, other: "Assignment") -> bool:
        """Whether the same workers would run at the same degrees with the same passes; idle hosts
        do not count."""
        mine, its = ([entry for entry in a.workers if entry[1]] for a in (self, other))
        return mine == its and self.has_layout_of(other)

    def has_layout_of(self, other: "Assignment") -> bool:
        """Whether it has the same degrees and passes."""
        return self.degrees == other.degrees and self.passes == other.passes


@dataclass(frozen=True, slots=True)
class Standby:
    """A round whose workers are started before the present ones stop."""

    round: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class FailedChange:
    """An assignment whose workers failed before each of them had stepped. ``members`` are its hosts
    with the numbers of their joining: the same hosts joined anew may be tried again."""

    assignment: Assignment
    members: frozenset[tuple[str, int]]
    reason: str


@dataclass(frozen=True, slots=True)
class Emergency:
    """What becomes of a round that has failed, for this ``reason``. ``steps``: those at which
    workers stand that live, between two updates, and which nobody has ordered to be written yet;
    ``step``: the one that is written now. ``is_counted``: the failure has cost a restart;
    ``ending``: why the job ends then, empty where it goes on."""

    reason: str
    steps: frozenset[int] = frozenset()
    step: int | None = None
    is_counted: bool = False
    ending: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """Why all hosts read their parts of a ``generation`` again, and what comes of it where nothing
    is damaged: of a proof that has failed (``is_proof``) what was fetched goes, where the rest is
    whole without it (``can_reread``); else it was a failure of the workers, as ``fail`` takes it.
    """

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
    """The clock of the present phase: when it began or made its last progress (None: the next tick
    tells), and how often it was reported since."""

    since: float | None = None
    reports: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A committed state: its number, the optimizer step, and the hosts that hold parts of it."""

    number: int
    step: int
    hosts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Start:
    """How far the start of a round has come: the generation ``source`` that it began from (None:
    from the script's own initial state), and the hosts whose workers have built their models
    (``published``) and have filled their memory (``restored``)."""

    source: int | None = None
    published: frozenset[str] = frozenset()
    restored: frozenset[str] = frozenset()
    is_proven: bool = False


Assign = Callable[[tuple[tuple[str, int], ...], Assignment | None], Assignment | None]
"""(hosts and their slots in rank order, what ran last) -> an assignment, or None where no world
fits yet."""

WhyNot = Callable[[tuple[tuple[str, int], ...], Assignment | None], str]
"""(hosts and their slots in rank order, what ran last) -> why no assignment fits them, and what to
do; empty: nobody says."""

LOST = ""
"""In an assignment that ran, instead of the name of a host that has nothing of it any more."""

Place = Callable[[Assignment, Assignment, tuple[tuple[str, int], ...]], Assignment]
"""(an assignment, what ran before it, hosts and their slots) -> the same with its hosts in that
order in which the fewest bytes cross."""


def keep_order(
    target: Assignment, ran: Assignment, slots: tuple[tuple[str, int], ...]
) -> Assignment:
    """A ``Place`` that leaves hosts where they are."""
    return target


def says_nothing(hosts: tuple[tuple[str, int], ...], ran: Assignment | None) -> str:
    """A ``WhyNot`` that knows nothing."""
    return ""


@dataclass(frozen=True, slots=True)
class Job:
    """The whole state of a job. ``awaited`` are the hosts whose answer ends the present phase."""

    assign: Assign
    why_not: WhyNot = says_nothing
    place: Place = keep_order
    settle_s: float = 0.0
    max_hosts: int = 1
    failures_left: int = 3
    """Failures that the job survives from here on."""
    most_failures: int = 3
    """What ``failures_left`` is filled up to again while the training makes progress."""
    does_refill: bool = False
    is_loss_free: bool = False
    """Whether the loss of a host is a change, which costs no restart."""
    has_durable_dir: bool = False
    archive_every_s: float = 0.0
    """How long after one generation the next one comes to the durable directory; 0: none does."""
    archive_keep: int = 2
    """So many of them stay there."""
    is_elastic: bool = True
    """False: a plain job, whose workers are stopped and started anew as under torchrun."""
    has_emergency: bool = False
    """Whether workers that outlive a failure write what they have."""
    replicas: int = 0
    """Of what would be lost with a host, so many other hosts keep a replica."""
    is_hooked: bool = True
    """False: nothing in the script says where a step ends, so a change would begin it anew."""
    build_timeout_s: float = 0.0
    """How long the next round's workers may build beside the present ones; 0: they never do."""
    drain_timeout_s: float = 120.0
    quarantine_s: float = 60.0
    """How long a host that flaps waits at first; 0: it never does."""
    start_timeout_s: float = 1800.0
    hang_s: float = 0.0
    """How long no worker may make a step at most, and where it is not known how long one takes."""
    has_state: bool = False
    phase: Phase = Phase.WAITING
    taking_over: TakingOver | None = None
    """Until it is known which round another coordinator, which is gone, had under way."""
    recalled: Remembered | None = None
    """The latest of what hosts have kept of the job under coordinators that are gone."""
    keepers: frozenset[str] = frozenset()
    """Hosts that have kept anything: their agents have lived since."""
    hosts: Mapping[str, Host] = field(default_factory=dict)
    joined: int = 0
    round: int = 0
    last_round: int = 0
    """The highest number given to a round, also to one that was on standby and given up."""
    current: Assignment | None = None
    ran: Assignment | None = None
    """The assignment of which every rank has stepped last: a change that fails goes back to it."""
    failed: tuple[FailedChange, ...] = ()
    counted_round: int = 0
    """The round whose failure has cost a restart last."""
    tries: int = 0
    """Failures of the present assignment that may have been chance."""
    start_error: str = ""
    """Before any round of this job has stepped: what its script has raised in the last start."""
    standby: Standby | None = None
    was_standby: bool = False
    """The present round was, so its first failure may come from that and is not counted."""
    generations: tuple[Generation, ...] = ()
    awaited: frozenset[str] = frozenset()
    stop: int = 0
    margin: int = 1
    newest: int = 0
    lost: tuple[Lost, ...] = ()
    """What earlier rounds did and the job went back behind; of ``Lost`` the round is its number, or
    named as ``of_run`` does where another coordinator had heard of it."""
    now: float = 0.0
    wait: Wait = Wait()
    start: Start = Start()
    emergency: Emergency | None = None
    """From a failure until the workers are stopped."""
    examination: Examination | None = None
    was_start_killed: bool = False
    """A signal ended the last start before its proof."""
    progress: Mapping[str, str] = field(default_factory=dict)
    """What the workers of each host have done last in the present start."""
    held: Mapping[str, str] = field(default_factory=dict)
    """What the workers of each host have to end before the proposed stop."""
    changed_at: float | None = None
    withdrawn: int = 0
    """Stops that were taken back since the last change that came about."""
    again_at: float | None = None
    """When the change whose stop was taken back is tried again."""
    trained_s: float = 0.0
    """Time of training progress since ``failures_left`` was last filled up."""
    stepped_at: float | None = None
    hung: tuple[int, int] = (0, 0)
    """The furthest step when the job hung last, and how often it did without a step in between."""
    hangs: Mapping[str, int] = field(default_factory=dict)
    """At how many hangs a host was behind since it joined."""
    strikes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """When hosts were lost, or joined a round that failed (see ``quarantine``)."""
    barred: Mapping[str, float] = field(default_factory=dict)
    """Hosts that wait before they run workers again, and until when."""
    checks: Mapping[str, Check] = field(default_factory=dict)
    """Of hosts that run no workers: their health check is under way, or has failed (``health``)."""
    last_check: int = 0
    links: Links = NOTHING_KNOWN
    """Which hosts do not hear each other (``hearing``)."""
    gone: frozenset[str] = frozenset()
    """Hosts that were lost since the present round began: one that joins anew has no workers of
    it."""
    finished: frozenset[str] = frozenset()
    committing: int | None = None
    """Number of the generation whose parts hosts are renaming."""
    uncommitted: frozenset[str] = frozenset()
    """Hosts that have yet to rename their part of a snapshot; older generations stay until then."""
    replication: Replication | None = None
    replicated: tuple[int, frozenset[str]] | None = None
    """The generation of which replicas were made last, and on which hosts."""
    last_replication: int = 0
    evacuated: tuple[int, frozenset[str]] | None = None
    """The generation of which others hold what only these hosts held, which will be taken away."""
    function: FunctionProof = field(default_factory=FunctionProof)
    pace: Pace = field(default_factory=Pace)
    spacing: Spacing = field(default_factory=Spacing)
    archiving: Archiving | None = None
    archived: tuple[int, ...] = ()
    """The generations that this job has brought to the durable directory and keeps there."""
    archive_at: float | None = None
    """When the next one comes there, at the soonest."""
    last_archive: int = 0
    sealed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By its name the hosts that have sealed a snapshot of the present round, until all have."""
    obstacle: str = ""
    """Why the newest state that is known cannot be gone on from, and the ways out."""
    is_held_back: bool = False
    """While it waits, the job must not go back behind that state by itself: a person decides."""
    loss: str = ""
    """Why nothing that is known can be gone on from, where damage is the reason and nobody who is
    away can mend it."""
    looking: frozenset[str] = frozenset()
    """Hosts that have yet to say what their durable directories hold."""

    @property
    def newest_generation(self) -> Generation | None:
        return self.generations[-1] if self.generations else None


def excuse(job: Job, seconds: float) -> Job:
    """Return the job whose present phase has lasted so much less: nobody could be heard for so
    long."""
    if job.wait.since is None:
        return job
    return replace(job, wait=replace(job.wait, since=job.wait.since + seconds))


def replace_assign(job: Job, assign: Assign) -> Job:
    """Return the job with other limits, without beginning a change."""
    return replace(job, assign=assign)


def replace_generations(job: Job, covered: tuple[Generation, ...]) -> Job:
    """Return the job with other generations known to be whole, oldest first."""
    return replace(job, generations=covered, has_state=job.has_state or bool(covered))


def replace_known(job: Job, known: tuple[str, ...]) -> Job:
    """Return the job that knows the function of these layouts, as its state says."""
    return replace(job, function=replace(job.function, known=known))


def forget_sealed(job: Job, snapshot: str) -> Job:
    """Return the job that waits for no more parts of a snapshot: it is a generation already, or it
    is judged."""
    return replace(
        job, sealed={name: waited for name, waited in job.sealed.items() if name != snapshot}
    )


def replace_obstacle(job: Job, obstacle: str, *, is_held_back: bool, loss: str = "") -> Job:
    """Return the job with another reason not to go on from the newest state that is known."""
    return replace(job, obstacle=obstacle, is_held_back=is_held_back, loss=loss)


def staying(job: Job) -> tuple[tuple[str, int], ...]:
    """Hosts that take part in the next round, with their slots: those of the current round keep
    their order. One that is barred does not, unless nothing fits without it, nor do those that do
    not hear the others; one that has yet to pass its health check does not at all."""
    current = [name for name, _ in job.current.workers] if job.current else []
    there = [host for host in job.hosts.values() if not host.is_leaving]
    hosts = [host for host in there if host.name not in job.checks]
    place = {name: number for number, name in enumerate(current)}
    hosts.sort(key=attrgetter("order"))
    if place:
        hosts.sort(key=lambda host: place.get(host.name, len(place)))  # else in that order
    free = tuple([(host.name, host.slots) for host in hosts if host.name not in job.barred])
    if job.links.unheard:
        ran = job.ran.active if job.ran else ()
        heard = hearing_with(ran, free, job.links.unheard)
        if heard and job.assign(heard, present(job)) is not None:
            return heard
    if len(free) == len(hosts) or (free and job.assign(free, present(job)) is not None):
        return free
    return tuple((host.name, host.slots) for host in hosts)


def present(job: Job) -> Assignment | None:
    """What ran last, else the start under way."""
    return job.ran or job.current


def active(job: Job) -> frozenset[str]:
    """Hosts that are present and have workers in the current round."""
    return job.current.members.intersection(job.hosts) - job.gone if job.current else frozenset()


def leaving(job: Job) -> frozenset[str]:
    """Hosts that drain."""
    return frozenset(host.name for host in job.hosts.values() if host.is_leaving)
