"""Restores: planned, fetched over the data plane, and read by the new workers."""

import _thread
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from scalai.core.errors import MismatchError, PeerError, StoreError
from scalai.core.host.events import PiecesHere, RestorePlanned
from scalai.core.host.state import Want
from scalai.core.messages.reports import Grown
from scalai.core.messages.worker_messages import RankSnapshot, ReadOrder, Source
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Box, Piece, row_major, whole
from scalai.launch.agent import fetch
from scalai.launch.agent.data_plane import DataPlaneServer
from scalai.launch.agent.fetch import Moving, Restore, prepare_restore
from scalai.runtime.live import Slot, collection_of, held_rows, wanted_rows
from scalai.runtime.live_files import elements_of, read_rows
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from scalai.store.parts import summary_bytes
from support.listed import listed
from support.store_states import Opener
from support.wire import travelled
from support.wire_words import start
from support.written_rows import write_rows

pytestmark = pytest.mark.fault

TOKEN = b"token"
ABOUT = {"consumed_samples": 12, "world_size": 2}
SHAPES = {"param/w": (12, 10), "main/w": (12, 10), "param/b": (9,), "step/w": ()}


def full(name: str) -> torch.Tensor:
    """Return the values of a whole tensor."""
    count = int(np.prod(SHAPES[name]))
    return torch.arange(count, dtype=torch.float32) + 1000 * len(name)


def rows_of(name: str, low: int, high: int) -> Slot:
    """Return a slot with rows ``[low, high)`` of a tensor; of a 0-d tensor, all of it."""
    shape = SHAPES[name]
    box = Box((low, *[0] * (len(shape) - 1)), (high - low, *shape[1:])) if shape else whole(shape)
    inner = int(np.prod(shape[1:]))
    values = full(name)[low * inner : high * inner].clone() if shape else full(name)
    return Slot(Tensor(name, shape, "F32"), values, (Piece(box, 0, row_major(box.shape)),))


