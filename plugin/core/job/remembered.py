"""A job beyond its coordinator: every host keeps it, and brings it to the coordinator's successor,
together with the round that its workers are in.

Facts that hang on the coordinator's clock are not kept, because the next one has another: since
when the training has earned back a restart, when hosts were lost, until when they wait. They begin
anew, and give no job more restarts than it had.
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
class Run:
    """An assignment as it travels: hosts in rank order with their workers, degrees as of
    ``Degrees.to_json``."""

    workers: tuple[tuple[str, int], ...]
    degrees: Mapping[str, int]
    micro_batch_size: int | None
    recompute: Recompute | None = None


@dataclass(frozen=True, slots=True)
class FailedRun:
    """An assignment that has failed, and why."""

    run: Run
    reason: str


@dataclass(frozen=True, slots=True)
class Remembered:
    """What hosts keep of a job.

    Attributes:
        term: Number of the coordinator that said so.
        number: How often it had said something by then.
        request: What persons have asked of the job, and what has run out of memory.
        max_hosts: Hosts that it may have.
        failures_left: Failures that it survives.
        counted_round: The round whose failure has cost the last one; 0: none.
        tries: Failures of the present assignment that may have been chance.
        ran: What all ranks have stepped in last; None: nothing yet.
        failed: Changes that are not tried again on the hosts as they are.
        archived: Generations that it has brought to the durable directory and keeps there.
        lost: What rounds have done and the job went back behind; the ledger of samples keeps it.
        proven: Keys of layouts whose function is proven, and the framework that tells of steps.
    """

    term: int
    number: int
    request: JsonText
    max_hosts: int
    failures_left: int
    counted_round: int
    tries: int
    ran: Run | None
    failed: tuple[FailedRun, ...]
    archived: tuple[int, ...]
    lost: tuple[Lost, ...] = ()
    proven: tuple[tuple[str, ...], str] = ((), "")

    @property
    def order(self) -> tuple[int, int]:
        """Of two, the later one has the higher one."""
        return self.term, self.number


@dataclass(frozen=True, slots=True)
class Underway:
    """One host's part in the round that its workers are in.

    Attributes:
        run: Name of the run of the job.
        round: Its number.
        workers: All hosts of the round with how many workers each has, in rank order.
        degrees: As of ``Degrees.to_json``.
        micro_batch_size, recompute: None: the script's own.
        generation: What it began from; None: from the script's own initial state.
        newest: The furthest step of this host's workers.
        is_proven: Whether they may train: what they began from is proven.
        is_stepping: Whether each of them has made its first step.
        is_hooked: Whether the job knows of their steps.
        stop: The step at which all have agreed to stop; None: at none.
        has_arrived: Whether they stand there.
        is_writing: Whether they may write there, and leave.
        is_sealed: Whether they have, and it is sealed.
        is_failed: Whether the round has failed here, or its workers were told to stand still.
        is_finished: Whether all of them have come to the end of their script.
        every: How many steps lie between snapshots of these workers.
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
    """A coordinator that has yet to learn which round is under way waits for that ``until`` this
    moment, and knows so much ``of`` each host."""

    until: float
    of: Mapping[str, Underway] = field(default_factory=dict)

    @property
    def newest(self) -> int | None:
        """The number of the newest round that a host has told of."""
        return max((each.round for each in self.of.values()), default=None)

    def of_newest(self, hosts: Iterable[str]) -> dict[str, Underway]:
        """Return what those of the hosts have told that are in the newest round."""
        newest, there = self.newest, frozenset(hosts)
        return {h: each for h, each in self.of.items() if each.round == newest and h in there}


@dataclass(frozen=True, slots=True)
class Takeover:
    """A coordinator in the place of another one.

    Attributes:
        pending: Until the round under way is known.
        recalled: The latest that hosts have kept of the job under coordinators that are gone.
        keepers: Hosts that have kept anything: their agents have lived since.
    """

    pending: TakingOver | None = None
    recalled: Remembered | None = None
    keepers: frozenset[str] = frozenset()
