"""Who writes what at a deposit, when some of those who should write die."""

from concurrent.futures import Future
from typing import Any

import pytest

from scalai.core.collection import Collection
from scalai.core.orders import WriteOrder
from scalai.core.region import Box, whole
from scalai.launch.round import DepositUnderWay, Round, answers, keep_longest
from scalai.store.deposit import Deposit
from scalai.store.host import HostStore
from support.store_states import HALF, WEIGHT, Opener, report, write
from support.wire_words import start

ABOUT = {"consumed_samples": 1, "degrees": {}, "world_size": 3, "tensors": 2}


def replicas(count: int) -> dict[int, Collection]:
    """Return what ranks hold that all hold everything; rank 0 has a piece of its own besides."""
    everything = [(HALF, whole(HALF.shape)), (WEIGHT, Box((0, 0), (6, 4)))]
    held = {rank: Collection.of(everything) for rank in range(count)}
    held[0] = Collection.of([*everything, (WEIGHT, Box((0, 4), (6, 4)))])
    return held


class Host:
    """A host at a stop: its ranks write what they are told, unless they are dead."""

    def __init__(self, store: HostStore, ranks: int) -> None:
        self.store, self.held = store, replicas(ranks)
        self.slot: Deposit = store.reserve(self.held)
        self.deposit = DepositUnderWay("stop", 5)
        self.lost: set[int] = set()

    def write(self, rank: int, order: WriteOrder) -> "Future[Any]":
        answer: Future[Any] = Future()
        self.deposit.done[rank] = answer
        self.deposit.report(rank, report(rank, write(order, self.held[rank])))
        return answer

    def go_on(self) -> None:
        self.deposit.hand_over(self.lost, self.slot)

    def seal(self) -> dict[str, set[Box]]:
        """Return the boxes of each tensor in the sealed part; their values are checked."""
        manifest = self.store.seal(
            self.slot, step=5, about=ABOUT, parts=self.deposit.parts,
            taken_over=self.deposit.taken_over,
        )  # fmt: skip
        rows = [manifest.collection.box(row) for row in range(len(manifest.collection))]
        self.store.commit(self.slot, 1)
        with self.store.open_rows(1) as stored:
            assert not list(stored.damage())
        return {
            tensor.name: {box for other, box in rows if other.name == tensor.name}
            for tensor, _ in rows
        }


@pytest.fixture
def store(open_store: Opener) -> HostStore:
    return open_store()


EVERYTHING = {
    HALF.name: {whole(HALF.shape)},
    WEIGHT.name: {Box((0, 0), (6, 4)), Box((0, 4), (6, 4))},
}


def test_where_nobody_dies_nobody_is_asked_twice(store: HostStore) -> None:
    host = Host(store, 3)
    given = [host.write(rank, host.slot.orders[rank]) for rank in range(3)]
    host.go_on()
    assert host.deposit.is_handed_over
    assert len(answers(given)) == 3, "they are let go when the deposit is sealed"
    assert host.seal() == EVERYTHING


@pytest.mark.parametrize("victim", [1, 2])
def test_what_a_dead_rank_should_have_written_is_written_by_a_replica(
    store: HostStore, victim: int
) -> None:
    host = Host(store, 3)
    given = {rank: host.write(rank, host.slot.orders[rank]) for rank in range(3) if rank != victim}
    host.lost = {victim}
    host.go_on()
    while not host.deposit.is_handed_over:
        (heir,) = host.deposit.writing
        order = given[heir].result(timeout=0)
        given[heir] = host.write(heir, order)
        host.go_on()
    assert host.seal() == EVERYTHING


def test_what_nobody_else_holds_is_left_out(store: HostStore) -> None:
    host = Host(store, 2)
    given = host.write(1, host.slot.orders[1])
    host.lost = {0}
    host.go_on()
    if not host.deposit.is_handed_over:
        host.write(1, given.result(timeout=0))
        host.go_on()
    assert host.deposit.is_handed_over
    found = host.seal()
    assert Box((0, 4), (6, 4)) not in found[WEIGHT.name]
    assert found[HALF.name] == EVERYTHING[HALF.name]


def test_an_heir_that_dies_too_is_not_waited_for(store: HostStore) -> None:
    host = Host(store, 3)
    for rank in (0, 2):
        host.write(rank, host.slot.orders[rank])
    host.lost = {1}
    host.go_on()
    host.lost |= set(host.deposit.writing) | set(host.deposit.queued)
    host.go_on()
    assert host.deposit.is_handed_over
    host.seal()


def test_a_round_knows_its_ranks_and_what_is_complete() -> None:
    current = Round(start(round=3, first_rank=4, local_world_size=2))
    assert list(current.ranks) == [4, 5] and current.number == 3
    assert not current.is_complete({4}) and current.is_complete({3, 4, 5})
    assert not current.is_restoring


def test_the_longest_time_of_each_phase_is_kept() -> None:
    kept = {"deposit": 1.0}
    keep_longest(kept, {"deposit": 0.5, "proof": 2.0})
    assert kept == {"deposit": 1.0, "proof": 2.0}
