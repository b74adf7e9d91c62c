"""A job's record, kept by every host and brought to the next coordinator, with the round of its
workers.

Facts by the coordinator's clock are left out, because the next one has another: the start of the
training time that earns back a restart, times of losses, ends of waits. They begin anew, and give
no job more restarts than it had.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scalai.core.dataset.ledger import Lost
from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import Offload, Recompute
from scalai.core.messages.shared import JsonText

ASKED = "asked"
"""Key in ``about.facts`` of the ``request`` beside a state, for a start of the same job after the
end of all its processes."""


@dataclass(frozen=True, slots=True)
class KeptAssignment:
    """An assignment as a message: hosts in rank order with their workers, degrees as in
    ``Degrees.to_json``."""

    workers: tuple[tuple[str, int], ...]
    degrees: Mapping[str, int]
    micro_batch_size: int | None
    recompute: Recompute | None = None
    offload: Offload | None = None


@dataclass(frozen=True, slots=True)
class KeptFailure:
    """A failed assignment, and the reason."""

    run: KeptAssignment
    reason: str


@dataclass(frozen=True, slots=True)
class Remembered:
    """The record of a job kept by its hosts.

    Attributes:
        term: Number of its coordinator.
        number: Number of the record within the term.
        request: Persons' requests, and assignments out of memory.
        counted_round: Last round with a counted failure; 0: none.
        tries: Possible chance failures of the present assignment.
        ran: Last assignment with a step of every rank; None: none yet.
        failed: Changes not to be retried on the same hosts.
        archived: Generations in the durable directory.
        lost: Steps dropped by returns; the ledger of samples keeps them.
        proven: Keys of layouts with a proven function, and the framework of their steps.
    """

    term: int
    number: int
    request: JsonText
    max_hosts: int
    failures_left: int
    counted_round: int
    tries: int
    ran: KeptAssignment | None
    failed: tuple[KeptFailure, ...]
    archived: tuple[int, ...]
    lost: tuple[Lost, ...] = ()
    proven: tuple[tuple[str, ...], str] = ((), "")

    @property
    def order(self) -> tuple[int, int]:
        """Sort key, oldest first."""
        return self.term, self.number


@dataclass(frozen=True, slots=True)
class Underway:
    """One host's part in the round of its workers.

    Attributes:
        run: Name of the run of the job.
        workers: All hosts of the round with their number of workers, in rank order.
        degrees: As in ``Degrees.to_json``.
        micro_batch_size, recompute, offload: None: the script's own.
        generation: Its source; None: the script's own initial state.
        newest: Furthest step of this host's workers.
        is_proven: They may train: their source is proven.
        is_stepping: Each has made its first step.
        is_hooked: The job learns of their steps.
        stop: The agreed stop; None: none.
        has_arrived: They stand at the stop.
        is_writing: They may write there, and leave.
        is_sealed: Their snapshot is sealed.
        is_failed: The round has failed here, or its workers had to stop updating.
        is_finished: All have come to the end of their script.
        every: Steps between snapshots of these workers.
    """

    run: str
    round: int
    workers: tuple[tuple[str, int], ...]
    degrees: Mapping[str, int]
    micro_batch_size: int | None
    generation: int | None
    newest: int
    is_proven: bool
    is_stepping: bool
    is_hooked: bool
    stop: int | None
    has_arrived: bool
    is_writing: bool
    is_sealed: bool
    is_failed: bool
    is_finished: bool
    every: int
    recompute: Recompute | None = None
    offload: Offload | None = None

    @property
    def members(self) -> frozenset[str]:
        """Hosts with workers."""
        return frozenset(host for host, count in self.workers if count)

    @property
    def layout(self) -> Degrees:
        return Degrees.from_json(self.degrees)


@dataclass(frozen=True, slots=True)
class TakingOver:
    """A new coordinator's wait for the hosts of a round, ``until`` this moment; ``of``: known parts
    by host."""

    until: float
    of: Mapping[str, Underway] = field(default_factory=dict)

    @property
    def newest(self) -> int | None:
        """Number of the newest round of a host."""
        return max((each.round for each in self.of.values()), default=None)

    def of_newest(self, hosts: Iterable[str]) -> dict[str, Underway]:
        """Parts of those hosts in the newest round."""
        newest, there = self.newest, frozenset(hosts)
        return {h: each for h, each in self.of.items() if each.round == newest and h in there}


@dataclass(frozen=True, slots=True)
class Takeover:
    """A coordinator in the place of another one.

    Attributes:
        pending: Set until the round in progress is known.
        recalled: The newest record from the hosts.
        keepers: Hosts with a record: their agents have lived since.
    """

    pending: TakingOver | None = None
    recalled: Remembered | None = None
    keepers: frozenset[str] = frozenset()
