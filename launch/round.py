"""What one host's agent keeps of the round under way: who has published, deposited, restored,
stepped."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from scalai.core.collection import Collection
from scalai.store.deposit import Deposit
from scalai.store.orders import RankDeposit

Json = Any


@dataclass(slots=True)
class Published:
    """What one worker holds and wants; ``answer`` is what it waits for."""

    held: Collection
    wanted: Collection
    is_restoring: bool
    answer: "Future[Json]"


@dataclass(slots=True)
class Round:
    """One incarnation of this host's workers. Only the agent's own thread changes it."""

    command: Mapping[str, Json]
    """The coordinator's ``start`` command."""
    published: dict[int, Published] = field(default_factory=dict)
    restored: dict[int, tuple[Mapping[str, Json], "Future[Json]"]] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    """Ranks whose connection has ended."""
    facts: dict[str, Json] = field(default_factory=dict)
    tensors: int | None = None
    """Number of tensors of the whole job, once every host has published."""
    reserved: Deposit | None = None
    is_reserving: bool = False
    deposit: "DepositUnderWay | None" = None
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_local: int = 0
    bytes_remote: int = 0
    is_draining: bool = False
    has_failed: bool = False

    @property
    def number(self) -> int:
        return int(self.command["round"])

    @property
    def ranks(self) -> range:
        """Global ranks of this host's workers."""
        first = int(self.command["first_rank"])
        return range(first, first + int(self.command["local_world_size"]))

    def is_complete(self, ranks: "set[int] | dict[int, Any]") -> bool:
        """Whether every worker of this host is in ``ranks``."""
        return set(ranks) >= set(self.ranks)

    def held(self) -> dict[int, Collection]:
        return {rank: entry.held for rank, entry in self.published.items()}


@dataclass(slots=True)
class DepositUnderWay:
    """A deposit whose workers are writing."""

    reason: str
    step: int
    waiting: dict[int, "Future[Json]"] = field(default_factory=dict)
    """Workers that wait for their order, because the files are not ready yet."""
    parts: dict[int, RankDeposit] = field(default_factory=dict)
    seconds: float = 0.0
    consumed_samples: int = 0
    is_sealing: bool = False


def answers(futures: Mapping[int, "Future[Json]"]) -> Iterator["Future[Json]"]:
    """Yield the futures that nobody has answered yet."""
    return (future for future in futures.values() if not future.done())
