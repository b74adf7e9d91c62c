"""What an agent knows of its host's part in a job: the state that ``law.advance`` works on.

Nothing here is a process, a socket or a file. Calls of workers that wait for an answer are numbers;
groups of workers are named by their rounds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
"""A worker's call that waits for its answer."""


class Slot(Protocol):
    """Files that wait for a snapshot, and who writes what into them (``store.snapshot``)."""

    @property
    def orders(self) -> Mapping[int, WriteOrder]:
        """What each rank writes."""

    def take_over(self, lost: int, alive: Iterable[int]) -> dict[int, WriteOrder]:
        """Return what others write of that which a dead rank should have written."""


@dataclass(frozen=True, eq=False, slots=True)
class Want:
    """What a worker restores: these ``pieces``, and the state of its ``coordinate``."""

    pieces: Collection
    coordinate: str


@dataclass(frozen=True, eq=False, slots=True)
class Published:
    """What one worker holds and wants, and the call that waits for it."""

    held: Collection
    want: Want
    is_restoring: bool
    call: Call

    @property
    def wanted(self) -> Collection:
        """The pieces that it restores."""
        return self.want.pieces


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """A snapshot whose workers are writing.

    ``waiting`` are calls of ranks that have no order yet, ``ordered`` ranks that have had one.
    ``done`` are ranks that have written at a stop: kept, because a replica of theirs may die.
    ``taken_over`` is what was written for ranks that died, with its fingerprints; ``replaced`` are
    those ranks. ``queued`` and ``writing`` are what substitute writers will write, and write now.
    ``unwritten_by`` are ranks of which nothing counts, and that train on; ``since`` when the first
    one asked; ``is_given_up``: there were no files, and none are waited for. ``prints``: by rank
    the fingerprints of what it holds, where replicas are compared.
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
        """Whether its ranks train no more after it: they may write for others."""
        return self.reason in ("stop", "emergency")

    @property
    def unwritten(self) -> frozenset[int]:
        """Ranks that have an order and have not written."""
        return (self.ordered - set(self.parts) - self.unwritten_by) | set(self.writing)

    @property
    def is_handed_over(self) -> bool:
        """Whether no rank writes for another one any more."""
        return not self.queued and not self.writing


@dataclass(frozen=True, eq=False, slots=True)
class Emergency:
    """What becomes of workers that outlive a failure of their round.

    Attributes:
        until: Who has not said by then where it stands is done without, in seconds of the law's
            clock.
        steps: By rank the step of which its memory is the state; None: of none.
        waiting: Calls of ranks that have said so, and wait for their order.
        is_reported: Whether the coordinator knows.
        step: The step that is written.
        has_sealed: Whether a part of an earlier one was sealed, which nobody needs.
        is_done: Whether the coordinator knows what came of ``step``.
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
        """Those that stand at the step that is written."""
        return frozenset(rank for rank, step in self.steps.items() if step == self.step)


