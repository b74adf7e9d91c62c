"""Who takes part in a job, and how far it has come: the state that the rules of membership work on.

``resize.advance`` has the rules: state and event (``events``) in, state and actions (``actions``)
out. The coordinator is the loop around it: it feeds events in (a host joined, every worker has
deposited) and carries the actions out (send this command to these hosts). One pass through the
phases is a resize:

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


RESIZABLE = (Phase.WAITING, Phase.STARTING, Phase.RUNNING, Phase.BUILDING)
"""Phases in which a change begins something new; in the others it is met when the next round is
assigned."""

TRAINING = (Phase.RUNNING, Phase.BUILDING)
"""Phases in which the workers train and no stop is under way."""

FALLIBLE = (Phase.STARTING, *TRAINING, Phase.PREPARING, Phase.DRAINING)
"""Phases that need the workers; in the others they have done their work or are being stopped."""


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


def staying(job: Job) -> tuple[tuple[str, int], ...]:
    """Hosts that take part in the next round, with their slots: those of the current round keep
    their order."""
    current = [name for name, _ in job.current.workers] if job.current else []
    hosts = [host for host in job.hosts.values() if not host.is_leaving]
    place = {name: number for number, name in enumerate(current)}
    hosts.sort(key=lambda host: (place.get(host.name, len(place)), host.order))
    return tuple((host.name, host.slots) for host in hosts)


def active(job: Job) -> frozenset[str]:
    """Hosts that are present and have workers in the current round."""
    return frozenset(job.current.active if job.current else ()) & frozenset(job.hosts)


def next_assignment(job: Job) -> Assignment | None:
    """The assignment of the hosts that stay; None where no world fits them, or none stays."""
    hosts = staying(job)
    return job.assign(hosts, job.current.degrees if job.current else None) if hosts else None


def leaving(job: Job) -> frozenset[str]:
    """Hosts that drain."""
    return frozenset(host.name for host in job.hosts.values() if host.is_leaving)