def shard(rank: int, degree: int) -> list[Slot]:
    """Return the slots of one of ``degree`` ranks: its rows of every tensor."""
    heights = {name: max(shape[:1], default=1) for name, shape in SHAPES.items()}
    return [
        rows_of(name, rank * rows // degree, (rank + 1) * rows // degree)
        for name, rows in heights.items()
    ]


def emptied(rank: int, degree: int) -> list[Slot]:
    """Return the slots of ``shard`` without their values."""
    slots = shard(rank, degree)
    for slot in slots:
        slot.buffer.fill_(-1)
    return slots


def snapshot(store: HostStore, rank: int, degree: int) -> HostManifest:
    rows = held_rows(shard(rank, degree))
    slot = store.reserve({rank: collection_of(rows)})
    part = RankSnapshot(tuple(write_rows(rows, slot.orders[rank])), f"tp{rank}", {"lr": 1}, rank)
    store.seal(slot, step=4, about=ABOUT, parts={rank: part})
    return store.commit(slot, 1)


class Handed:
    """What a fetch hands to the workers of its host, and its result."""

    def __init__(self, until: Callable[[PiecesHere], None]) -> None:
        self._until = until
        self.batches: list[PiecesHere] = []
        self.told: list[Grown] = []
        self.result = Restore()

    def take(self, event: object) -> None:
        if isinstance(event, RestorePlanned):
            self.planned = event
            return
        if isinstance(event, Grown):
            self.told.append(event)
            return
        assert isinstance(event, PiecesHere)
        self.batches.append(event)
        self._until(event)

    @property
    def sources(self) -> Mapping[int, Source]:
        return self.planned.sources

    @property
    def bytes_local(self) -> int:
        return self.planned.bytes_local

    @property
    def bytes_remote(self) -> int:
        return self.planned.bytes_remote

    @property
    def grown(self) -> HostManifest | None:
        return self.result.grown

    def orders(self, rank: int) -> list[ReadOrder]:
        """Return what a rank reads, in order."""
        later = [batch.orders[rank] for batch in self.batches if rank in batch.orders]
        return [self.sources[rank].order, *later]


class Hosts:
    """Hosts a and b with halves of a state, and their data planes; b2 has what b has."""

    def __init__(self, open_store: Opener) -> None:
        self.stores = {host: open_store(host=host) for host in ("a", "b", "b2", "c")}
        halves = {"a": 0, "b": 1, "b2": 1}
        self.parts = {host: snapshot(self.stores[host], rank, 2) for host, rank in halves.items()}
        self.servers = {host: DataPlaneServer(self.stores[host], TOKEN) for host in self.parts}

    def prepare(
        self, host: str = "c", rank: int = 0, ranks: int = 0, degree: int = 1, **given: Any
    ) -> Handed:
        """Fetch for a host's ranks, from ``rank`` on: the whole state in ``degree`` shards.

        ``ranks``: with the states of so many; ``parts``: known to the coordinator; ``arrived``;
        ``until``: called with each batch.
        """
        addresses = {name: server.address for name, server in self.servers.items()}
        sources = listed(given.get("parts", self.parts), addresses, ranks=ranks)
        wants = {
            rank + n: Want(collection_of(wanted_rows(shard(n, degree))), f"tp{rank + n}")
            for n in range(degree)
        }
        begin = start(sources=sources, generation=1, group=(host,))
        arrived = given.get("arrived", lambda count: None)
        handed = self.handed = Handed(given.get("until", lambda batch: None))
        handed.result = prepare_restore(
            self.stores[host], begin, wants, TOKEN, handed.take, arrived
        )
        return handed

    def close(self, *names: str) -> None:
        for host in names or self.servers:
            self.servers[host].close()


@pytest.fixture
def hosts(open_store: Opener) -> Iterator[Hosts]:
    made = Hosts(open_store)
    yield made
    made.close()


def read(handed: Handed, degree: int = 1) -> None:
    """Do what the new workers do, and compare the values."""
    for rank in range(degree):
        slots, expected = emptied(rank, degree), shard(rank, degree)
        rows = wanted_rows(slots)
        left = elements_of(rows)
        for order in handed.orders(rank):
            left = read_rows(rows, travelled(order), left=left)
        assert not left.any()
        for slot, other in zip(slots, expected, strict=True):
            assert torch.equal(slot.buffer, other.buffer)


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_a_host_restores_from_itself_and_from_others(hosts: Hosts, degree: int) -> None:
    whole_bytes = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    for host, is_empty in (("a", False), ("c", True)):
        restore = hosts.prepare(host, degree=degree)
        read(restore, degree)
        assert bool(restore.bytes_local) is not is_empty and restore.bytes_remote
        assert restore.bytes_local + restore.bytes_remote >= whole_bytes


def test_what_was_fetched_outlives_its_host(hosts: Hosts, open_store: Opener) -> None:
    grown = hosts.prepare("a", rank=1, ranks=2).grown
    assert grown is not None and grown.rank_state == {"tp0": 0, "tp1": 1}
    hosts.close()
    hosts.stores["a"].close()
    hosts.stores["a"] = open_store(host="a")
    assert hosts.stores["a"].manifest(1).digest() == grown.digest()
    alone = hosts.prepare("a", parts={"a": grown})
    assert alone.grown is None and not alone.bytes_remote and alone.bytes_local
    read(alone)


def test_all_is_fetched_though_no_thread_can_begin(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = _thread.start_new_thread

    def refuse_here(*arguments: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("can't start new thread")
        return start(*arguments)  # the other hosts have theirs

    monkeypatch.setattr(_thread, "start_new_thread", refuse_here)
    monkeypatch.setattr(threading, "_start_new_thread", refuse_here)
    assert hosts.prepare().bytes_remote and hosts.stores["c"].generations() == [1]


def test_memory_that_runs_out_in_a_fetch_is_said_and_leaves_nothing(hosts: Hosts) -> None:
    def run_out(count: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        hosts.prepare(arrived=run_out)
    store = hosts.stores["c"]
    assert not list(store.directory.glob("fetched-*")) and not store.generations()


# ------------------------------------------------------------------ batch after batch


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is a batch of its own, or nearly."""
    monkeypatch.setattr(fetch, "BATCH_BYTES", 1)


class LastBytes:
    """Holds a fetch of so many bytes at its end until the last ones may come."""

    def __init__(self, size_bytes: int) -> None:
        self.left, self.may_come = size_bytes, threading.Event()

    def arrived(self, count: int) -> None:
        self.left -= count
        if self.left <= 0:
            assert self.may_come.wait(30.0), "no batch was handed out before the last bytes came"


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("degree", [1, 3, 5])
def test_workers_restore_each_batch_before_the_next_ones_come(hosts: Hosts, degree: int) -> None:
    """The last bytes are held until a batch that came before them was read."""
    rows = [wanted_rows(emptied(rank, degree)) for rank in range(degree)]
    left, mutex = [elements_of(each) for each in rows], threading.Lock()
    last = LastBytes(int(hosts.parts["b"].collection.size_bytes().sum()) - 4)  # both have "step/w"

    def read_at_once(batch: PiecesHere) -> None:
        with mutex:
            for rank, order in batch.orders.items():
                left[rank] = read_rows(rows[rank], travelled(order), left=left[rank])
        last.may_come.set()

    handed = hosts.prepare("a", degree=degree, until=read_at_once, arrived=last.arrived)
    assert last.left == 0 and len(handed.batches) > 1
    for rank in range(degree):
        order = handed.sources[rank].order
        assert not read_rows(rows[rank], travelled(order), left=left[rank]).any()
        for (slot, _), other in zip(rows[rank], shard(rank, degree), strict=True):
            assert torch.equal(slot.buffer, other.buffer)
    kept = hosts.stores["a"].manifest(1)
    assert handed.grown is not None and handed.grown.digest() == kept.digest()
    again = hosts.prepare("a", degree=degree, parts={**hosts.parts, "a": kept})
    assert not again.bytes_remote and not again.batches, "it has kept every batch"


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("degree", [1, 3])
def test_only_what_has_not_come_is_planned_anew_where_a_source_dies_between_batches(
    hosts: Hosts, degree: int
) -> None:
    def die(batch: PiecesHere) -> None:
        hosts.close("b")

    came = list[int]()
    handed = hosts.prepare("a", degree=degree, until=die, arrived=came.append)
    read(handed, degree)
    assert len(handed.batches) > 1 and sum(came) >= handed.bytes_remote
    files = hosts.stores["a"].manifest(1).files
    assert len(files) == 1 + len(handed.batches), "what had come was kept"


@pytest.mark.usefixtures("small_batches")
def test_a_batch_that_differs_is_never_handed_out(hosts: Hosts) -> None:
    """Those before it were, and stay; the round ends, and the coordinator knows of them."""
    held = hosts.parts["b"].collection
    names = [held.tensors[number].name for number in held.tensor.tolist()]
    row = names.index("param/b")
    for host in ("b", "b2"):
        part = hosts.parts[host]
        path = hosts.stores[host].generation_directory(1) / part.files[part.file[row]].name
        with path.open("r+b") as file:
            file.seek(int(part.begin[row]))
            file.write(b"\xff\xff")
    batches = list[PiecesHere]()
    before = hosts.stores["a"].manifest(1)
    with pytest.raises(MismatchError, match="are not what their hosts say"):
        hosts.prepare("a", until=batches.append)
    tensor, box = hosts.parts["b"].collection.box(row)
    for order in (batch.orders[0] for batch in batches):
        wanted = collection_of(wanted_rows(shard(0, 1)))
        boxes = zip(wanted.tensor[order.row].tolist(), order.offset.tolist(), strict=True)
        assert all(
            (wanted.tensors[number].name, offset[6 - len(box.offset) :])
            != (tensor.name, list(box.offset))
            for number, offset in boxes
        )
    grown = hosts.stores["a"].manifest(1)
    assert [told.manifest for told in hosts.handed.told] == [summary_bytes(grown)] * bool(batches)
    kept = hosts.stores["a"].forget_unproven(1)
    assert kept is not None and kept.digest() == before.digest()
    assert not list(hosts.stores["a"].directory.glob("fetched-*"))


@pytest.mark.usefixtures("small_batches")
def test_a_generation_that_is_dropped_meanwhile_is_not_made_anew(hosts: Hosts) -> None:
    """Nobody would drop it a second time."""
    store = hosts.stores["c"]

    def drop(batch: PiecesHere) -> None:
        with suppress(StoreError):
            store.drop(1)

    with pytest.raises(StoreError, match="is not committed here"):
        hosts.prepare(until=drop)
    assert not store.generations() and not hosts.handed.told
    assert not list(store.directory.glob("fetched-*"))


def test_a_piece_that_an_older_generation_has_unchanged_does_not_come_again(hosts: Hosts) -> None:
    """As a replica of a frozen tensor does."""
    rows, store = held_rows(shard(1, 2)), hosts.stores["c"]
    slot = store.reserve({1: collection_of(rows)})
    part = RankSnapshot(tuple(write_rows(rows, slot.orders[1])), "tp1")
    store.seal(slot, step=3, about=ABOUT, parts={1: part})
    store.commit(slot, 0)
    came = list[int]()
    handed = hosts.prepare("c", degree=2, arrived=came.append)
    read(handed, 2)
    theirs = int(hosts.parts["b"].collection.size_bytes().sum())
    assert sum(came) == handed.bytes_remote - theirs


@pytest.mark.usefixtures("small_batches")
def test_a_fetch_whose_round_has_ended_is_given_up(hosts: Hosts) -> None:
    moving = Moving(1)
    last = LastBytes(4 * sum(int(np.prod(shape)) for shape in SHAPES.values()))

    def arrived(count: int) -> None:
        last.arrived(count)
        moving.arrived(count)

    def give_up(batch: PiecesHere) -> None:
        moving.give_up()
        last.may_come.set()

    with pytest.raises(StoreError, match="their round has ended"):
        hosts.prepare(until=give_up, arrived=arrived)
    assert not list(hosts.stores["c"].directory.glob("fetched-*"))


# ------------------------------------------------------------------ who is asked, and who answers


@pytest.mark.parametrize("gone", ["b", "b2"])
def test_a_source_that_is_gone_is_left_out_where_a_replica_answers(hosts: Hosts, gone: str) -> None:
    hosts.close(gone)
    read(hosts.prepare())


def test_sources_that_are_gone_are_named_where_nobody_else_has_what_they_held(
    hosts: Hosts,
) -> None:
    hosts.close("b", "b2")
    with pytest.raises(
        PeerError,
        match=r"2 hosts did not say what they hold \(b: .*; b2: .*nobody holds \[6:12,0:10\]",
    ):
        hosts.prepare()
    assert not hosts.stores["c"].generations()


def test_a_source_whose_file_is_too_short_is_left_out_and_told(hosts: Hosts) -> None:
    gives = ["b", "b2"]
    for host in gives:
        for path in hosts.stores[host].generation_directory(1).glob("rank-*"):
            os.truncate(path, path.stat().st_size // 2)
        if host == "b":
            restore = hosts.prepare()
            suspected = restore.result.suspected
            assert restore.bytes_remote and (suspected is None or suspected.hosts == ("b",))
            hosts.stores["c"].drop(1)
    with pytest.raises(MismatchError, match="2 hosts did not say") as raised:
        hosts.prepare()
    assert set(raised.value.hosts) == {"b", "b2"}


def stated_otherwise(part: HostManifest, row: int) -> HostManifest:
    """Return a part with another fingerprint of a piece."""
    fingerprint = part.fingerprint.copy()
    fingerprint[row] += np.uint64(1)
    return replace(part, fingerprint=fingerprint)


def test_who_holds_other_pieces_than_the_coordinator_knows_is_not_believed(hosts: Hosts) -> None:
    others = {host: stated_otherwise(hosts.parts[host], 0) for host in ("b", "b2")}
    parts = {**hosts.parts, **others}
    with pytest.raises(PeerError, match="has other pieces of generation 1"):
        hosts.prepare(parts=parts)
    with pytest.raises(StoreError, match=r"host 'b' holds other pieces .* \(4, not 4\)"):
        hosts.prepare("b", parts=parts)


def test_who_has_all_that_it_wants_asks_nobody(hosts: Hosts) -> None:
    """Also with a part that the coordinator does not know yet: its round ended before this was
    heard."""
    hosts.prepare()
    again = hosts.prepare()
    assert again.grown is None and not again.bytes_remote
    parts = {**hosts.parts, "c": hosts.stores["c"].manifest(1)}
    hosts.close()
    again = hosts.prepare(parts=parts)
    assert again.grown is None and not again.bytes_remote and again.bytes_local


def test_a_source_that_has_grown_meanwhile_still_gives_what_was_listed(hosts: Hosts) -> None:
    before = dict(hosts.parts)
    assert hosts.prepare("b").grown is not None
    assert len(hosts.stores["b"].manifest(1).collection) > len(before["b"].collection)
    hosts.close("b2")
    assert hosts.prepare(parts=before).bytes_remote


def test_the_state_of_a_rank_comes_from_who_has_it_and_stays_with_who_fetched(
    hosts: Hosts,
) -> None:
    restore = hosts.prepare(rank=1, ranks=2)
    assert restore.sources[1].rank_state.value() == {"tp1": 1}
    assert restore.grown is not None
    assert restore.grown.rank_state == {"tp1": 1} and restore.grown.ranks == (1,)


def test_no_rank_gets_its_state_where_some_are_missing(hosts: Hosts) -> None:
    parts = {**hosts.parts, "a": replace(hosts.parts["a"], rank_state={})}
    assert hosts.prepare(rank=1, ranks=2, parts=parts).sources[1].rank_state.value() == {}


def test_a_rank_whose_state_is_not_given_begins_no_new_one_alone(hosts: Hosts) -> None:
    """The others would go on with theirs."""
    grown = hosts.prepare().grown
    assert grown is not None
    hosts.close("b")
    with pytest.raises(PeerError, match="cannot be reached"):
        hosts.prepare(
            rank=1, ranks=2, parts={"a": hosts.parts["a"], "b": hosts.parts["b"], "c": grown}
        )


def test_states_of_ranks_are_found_wherever_they_lie(hosts: Hosts) -> None:
    """What was converted names one rank and has the states of all."""
    both = {"tp0": 0, "tp1": 1}
    sources = listed({"a": replace(hosts.parts["a"], rank_state=both)}, ranks=2).value
    assert sources.rank_states == {"tp0": 0, "tp1": 0}