@dataclass(frozen=True, eq=False, slots=True)
class Round:
    """One incarnation of the host's workers.

    Attributes:
        command: The coordinator's; ``Build`` where it was on standby and has not begun.
        has_group: Whether its processes were started, and none has ended them.
        is_due: Whether they are started once those of earlier rounds are gone, with their memory.
        calls: Calls of its workers that wait for an answer.
        lost: Ranks whose connection has ended.
        tensors: Tensors of the whole job, once every host has published.
        reserve_at: When room for the next snapshot is tried for again, in seconds of the law's
            clock; 0: there was some.
        postponed: Ranks that begin a snapshot while others still write the one before.
        watching: Calls of ranks that wait beside the training for a failure of others.
        emergency: What becomes of those that live, once some have failed.
        slot_waiters: Ranks that want to map the next snapshot's files ahead of time.
        stop: The step at which all have agreed to stop.
        has_arrived: Whether it was reported that every living worker stands at the stop.
        may_write: Whether the workers of every host do: they write and leave.
        was_put_off: Whether workers have come to a stop with a save in flight: at the next one they
            wait for it.
        has_sealed: Whether the snapshot of the stop was reported.
        sealed_step: The step of the snapshot that was sealed last.
        uncommitted: Names of sealed snapshots of which the coordinator has said nothing yet.
        every: So many steps lie between snapshots, as was told on the way; None: as at first.
        unwritten: Ranks that had an order when last looked at, and had not written.
        give_up_at: When ranks that may write and do not count as hung.
        raised: What the first worker said whose script raised.
        raised_at: When it did, in seconds.
        is_proven: Whether its workers may train: what they began from is proven.
        is_ending: Whether its workers are being ended.
        failure: What was reported of its failure.
        is_unhooked: Whether a worker trains that nothing connects to the job.
        uses_devices: Whether workers keep their state in device memory.
        probes: Whether its workers make a step more behind their stop.
        numbers: Of the first step, or, once ``may_write``, of that one.
        probed: Ranks that have told of it.
        probe_until: Until when it is waited for, in seconds of the law's clock; 0: it is not.
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
    probes: bool = False
    numbers: Numbers | None = None
    probed: frozenset[int] = frozenset()
    probe_until: float = 0.0

    @property
    def workers(self) -> Workers:
        """Which workers the host runs."""
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
        """Whether a stop is agreed."""
        return self.stop is not None

    @property
    def absent(self) -> frozenset[int]:
        """Ranks that write nothing: their connection has ended, or in an emergency they do not
        stand at the step that is written."""
        if self.emergency is None:
            return self.lost
        return self.lost | (frozenset(self.ranks) - self.emergency.ranks)

    @property
    def is_restoring(self) -> bool:
        """Whether the workers take their state from a generation."""
        is_requested = all(entry.is_restoring for entry in self.published.values())
        return isinstance(self.command, Start) and bool(self.command.sources) and is_requested

    def is_complete(self, ranks: Iterable[int]) -> bool:
        """Whether every worker of this host is among ``ranks``."""
        return set(ranks) >= set(self.ranks)

    def held(self) -> dict[int, Collection]:
        """Return what each worker holds at a snapshot."""
        return {rank: entry.held for rank, entry in self.published.items()}


@dataclass(frozen=True, slots=True)
class HeldStop:
    """A proposed stop that waits for a save. Times in seconds of the law's clock; ``looks``: how
    often the workers had looked for the save."""

    round: int
    stop: int
    since: float
    looks: int
    looked_at: float
    tell_at: float = 0.0
    log_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What does not change while the agent lives. ``drain_timeout_s`` is how long workers may take
    to write once they may, and the host to leave; ``exit_grace_s`` how long workers that have
    written may take to leave by themselves; ``hang_s`` after how long without a step workers count
    as hanging, 0: never."""

    host: str
    is_elastic: bool
    drain_timeout_s: float
    exit_grace_s: float = 10.0
    hang_s: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class HostState:
    """One host's part in a job.

    Attributes:
        now: The law's clock, in seconds; it moves by ``TimePassed`` alone.
        slots: Workers that the host can run.
        generations: Those that the host's store holds.
        round, standby: The present round, and one that was built beside it.
        probing: A round that has stopped, whose workers make a step more beside the present one.
        ending: Numbers of rounds whose workers are being ended, and those that were given up.
        held: A proposed stop that waits for a save.
        standing: Calls of workers that stand at an agreed stop with a save in flight.
        late: Commits by generation that wait for room in the store.
        expelled: Rounds that ended because the job went on without this host: what they seal may
            be brought when it joins again.
        save_looks: How often the workers had looked for a save when a leaving host last asked.
        leaving_at: Since when the host leaves, because a signal has told it to.
        notices: Who else says that it will be taken away, and when that is (None: at some time).
        is_rejoining: Whether the host joins again once its workers are gone.
        last_step: The last step of workers that came to the end of their script.
        last_ledger: The ledger of samples that one of them had there; None: none has told one.
        last_round: The highest number of a round that the host has heard of.
        remembered: What it keeps of the job for a coordinator that takes this one's place.
        exit: With which code the agent ends.
    """

    settings: Settings
    slots: int
    now: float = 0.0
    generations: frozenset[int] = frozenset()
    round: Round | None = None
    standby: Round | None = None
    probing: Round | None = None
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
        """Return the rounds that have ended without this host, with this one: the last few, whose
        snapshots may still be sealed just now."""
        return frozenset(sorted({*self.expelled, round})[-8:])

    @property
    def is_leaving(self) -> bool:
        """Whether a signal or a notice says that the host is to be taken away."""
        return self.leaving_at is not None or bool(self.notices)
