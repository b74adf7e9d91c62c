"""A job beyond its coordinator: every host keeps it, and brings it to the coordinator's successor,
together with the round of its workers.

Facts by the coordinator's clock are not kept, because the next one has another: the beginning of
the training time that earns back a restart, times of losses, ends of waits. They begin anew, and
give no job more restarts than it had.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scalai.core.dataset.ledger import Lost
from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import Recompute
from scalai.core.messages.shared import JsonText

ASKED = "asked"
"""Under this name of ``about.facts`` a host writes the ``request`` beside a state, for a start of
the same job once all of its processes are gone."""


@dataclass(frozen=True, slots=True)
class KeptAssignment:
    """An assignment as it travels: hosts in rank order with their workers, degrees as of
    ``Degrees.to_json``."""

    workers: tuple[tuple[str, int], ...]
    degrees: Mapping[str, int]
    micro_batch_size: int | None
    recompute: Recompute | None = None


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
        request: Persons' requests, and assignments that ran out of memory.
        max_hosts: Most hosts.
        failures_left: Failures left.
        counted_round: The last round whose failure has cost a restart; 0: none.
        tries: Possible chance failures of the present assignment.
        ran: The last assignment with a step of every rank; None: none yet.
        failed: Changes not to be tried again on the hosts as they are.
        archived: Generations brought to the durable directory and kept there.
        lost: Steps behind which the job went back; the ledger of samples keeps them.
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
        """Of two, the later one has the higher one."""
        return self.term, self.number


@dataclass(frozen=True, slots=True)
class Underway:
    """One host's part in the round of its workers.

    Attributes:
        run: Name of the run of the job.
        round: Its number.
        workers: All hosts of the round with their number of workers, in rank order.
        degrees: As of ``Degrees.to_json``.
        micro_batch_size, recompute: None: the script's own.
        generation: Its source; None: the script's own initial state.
        newest: The furthest step of this host's workers.
        is_proven: Whether they may train: their source is proven.
        is_stepping: Whether each of them has made its first step.
        is_hooked: Whether the job knows of their steps.
        stop: The agreed stop; None: there is none.
        has_arrived: Whether they stand there.
        is_writing: Whether they may write there, and leave.
        is_sealed: Whether they have, and it is sealed.
        is_failed: Whether the round has failed here, or its workers were told to stand still.
        is_finished: Whether all of them have come to the end of their script.
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

    @property
    def members(self) -> frozenset[str]:
        """Hosts with workers."""
        return frozenset(host for host, count in self.workers if count)

    @property
    def layout(self) -> Degrees:
        return Degrees.from_json(self.degrees)


@dataclass(frozen=True, slots=True)
class TakingOver:
    """A new coordinator waits for the hosts of the round under way ``until`` this moment; ``of``
    each host, its part as far as known."""

    until: float
    of: Mapping[str, Underway] = field(default_factory=dict)

    @property
    def newest(self) -> int | None:
        """The number of the newest round of a host."""
        return max((each.round for each in self.of.values()), default=None)

    def of_newest(self, hosts: Iterable[str]) -> dict[str, Underway]:
        """Return the parts of those hosts in the newest round."""
        newest, there = self.newest, frozenset(hosts)
        return {h: each for h, each in self.of.items() if each.round == newest and h in there}


@dataclass(frozen=True, slots=True)
class Takeover:
    """A coordinator in the place of another one.

    Attributes:
        pending: Until the round under way is known.
        recalled: The newest record from the hosts.
        keepers: Hosts with a record: their agents have lived since.
    """

    pending: TakingOver | None = None
    recalled: Remembered | None = None
    keepers: frozenset[str] = frozenset()
