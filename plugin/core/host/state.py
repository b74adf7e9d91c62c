"""State of one host's part in a job, the input of ``law.advance``.

It holds no process, socket or file. Pending worker calls are numbers; worker groups go by round.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from scalai.core.job.function_proof import Numbers
from scalai.core.job.remembered import Remembered
from scalai.core.jsonable import Json
from scalai.core.messages.commands import Build, Commit, Start, Workers
from scalai.core.messages.reports import WorkersFailed
from scalai.core.messages.shared import JsonText, Shared
from scalai.core.messages.worker_messages import (
    BeginSnapshot,
    RankRestored,
    RankSnapshot,
    Samples,
    WriteOrder,
)
from scalai.core.tensors.collection import Collection

Call = int
"""A worker's pending call."""


@runtime_checkable
class Slot(Protocol):
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
class Published:
    """One worker's held and wanted pieces, and its pending call."""

    held: Collection
    want: Want
    is_restoring: bool
    call: Call

    @property
    def wanted(self) -> Collection:
        """Pieces to restore."""
        return self.want.pieces


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """A snapshot in progress.

    Attributes:
        waiting: Calls of ranks without an order.
        ordered: Ranks with an order.
        done: Calls of ranks done at a stop, kept for the share of a dead replica.
        taken_over: Orders written for dead ranks, with fingerprints.
        replaced: Dead ranks with substitute writers.
        queued, writing: Orders of substitute writers: next, and in progress.
        unwritten_by: Training ranks without a valid share.
        since: Time of the first rank's request, in seconds of the law's clock.
        is_given_up: No files came; none are awaited.
        prints: Fingerprints of held pieces by rank, for the comparison of replicas.
    """

    reason: str
    step: int
    waiting: Mapping[int, Call] = field(default_factory=dict)
    ordered: frozenset[int] = frozenset()
    parts: Mapping[int, RankSnapshot] = field(default_factory=dict)
    done: Mapping[int, Call] = field(default_factory=dict)
    taken_over: tuple[tuple[WriteOrder, Sequence[int]], ...] = ()
    replaced: frozenset[int] = frozenset()
    queued: Mapping[int, tuple[WriteOrder, ...]] = field(default_factory=dict)
    writing: Mapping[int, WriteOrder] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    consumed_samples: Samples = 0
    is_sealing: bool = False
    unwritten_by: frozenset[int] = frozenset()
    since: float = 0.0
    is_given_up: bool = False
    prints: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        """Whether its ranks train no more; they may write for others."""
        return self.reason in ("stop", "emergency")

    @property
    def unwritten(self) -> frozenset[int]:
        """Ranks with an order and nothing written."""
        return (self.ordered - set(self.parts) - self.unwritten_by) | set(self.writing)

    @property
    def is_handed_over(self) -> bool:
        """Whether every substitute writer is done."""
        return not self.queued and not self.writing


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


