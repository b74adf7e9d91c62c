"""State of one host's part in a job, the input of ``law.advance``.

It holds no process, socket or file. Pending worker calls are numbers; worker groups go by round.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from scalai.core.job.function_proof import Numbers
from scalai.core.job.remembered import Remembered
from scalai.core.jsonable import Json
from scalai.core.messages.commands import Build, Commit, Start, Workers
from scalai.core.messages.reports import Finished, WorkersFailed
from scalai.core.messages.shared import JsonText, Shared
from scalai.core.messages.worker_messages import (
    AtBrink,
    BeginSnapshot,
    Imports,
    RankRestored,
    RankSnapshot,
    ReadOrder,
    Samples,
    WriteOrder,
)
from scalai.core.tensors.collection import Collection

Call = int
"""A worker's pending call."""


@runtime_checkable
class SnapshotFiles(Protocol):
    """Files reserved for a snapshot, with each rank's write order (``store.snapshot``)."""

    @property
    def orders(self) -> Mapping[int, WriteOrder]:
        """Write order by rank."""

    def take_over(self, lost: int, alive: Iterable[int]) -> dict[int, WriteOrder]:
        """Orders by surviving rank for the share of ``lost``."""


@dataclass(frozen=True, eq=False, slots=True)
class Want:
    """A worker's pieces to restore, and the ``coordinate`` of its rank state."""

    pieces: Collection
    coordinate: str


@dataclass(frozen=True, eq=False, slots=True)
class RankModel:
    """One worker's held and wanted pieces, and its pending call."""

    held: Collection
    want: Want
    is_restoring: bool
    call: Call


@dataclass(frozen=True, eq=False, slots=True)
class Models:
    """Models that the workers of a round have built.

    Attributes:
        published: By rank.
        tensors: Number of tensors in the whole job, once every host has published.
        uses_devices: Workers keep state in device memory.
        brink: The most memory of a worker at the brink; None: one cannot stop there.
        is_unhooked: A worker trains without hooks.
        is_proven: Workers may train: their initial state is proven.
    """

    published: Mapping[int, RankModel] = field(default_factory=dict)
    facts: Mapping[str, Json] = field(default_factory=dict)
    tensors: int | None = None
    uses_devices: bool = False
    brink: AtBrink | None = None
    is_unhooked: bool = False
    is_proven: bool = False

    def held(self) -> dict[int, Collection]:
        """Pieces of each worker at a snapshot."""
        return {rank: model.held for rank, model in self.published.items()}


