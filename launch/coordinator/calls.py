"""Calls of agents to the coordinator of a job.

An agent's call names the job, so that it does nothing at another job's coordinator (a port is used
again), its host and its incarnation.
"""

from dataclasses import dataclass

from scalai.core.job.function_proof import Made
from scalai.core.job.remembered import Remembered, Underway
from scalai.core.messages.commands import Command, Exit
from scalai.core.messages.reports import Report, Stalled
from scalai.core.messages.shared import JsonText, Named, Request, Shared
from scalai.launch.coordinator.named_once import BroughtPart
from scalai.launch.coordinator.person_calls import PersonCall


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What tells a store's directory from any other on any machine: the machine's boot, and the
    directory's device and inode. Two agents that name the same one share its lock."""

    boot: str
    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A host takes part: in which ``round`` the job is, and whether the host sets its durable
    directory aside, because the job begins anew. ``term`` counts the coordinators of the job."""

    round: int
    sets_aside: bool
    term: int


@dataclass(frozen=True, slots=True)
class Join(Request[Joined]):
    """Take part in the job.

    ``incarnation`` is a random name of the agent's present try; ``address`` is where its data plane
    listens; hosts of one ``domain`` (of no name: none) may fail together; one that ``has_check``
    passes it before it runs workers. ``parts`` are the manifests of the committed generations in
    its store, ``sealed`` those of what is sealed there and not committed; ``hosts`` are the lists
    of hosts that they name;
    ``damaged`` are numbers of generations that it cannot read, with the reason (``UNNUMBERED``:
    what it had sealed), ``examined`` those of which it has found damage when it read its part
    again, a line a piece that it does not hold whole since. ``spec`` is the job as the agent's
    command line states it. ``underway``: the round that its workers are in, which another
    coordinator has begun; ``last_round``: the highest number of a round, and ``term`` that of a
    coordinator, that it has heard of; ``remembered``: what it has kept of the job.
    """

    job: str
    host: str
    incarnation: str
    store: StoreIdentity | None
    slots: int
    address: tuple[str, int]
    parts: tuple[BroughtPart, ...]
    sealed: tuple[BroughtPart, ...]
    damaged: tuple[tuple[int, str], ...]
    spec: JsonText
    domain: str = ""
    has_check: bool = False
    underway: Underway | None = None
    last_round: int = 0
    term: int = 0
    remembered: Shared[Remembered] | None = None
    examined: tuple[tuple[int, tuple[str, ...]], ...] = ()
    hosts: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands of one agent, of which the first has number ``first``; and for how many seconds the
    next poll would best be kept. ``term`` is that of the coordinator whose they are: one of an
    earlier term than the agent has joined is not obeyed."""

    term: int
    first: int
    commands: tuple[Named[Command], ...]
    keep_s: float


@dataclass(frozen=True, slots=True)
class Poll(Request[Commands]):
    """Hand out the commands behind number ``received``, once there are any, or after ``keep_s``
    seconds. ``newest`` is the furthest step of the workers of ``round``. ``made``: what newer steps
    have computed, of the host that has the worker that tells."""

    job: str
    host: str
    incarnation: str
    received: int
    round: int
    newest: int
    stalled: Stalled | None
    keep_s: float
    made: tuple[Made, ...] = ()


@dataclass(frozen=True, slots=True)
class Tell(Request[None]):
    """Hear report number ``number``; one that was heard before is told again, and counts once."""

    job: str
    host: str
    incarnation: str
    number: int
    report: Named[Report]


@dataclass(frozen=True, slots=True)
class Bye(Request[None]):
    """The agent ends by itself."""

    job: str
    host: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Farewell(Request[Exit | None]):
    """How has the job ended its agents? None: it goes on, or this one had no part in it."""

    job: str
    host: str
    incarnation: str


AgentCall = Join | Poll | Tell | Bye | Farewell
CoordinatorRequest = AgentCall | PersonCall