@dataclass(frozen=True, eq=False, slots=True)
class Round:
    """One incarnation of the host's workers.

    Attributes:
        command: The coordinator's command; ``Build`` for a standby that has not begun.
        has_group: Its processes were started and not ended.
        is_due: It starts once earlier rounds are gone, with their memory.
        calls: Pending calls of its workers.
        lost: Ranks with a closed connection.
        tensors: Number of tensors in the whole job, once every host has published.
        reserve_at: Time of the next try to reserve room, in seconds of the law's clock; 0: none.
        postponed: Snapshot requests of ranks that are ahead of the snapshot in progress.
        watching: Calls of the workers' freeze threads.
        emergency: State after a failure of some workers.
        slot_waiters: Ranks that map the next snapshot's files ahead of time.
        stop: Agreed stop step.
        has_arrived: Reported: every living worker stands at the stop.
        may_write: Workers of every host stand at the stop; they write and leave.
        was_put_off: Workers came to a stop with a save in flight and wait for it at the next one.
        has_sealed: The stop's snapshot was reported.
        sealed_step: Step of the newest sealed snapshot.
        uncommitted: Names of sealed snapshots without the coordinator's decision.
        every: Snapshot interval in steps, as changed on the way; None: unchanged.
        unwritten: Ranks with an order and nothing written, at the last look.
        give_up_at: Time at which writing ranks count as hung.
        raised: First report of a worker's exception.
        raised_at: Its time, in seconds.
        is_proven: Workers may train: their initial state is proven.
        is_ending: Its workers are being ended.
        failure: Reported failure.
        is_unhooked: A worker trains without hooks.
        uses_devices: Workers keep state in device memory.
        proves: Its workers make one more step behind their stop.
        numbers: Numbers of the first step or, once ``may_write``, of that further step.
        proven_ranks: Ranks that reported the further step.
        proof_until: Deadline of the further step, in seconds of the law's clock; 0: none.
    """

    command: Build | Start
    has_group: bool = False
    is_due: bool = False
    calls: frozenset[Call] = frozenset()
    published: Mapping[int, Published] = field(default_factory=dict)
    restored: Mapping[int, tuple[RankRestored, Call]] = field(default_factory=dict)
    stepped: frozenset[int] = frozenset()
    finished: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    facts: Mapping[str, Json] = field(default_factory=dict)
    tensors: int | None = None
    reserved: Slot | None = None
    is_reserving: bool = False
    reserve_at: float = 0.0
    reserve_wait_s: float = 0.0
    snapshot: Snapshot | None = None
    postponed: tuple[tuple[Call, BeginSnapshot], ...] = ()
    slot_waiters: tuple[tuple[int, Call], ...] = ()
    watching: Mapping[int, Call] = field(default_factory=dict)
    emergency: Emergency | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_local: int = 0
    bytes_remote: int = 0
    stop: int | None = None
    has_arrived: bool = False
    may_write: bool = False
    was_put_off: bool = False
    has_sealed: bool = False
    sealed_step: int | None = None
    uncommitted: tuple[str, ...] = ()
    every: int | None = None
    unwritten: frozenset[int] = frozenset()
    give_up_at: float | None = None
    raised: str = ""
    raised_at: float = 0.0
    is_proven: bool = False
    is_ending: bool = False
    failure: WorkersFailed | None = None
    has_finished: bool = False
    is_unhooked: bool = False
    uses_devices: bool = False
    proves: bool = False
    numbers: Numbers | None = None
    proven_ranks: frozenset[int] = frozenset()
    proof_until: float = 0.0

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
    def is_draining(self) -> bool:
        return self.stop is not None

    @property
    def absent(self) -> frozenset[int]:
        """Ranks without a share: lost or, in an emergency, at another step."""
        if self.emergency is None:
            return self.lost
        return self.lost | (frozenset(self.ranks) - self.emergency.ranks)

    @property
    def is_restoring(self) -> bool:
        """Whether workers take their state from a generation."""
        is_requested = all(entry.is_restoring for entry in self.published.values())
        return isinstance(self.command, Start) and bool(self.command.sources) and is_requested

    def is_complete(self, ranks: Iterable[int]) -> bool:
        """Whether ``ranks`` covers this host's workers."""
        return set(ranks) >= set(self.ranks)

    def held(self) -> dict[int, Collection]:
        """Pieces of each worker at a snapshot."""
        return {rank: entry.held for rank, entry in self.published.items()}


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
class Settings:
    """Constants of the agent's life, in seconds.

    Attributes:
        drain_timeout_s: Limit for writing at a stop, and for a host's leave.
        exit_grace_s: Limit for workers to exit after writing.
        hang_s: Time without a step that counts as a hang; 0: never.
    """

    host: str
    is_elastic: bool
    drain_timeout_s: float
    exit_grace_s: float = 10.0
    hang_s: float = 0.0


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
        save_looks: Workers' looks for a save at a leaving host's last check.
        leaving_at: Time of the signal to leave.
        notices: Removal time by source of the notice; None: unknown.
        is_rejoining: The host joins again once its workers are gone.
        last_step: Last step of finished workers.
        last_ledger: Ledger of samples at that end; None: none reported.
        last_round: Highest known round number.
        remembered: The job's record for the next coordinator.
        exit: Exit code of the agent.
    """

    settings: Settings
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
    save_looks: int = 0
    leaving_at: float | None = None
    notices: Mapping[str, float | None] = field(default_factory=dict)
    is_rejoining: bool = False
    last_step: int = 0
    last_ledger: JsonText | None = None
    last_round: int = 0
    remembered: Shared[Remembered] | None = None
    exit: int | None = None

    @property
    def host(self) -> str:
        return self.settings.host

    def with_expelled(self, round: int) -> frozenset[int]:
        """The last eight expelled rounds, with ``round``: their snapshots may be sealed just
        now."""
        return frozenset(sorted({*self.expelled, round})[-8:])

    @property
    def is_leaving(self) -> bool:
        """Whether a signal or a notice removes the host."""
        return self.leaving_at is not None or bool(self.notices)