@dataclass(frozen=True, eq=False, slots=True)
class RestoredRanks:
    """A restore of a round; times in seconds.

    Attributes:
        orders: Orders to read arrived pieces, not yet given, by rank.
        waiting: Calls of ranks that wait for such pieces.
        has_all: All pieces are on this host.
        ranks: Reports and pending calls of restored ranks.
    """

    orders: Mapping[int, tuple[ReadOrder, ...]] = field(default_factory=dict)
    waiting: Mapping[int, Call] = field(default_factory=dict)
    has_all: bool = False
    ranks: Mapping[int, tuple[RankRestored, Call]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_local: int = 0
    bytes_remote: int = 0


@dataclass(frozen=True, slots=True)
class Steps:
    """A step of the workers: ranks that have reported it, and their merged numbers. ``until``:
    deadline of a step behind the stop, in seconds of the law's clock; 0: none."""

    ranks: frozenset[int] = frozenset()
    numbers: Numbers | None = None
    until: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class NextFiles:
    """Files of the next snapshot.

    Attributes:
        again_at: Time of the next try to make them, in seconds of the law's clock; 0: none.
        wait_s: Pause before that try, in seconds.
        waiters: Ranks and calls of workers that map them ahead of time.
    """

    slot: SnapshotFiles | None = None
    is_making: bool = False
    again_at: float = 0.0
    wait_s: float = 0.0
    waiters: tuple[tuple[int, Call], ...] = ()


@dataclass(frozen=True, slots=True)
class Seals:
    """Sealed snapshots of a round: step of the newest one, and names without the coordinator's
    decision."""

    step: int | None = None
    uncommitted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgreedStop:
    """An agreed stop.

    Attributes:
        proves: Its workers make one more step behind it.
        has_arrived: Reported: every living worker stands there.
        may_write: Workers of every host stand there; they write and leave.
        has_sealed: Its snapshot was reported.
    """

    step: int
    proves: bool = False
    has_arrived: bool = False
    may_write: bool = False
    has_sealed: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Substitutes:
    """Shares of dead ranks, written by others.

    Attributes:
        replaced: Dead ranks with substitute writers.
        queued, writing: Orders of substitute writers: next, and in progress.
        written: Orders done, with fingerprints.
    """

    replaced: frozenset[int] = frozenset()
    queued: Mapping[int, tuple[WriteOrder, ...]] = field(default_factory=dict)
    writing: Mapping[int, WriteOrder] = field(default_factory=dict)
    written: tuple[tuple[WriteOrder, Sequence[int]], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class HostSnapshot:
    """A snapshot in progress.

    Attributes:
        waiting: Calls of ranks without an order.
        ordered: Ranks with an order.
        done: Calls of ranks done at a stop, kept for the share of a dead replica.
        unwritten_by: Training ranks without a valid share.
        since: Time of the first rank's request, in seconds of the law's clock.
        is_given_up: No files came; none are awaited.
        prints: Fingerprints of held pieces by rank, for the comparison of replicas.
        overdue: Unwritten ranks at the last look; they count as hung at ``give_up_at``.
    """

    reason: str
    step: int
    waiting: Mapping[int, Call] = field(default_factory=dict)
    ordered: frozenset[int] = frozenset()
    parts: Mapping[int, RankSnapshot] = field(default_factory=dict)
    done: Mapping[int, Call] = field(default_factory=dict)
    substitutes: Substitutes = field(default_factory=Substitutes)
    seconds: Mapping[str, float] = field(default_factory=dict)
    consumed_samples: Samples = 0
    is_sealing: bool = False
    unwritten_by: frozenset[int] = frozenset()
    since: float = 0.0
    is_given_up: bool = False
    prints: Mapping[int, Sequence[int]] = field(default_factory=dict)
    overdue: frozenset[int] = frozenset()
    give_up_at: float = 0.0

    @property
    def is_last(self) -> bool:
        """Whether its ranks train no more; they may write for others."""
        return self.reason in ("stop", "emergency")

    @property
    def unwritten(self) -> frozenset[int]:
        """Ranks with an order and nothing written."""
        return (self.ordered - set(self.parts) - self.unwritten_by) | set(self.substitutes.writing)


@dataclass(frozen=True, eq=False, slots=True)
class Emergency:
    """Survivors of a failure of their round.

    Attributes:
        until: Deadline for their answers, in seconds of the law's clock.
        steps: Step of each rank's memory; None: torn between two steps.
        waiting: Calls of ranks with an answer and no order.
        is_reported: The coordinator knows the steps.
        step: Step to write.
        has_sealed: A part of an earlier, now useless, step was sealed.
        is_done: The coordinator knows the result of ``step``.
    """

    until: float
    steps: Mapping[int, int | None] = field(default_factory=dict)
    waiting: Mapping[int, Call] = field(default_factory=dict)
    is_reported: bool = False
    step: int | None = None
    has_sealed: bool = False
    is_done: bool = False

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks at the step to write."""
        return frozenset(rank for rank, step in self.steps.items() if step == self.step)


@dataclass(frozen=True, slots=True)
class Raised:
    """First report of a worker's exception, at a time in seconds of the law's clock."""

    reason: str
    at: float


class Group(Enum):
    """Processes of a round's workers on this host."""

    NONE = "not started, or ended"
    DUE = "start once earlier rounds are gone, with their memory"
    RUNNING = "started and not ended"


@dataclass(frozen=True, eq=False, slots=True)
class Round:
    """One incarnation of the host's workers.

    Attributes:
        command: The coordinator's command; ``Build`` for a standby that has not begun.
        is_at_brink: Its workers were on standby without memory for their models.
        awaiting: Calls of workers that wait at the brink for its beginning, by rank.
        is_ending: Its workers are being ended.
        calls: Pending calls of its workers.
        first: Its first step.
        finished: Ranks at the end of their script.
        lost: Ranks with a closed connection.
        postponed: Snapshot requests of ranks that are ahead of the snapshot in progress.
        every: Snapshot interval in steps, as changed on the way; None: unchanged.
        was_put_off: Workers came to a stop with a save in flight and wait for it at the next one.
        proof: The step behind its stop.
        watching: Calls of the workers' freeze threads.
        emergency: State after a failure of some workers.
        outcome: Its end by itself: a reported one, or an exception of a worker before it.
    """

    command: Build | Start
    group: Group = Group.NONE
    is_at_brink: bool = False
    awaiting: Mapping[int, Call] = field(default_factory=dict)
    is_ending: bool = False
    calls: frozenset[Call] = frozenset()
    models: Models = field(default_factory=Models)
    restore: RestoredRanks = field(default_factory=RestoredRanks)
    first: Steps = field(default_factory=Steps)
    finished: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    files: NextFiles = field(default_factory=NextFiles)
    snapshot: HostSnapshot | None = None
    postponed: tuple[tuple[Call, BeginSnapshot], ...] = ()
    seals: Seals = field(default_factory=Seals)
    every: int | None = None
    stop: AgreedStop | None = None
    was_put_off: bool = False
    proof: Steps = field(default_factory=Steps)
    watching: Mapping[int, Call] = field(default_factory=dict)
    emergency: Emergency | None = None
    outcome: Raised | WorkersFailed | Finished | None = None

    @property
    def is_from_standby(self) -> bool:
        """Whether its workers were started beside those before, on all hosts alike."""
        return isinstance(self.command, Build) or self.command.is_built

    @property
    def workers(self) -> Workers:
        return self.command.workers

    @property
    def number(self) -> int:
        return self.workers.round

    @property
    def ranks(self) -> range:
        """Global ranks of this host's workers."""
        return self.workers.placement.ranks

    @property
    def has_group(self) -> bool:
        return self.group is Group.RUNNING

    @property
    def is_draining(self) -> bool:
        return self.stop is not None

    @property
    def stepped(self) -> frozenset[int]:
        """Ranks with a first step."""
        return self.first.ranks

    @property
    def may_write(self) -> bool:
        """Whether workers of every host stand at the stop."""
        return self.stop is not None and self.stop.may_write

    @property
    def snapshot_every(self) -> int:
        """Snapshot interval, in steps."""
        return self.workers.snapshot_every if self.every is None else self.every

    @property
    def failure(self) -> WorkersFailed | None:
        return self.outcome if isinstance(self.outcome, WorkersFailed) else None

    @property
    def absent(self) -> frozenset[int]:
        """Ranks without a share: lost or, in an emergency, at another step."""
        if self.emergency is None:
            return self.lost
        return self.lost | (frozenset(self.ranks) - self.emergency.ranks)

    @property
    def is_restoring(self) -> bool:
        """Whether workers take their state from a generation."""
        is_requested = all(model.is_restoring for model in self.models.published.values())
        return isinstance(self.command, Start) and bool(self.command.sources) and is_requested

    def is_complete(self, ranks: Iterable[int]) -> bool:
        """Whether ``ranks`` covers this host's workers."""
        return set(ranks) >= set(self.ranks)


@dataclass(frozen=True, slots=True)
class HeldStop:
    """A proposed stop that waits for a save. Times in seconds of the law's clock; ``looks``: the
    workers' looks for the save so far."""

    round: int
    stop: int
    since: float
    looks: int
    looked_at: float
    tell_at: float = 0.0
    log_at: float = 0.0


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Constants of the agent's life, in seconds.

    Attributes:
        drain_timeout_s: Limit for writing at a stop, and for a host's leave.
        exit_grace_s: Limit for workers to exit after writing.
        hang_s: Time without a step that counts as a hang; 0: never.
        cores: Processor cores of the host.
    """

    host: str
    is_elastic: bool
    drain_timeout_s: float
    exit_grace_s: float = 10.0
    hang_s: float = 0.0
    cores: int = 1


@dataclass(frozen=True, slots=True)
class ForkServer:
    """The server that forks workers of later rounds with a script's imports.

    Attributes:
        imports: What a worker has imported.
        is_last: The server forks after these; else the worker is on its way to its first step, and
            imports more.
        is_over: It forks, or is done without.
        awaited_since: When due workers began to wait for it.
    """

    imports: Imports
    is_last: bool
    is_over: bool = False
    awaited_since: float | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """A host's leave.

    Attributes:
        since: Time of the signal, in seconds of the law's clock; a save in flight moves it.
        notices: Removal time by source of the notice; None: unknown.
        save_looks: Workers' looks for a save at the last check.
    """

    since: float | None = None
    notices: Mapping[str, float | None] = field(default_factory=dict)
    save_looks: int = 0

    @property
    def is_asked(self) -> bool:
        """Whether a signal or a notice removes the host."""
        return self.since is not None or bool(self.notices)


@dataclass(frozen=True, slots=True)
class Finish:
    """Last step of finished workers; ledger of samples at that end, None: none reported."""

    step: int = 0
    ledger: JsonText | None = None


@dataclass(frozen=True, eq=False, slots=True)
class HostState:
    """One host's part in a job.

    Attributes:
        now: The law's clock, in seconds; only ``TimePassed`` moves it.
        slots: Most workers of the host.
        generations: Generations in the host's store.
        round, standby: The present round, and one built beside it.
        proving: A stopped round with one more step to make beside the present one.
        ending: Rounds with workers being ended, by number.
        held: A proposed stop, delayed by a save.
        standing: Calls of workers at an agreed stop with a save in flight.
        late: Commits that found no room in the store, by generation; they are tried again.
        expelled: Rounds ended without this host; its next join may bring their sealed snapshots.
        is_rejoining: The host joins again once its workers are gone.
        last_round: Highest known round number.
        server: The fork server; None: no worker has told its imports.
        remembered: The job's record for the next coordinator.
    """

    settings: HostSettings
    slots: int
    now: float = 0.0
    generations: frozenset[int] = frozenset()
    round: Round | None = None
    standby: Round | None = None
    proving: Round | None = None
    ending: Mapping[int, Round | None] = field(default_factory=dict)
    held: HeldStop | None = None
    standing: tuple[Call, ...] = ()
    late: Mapping[int, Commit] = field(default_factory=dict)
    expelled: frozenset[int] = frozenset()
    leave: Leave = field(default_factory=Leave)
    is_rejoining: bool = False
    finish: Finish = field(default_factory=Finish)
    last_round: int = 0
    server: ForkServer | None = None
    remembered: Shared[Remembered] | None = None
    exit: int | None = None

    @property
    def host(self) -> str:
        return self.settings.host

    def with_expelled(self, round: int) -> frozenset[int]:
        """The last eight expelled rounds, with ``round``: their snapshots may be sealed just
        now."""
        return frozenset(sorted({*self.expelled, round})[-8:])
