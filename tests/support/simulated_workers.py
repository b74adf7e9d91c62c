"""What simulated hosts are made of: the clock of all, the tensors of a state, workers and the files
that they write."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from scalai.core.job.spacing import Schedule
from scalai.core.messages.worker_messages import WriteOrder
from scalai.core.tensors.collection import Collection, Tensor
from scalai.launch.coordinator.rendezvous_store import Then

TENSORS = tuple(Tensor(f"param/t{number}", (4,), "F32") for number in range(4))


class Clock:
    """The one clock of all simulated processes, in seconds."""

    now = 1000.0


def print_of(tensor: Tensor, step: int) -> int:
    """Return the fingerprint of a whole tensor at a step."""
    return 1 + step * len(TENSORS) + TENSORS.index(tensor)


class SimulatedStores:
    """Workers meet nowhere, but as with real stores the job may have to wait for them."""

    def __init__(self) -> None:
        self._port = 0
        self._waiting: list[Then] = []
        self.is_late = False
        """Its process imports torch, or is stopped: what is opened is there once ``come``."""

    def wait_ready(self) -> None: ...

    def open(self, then: Then) -> None:
        self._waiting.append(then)
        if not self.is_late:
            self.come()

    def come(self) -> None:
        """What was to be opened is open."""
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            self._port += 1
            then(self._port)

    def close(self, port: int) -> None: ...

    def end(self) -> None: ...


class EverySlot:
    """Files for a snapshot: each rank writes what it holds."""

    def __init__(self, held: dict[int, Collection]) -> None:
        self.held = held
        self.orders = {rank: WriteOrder(rank, f"{rank}", (0,), (0,)) for rank in held}

    def take_over(self, lost: int, alive: Iterable[int]) -> dict[int, WriteOrder]:
        names = {tensor.name for tensor in self.held[lost].tensors}
        for rank in sorted(set(alive) - {lost}):
            if names <= {tensor.name for tensor in self.held[rank].tensors}:
                return {rank: WriteOrder(rank, f"{lost}", (0,), (0,))}
        return {}


@dataclass(slots=True)
class Worker:
    """One rank: ``doing`` is what it calls next, ``call`` what it waits for."""

    rank: int
    doing: str = "hello"
    step: int = 0
    source: int | None = None
    """The step that it has restored; None: its own initial state."""
    call: int | None = None
    exit: int | None = None
    is_hung: bool = False
    is_late: bool = False
    """It makes its steps, and does not come to the stop."""
    proves: bool = False
    """It makes one more step behind its stop, and tells of it."""
    is_gone: bool = False
    """Whether its end has been noticed as that of its connection."""
    is_stopped: bool = False
    """It does nothing at all, as after SIGSTOP."""
    is_torn: bool = False
    """It is in the middle of an update."""
    thread: str = ""
    """What its thread calls next that waits for a failure; empty before the first step."""
    thread_call: int | None = None
    snapped: int = 0
    """The step of its last snapshot."""
    copy: str = ""
    """What a snapshot beside its training does next: ``begin`` and, once all is copied, ``write``;
    empty: there is none."""
    copy_call: int | None = None
    is_copying: bool = False
    """What it has copied is told late."""
    schedule: Schedule = field(default_factory=lambda: Schedule(0))
    """At which steps it makes snapshots."""


@dataclass(slots=True)
class Group:
    """The workers of one round on a host, and their page."""

    workers: dict[int, Worker]
    world_size: int
    """Workers of the whole round."""
    proposed: int | None = None
    agreed: int | None = None
    spaced: Schedule | None = None

    def newest(self) -> int:
        return max((worker.step for worker in self.workers.values()), default=0)
