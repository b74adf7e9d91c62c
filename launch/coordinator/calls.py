"""Calls of agents to the coordinator of a job.

Each names the job (another job's coordinator may have the same port), the host and its incarnation.
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
    """Identity of a store's directory across machines: boot id, device and inode. Agents with equal
    identities share its lock."""

    boot: str
    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Answer to a join.

    Attributes:
        round: Present round of the job.
        sets_aside: The host sets its durable directory aside: the job begins anew.
        term: Number of coordinators of the job so far.
    """

    round: int
    sets_aside: bool
    term: int


@dataclass(frozen=True, slots=True)
class Join(Request[Joined]):
    """Asks to take part in the job.

    Attributes:
        incarnation: Random name of the agent's present try.
        address: Address of its data plane.
        parts: Manifests of committed generations in its store.
        sealed: Manifests of sealed, uncommitted snapshots there.
        damaged: Unreadable generations with the reason (``UNNUMBERED``: a sealed snapshot).
        spec: The job by the agent's command line.
        domain: Failure domain shared with other hosts; "": none.
        has_check: It passes a health check before it runs workers.
        underway: Its workers' round, begun by another coordinator.
        last_round: Highest known round number.
        term: Highest known term of a coordinator.
        remembered: Its record of the job.
        examined: Generations with damage found at a second look, a line per damaged piece.
        hosts: Lists of hosts named in the manifests.
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
    """Commands for one agent; the first has number ``first``.

    Attributes:
        term: Term of the coordinator; the agent ignores a term before that of its join.
        keep_s: Recommended duration of the next poll, in seconds.
    """

    term: int
    first: int
    commands: tuple[Named[Command], ...]
    keep_s: float


@dataclass(frozen=True, slots=True)
class Poll(Request[Commands]):
    """Asks for the commands behind number ``received``. Answered once there are any, or after
    ``keep_s`` seconds.

    Attributes:
        newest: Furthest step of the workers of ``round``.
        made: Numbers of newer steps, from the reporting worker's host.
    """

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
    """Delivers report ``number``; a repeated one counts once."""

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
    """Asks for the job's exit command. None: the job goes on, or this agent had no part in it."""

    job: str
    host: str
    incarnation: str


AgentCall = Join | Poll | Tell | Bye | Farewell
CoordinatorRequest = AgentCall | PersonCall
