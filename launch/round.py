"""What one host's agent keeps of the round under way: who has published, deposited, restored,
stepped."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from scalai.core.collection import Collection
from scalai.core.commands import Build, Start, Workers
from scalai.core.errors import PeerError
from scalai.core.jsonable import Json
from scalai.core.orders import RankDeposit, WriteOrder
from scalai.core.worker_messages import RankRestored, Samples, Source
from scalai.store.deposit import Deposit

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Published:
    """What one worker holds and wants; ``answer`` is what it waits for."""

    held: Collection
    wanted: Collection
    is_restoring: bool
    answer: "Future[Source | None]"


@dataclass(slots=True)
class Round:
    """One incarnation of this host's workers. Only the agent's own thread changes it."""

    command: Build | Start
    """The coordinator's command; ``Build`` where it was built ahead and has not begun."""
    published: dict[int, Published] = field(default_factory=dict)
    restored: dict[int, tuple[RankRestored, "Future[None]"]] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    """Ranks whose connection has ended."""
    facts: dict[str, Json] = field(default_factory=dict)
    tensors: int | None = None
    """Number of tensors of the whole job, once every host has published."""
    reserved: Deposit | None = None
    is_reserving: bool = False
    reserve_at: float = 0.0
    """When room for the next deposit is tried for again, by ``time.monotonic``; 0: there was
    some."""
    reserve_wait_s: float = 0.0
    deposit: "DepositUnderWay | None" = None
    postponed: list[Callable[[], None]] = field(default_factory=list)
    """Workers that begin a deposit while others still write the one before."""
    slot_waiters: "list[tuple[int, Future[WriteOrder | None]]]" = field(default_factory=list)
    """Workers that want to map the next deposit's files ahead of time."""
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_local: int = 0
    bytes_remote: int = 0
    stop: int | None = None
    """The step at which all have agreed to stop."""
    has_arrived: bool = False
    """Whether the coordinator was told that every living worker stands at the stop."""
    may_deposit: bool = False
    """Whether the coordinator has said that the workers of every host do: they write and leave."""
    was_put_off: bool = False
    """Whether workers have come to a stop with a save in flight: at the next one they wait for
    it."""
    has_sealed: bool = False
    """Whether the deposit of the stop was told of."""
    unwritten: set[int] = field(default_factory=set)
    """Workers that had an order when last looked at, and had not written."""
    give_up_at: float | None = None
    """When workers that may write and do not count as hung, by ``time.monotonic``."""
    has_failed: bool = False
    is_expelled: bool = False
    """Whether the job went on without this host: what it seals it may bring when it joins again."""
    is_unhooked: bool = False
    """Whether a worker trains that nothing connects to the job."""
    uses_devices: bool = False
    """Whether workers keep their state in device memory."""
    unanswered: "set[Future[Any]]" = field(default_factory=set)
    """What workers wait for."""

    @property
    def is_draining(self) -> bool:
        """Whether a stop is agreed."""
        return self.stop is not None

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

    def is_complete(self, ranks: "set[int] | dict[int, Any]") -> bool:
        """Whether every worker of this host is in ``ranks``."""
        return set(ranks) >= set(self.ranks)

    @property
    def is_restoring(self) -> bool:
        """Whether the workers take their state from a generation."""
        is_wished = all(entry.is_restoring for entry in self.published.values())
        return isinstance(self.command, Start) and bool(self.command.sources) and is_wished

    def dismiss(self) -> None:
        """The workers are gone: whoever still waits for an answer to them gets an error."""
        for _, answer in self.slot_waiters:
            answer.set_result(None)
        for answer in answers(self.unanswered):
            answer.set_exception(PeerError("this round of workers has ended."))
        self.unanswered.clear()

    def held(self) -> dict[int, Collection]:
        return {rank: entry.held for rank, entry in self.published.items()}


@dataclass(slots=True)
class DepositUnderWay:
    """A deposit whose workers are writing."""

    reason: str
    step: int
    waiting: dict[int, "Future[WriteOrder | None]"] = field(default_factory=dict)
    """Workers that wait for their order, because the files are not ready yet."""
    ordered: set[int] = field(default_factory=set)
    """Workers that have had an order."""
    parts: dict[int, RankDeposit] = field(default_factory=dict)
    done: dict[int, "Future[WriteOrder | None]"] = field(default_factory=dict)
    """Workers that have written at a stop: kept, because a replica of theirs may die."""
    taken_over: list[tuple[WriteOrder, Sequence[int]]] = field(default_factory=list)
    """What was written for workers that died, with its fingerprints."""
    replaced: set[int] = field(default_factory=set)
    """Workers that died, whose pieces were handed to others as far as others hold them."""
    queued: dict[int, list[WriteOrder]] = field(default_factory=dict)
    writing: dict[int, WriteOrder] = field(default_factory=dict)
    """Heirs: what they will write, and what they write now."""
    seconds: dict[str, float] = field(default_factory=dict)
    consumed_samples: Samples = 0
    is_sealing: bool = False

    def report(self, rank: int, part: RankDeposit) -> None:
        """A worker has written: its own share first, later what it took over."""
        order = self.writing.pop(rank, None)
        if order is None:
            self.parts[rank] = part
        else:
            self.taken_over.append((order, part.fingerprints))

    def hand_over(self, lost: set[int], slot: Deposit) -> None:
        """Give what dead workers should have written to replicas of theirs that live."""
        alive = set(self.parts) - lost
        for rank in lost:
            # An heir that dies leaves a gap here; what others hold of it they hold anyway.
            self.queued.pop(rank, None)
            self.writing.pop(rank, None)
        for rank in sorted(lost - set(self.parts) - self.replaced):
            self.replaced.add(rank)
            for heir, order in slot.take_over(rank, alive).items():
                self.queued.setdefault(heir, []).append(order)
        for heir in [rank for rank in self.queued if rank in self.done]:
            self.writing[heir] = self.queued[heir].pop(0)
            if not self.queued[heir]:
                del self.queued[heir]
            self.done.pop(heir).set_result(self.writing[heir])

    def unwritten(self) -> set[int]:
        """Workers that have an order and have not written."""
        return (self.ordered - set(self.parts)) | set(self.writing)

    @property
    def is_handed_over(self) -> bool:
        """Whether no worker writes for another one any more."""
        return not self.queued and not self.writing


def keep_longest(kept: dict[str, float], told: Mapping[str, float]) -> None:
    """Keep of each phase the longest time that any worker needed."""
    for phase, seconds in told.items():
        kept[phase] = max(kept.get(phase, 0.0), seconds)


def answers(futures: Iterable["Future[Answer]"]) -> list["Future[Answer]"]:
    """Return the futures that nobody has answered yet."""
    return [future for future in futures if not future.done()]
