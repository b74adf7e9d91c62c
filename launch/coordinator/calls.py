"""Calls of agents to the coordinator of a job.

Each names the job (another job's coordinator may have the same port), the host and its incarnation.
Manifests travel without their lists of hosts: each part of a state names all its writers, and
thousands of parts share one list; a join has each list once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from scalai.core.errors import UsageError
from scalai.core.job.function_proof import Made
from scalai.core.job.remembered import Remembered, Underway
from scalai.core.jsonable import Json
from scalai.core.messages.commands import Command, Exit
from scalai.core.messages.reports import Report, Stalled
from scalai.core.messages.shared import JsonText, Named, Request, Shared
from scalai.launch.coordinator.person_calls import PersonCall
from scalai.store.manifest import HostManifest, manifest_bytes, manifest_of_bytes

NOBODY = -1
HOSTS = "hosts"
"""Key in a manifest's ``about``: the hosts of the snapshot."""


@dataclass(frozen=True, slots=True)
class BroughtPart:
    """A manifest without its lists. ``hosts`` of its snapshot and ``writers`` of its generation are
    places in the lists beside it; ``NOBODY``: no list."""

    manifest: bytes
    hosts: int
    writers: int


class HostLists:
    """Distinct lists of hosts in manifests."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, ...], int] = {}

    @property
    def lists(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self._places)

    def take(self, manifests: Iterable[bytes]) -> tuple[BroughtPart, ...]:
        """These manifests without their lists."""
        return tuple(self._part(manifest_of_bytes(each, "this host")) for each in manifests)

    def _part(self, part: HostManifest) -> BroughtPart:
        named, committed = part.about.get(HOSTS), part.committed
        hosts, writers = NOBODY, NOBODY
        if isinstance(named, list):
            hosts = self._place(tuple(named))
            part = replace(part, about={k: v for k, v in part.about.items() if k != HOSTS})
        if committed is not None:
            writers = self._place(committed.hosts)
            part = replace(part, committed=replace(committed, hosts=()))
        return BroughtPart(manifest_bytes(part), hosts, writers)

    def _place(self, names: tuple[str, ...]) -> int:
        return self._places.setdefault(names, len(self._places))


def read_part(part: BroughtPart, lists: Sequence[tuple[str, ...]], where: str) -> HostManifest:
    """The manifest with its lists of hosts.

    Raises:
        StoreError: It is not a manifest; names ``where``.
        UsageError: A list is missing.
    """
    for place in (part.hosts, part.writers):
        if not NOBODY <= place < len(lists):
            raise UsageError(
                f"a part of {where} names list {place} of {len(lists)} lists of hosts."
            )
    found = manifest_of_bytes(part.manifest, where)
    if part.hosts != NOBODY:
        found = replace(found, about={**found.about, HOSTS: list(lists[part.hosts])})
    if part.writers != NOBODY and found.committed is not None:
        found = replace(found, committed=replace(found.committed, hosts=lists[part.writers]))
    return shared(found)


def shared(part: HostManifest) -> HostManifest:
    """A part with shared copies of its lists: thousands of copies of thousands of names are
    gigabytes."""
    named, committed = part.about.get(HOSTS), part.committed
    if isinstance(named, list):
        part = replace(part, about={**part.about, HOSTS: _one_list(tuple(named))})
    if committed is not None:
        part = replace(part, committed=replace(committed, hosts=_one_tuple(committed.hosts)))
    return part


@lru_cache(maxsize=64)
def _one_list(names: tuple[Json, ...]) -> list[Json]:
    return list(names)


@lru_cache(maxsize=64)
def _one_tuple(names: tuple[str, ...]) -> tuple[str, ...]:
    return names


# ---------------------------------------------------------------------- calls


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
class CommandsDue:
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
class Poll(Request[CommandsDue]):
    """Asks for the commands behind number ``received``. Answered once there are any, or after
    ``keep_s`` seconds.

    Attributes:
        newest: Furthest step of the workers of ``round``.
        made: Numbers of newer steps, from the reporting worker's host.
        pace: Newest window of its workers, and seconds of a pass; None: not measured.
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
    pace: tuple[int, float] | None = None


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
