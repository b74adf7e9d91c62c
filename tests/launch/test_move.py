"""Restores: planned, fetched over the data plane, and read by the new workers."""

import _thread
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from scalai.core.errors import MemoryShortError, MismatchError, PeerError, StoreError
from scalai.core.host.state import Want
from scalai.core.messages.worker_messages import RankSnapshot
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Box, Piece, row_major, whole
from scalai.launch.agent.data_plane import DataPlaneServer
from scalai.launch.agent.fetch import Restore, prepare_restore
from scalai.runtime.live import Slot, collection_of, held_rows, wanted_rows
from scalai.runtime.live_files import read_rows
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
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


def snapshot(store: HostStore, rank: int, degree: int) -> HostManifest:
    rows = held_rows(shard(rank, degree))
    slot = store.reserve({rank: collection_of(rows)})
    part = RankSnapshot(tuple(write_rows(rows, slot.orders[rank])), f"tp{rank}", {"lr": 1}, rank)
    store.seal(slot, step=4, about=ABOUT, parts={rank: part})
    return store.commit(slot, 1)


class Hosts:
    """Hosts a and b with halves of a state, and their data planes; b2 has what b has."""

    def __init__(self, open_store: Opener) -> None:
        self.stores = {host: open_store(host=host) for host in ("a", "b", "b2", "c")}
        halves = {"a": 0, "b": 1, "b2": 1}
        self.parts = {host: snapshot(self.stores[host], rank, 2) for host, rank in halves.items()}
        self.servers = {host: DataPlaneServer(self.stores[host], TOKEN) for host in self.parts}

    def prepare(
        self, host: str = "c", rank: int = 0, ranks: int = 0, degree: int = 1, **given: Any
    ) -> Restore:
        """Fetch for a host's ranks, from ``rank`` on: the whole state in ``degree`` shards.

        ``ranks``: with the states of so many; ``parts``: known to the coordinator; ``arrived``.
        """
        addresses = {name: server.address for name, server in self.servers.items()}
        sources = listed(given.get("parts", self.parts), addresses, ranks=ranks)
        wants = {
            rank + n: Want(collection_of(wanted_rows(shard(n, degree))), f"tp{rank + n}")
            for n in range(degree)
        }
        begin = start(sources=sources, generation=1, group=(host,))
        arrived = given.get("arrived", lambda count: None)
        return prepare_restore(self.stores[host], begin, wants, TOKEN, arrived)

    def close(self, *names: str) -> None:
        for host in names or self.servers:
            self.servers[host].close()


@pytest.fixture
def hosts(open_store: Opener) -> Iterator[Hosts]:
    made = Hosts(open_store)
    yield made
    made.close()


def read(restore: Restore, degree: int = 1) -> None:
    """Do what the new workers do, and compare the values."""
    for rank in range(degree):
        slots, expected = shard(rank, degree), shard(rank, degree)
        for slot in slots:
            slot.buffer.zero_()
        read_rows(wanted_rows(slots), travelled(restore.sources[rank].order))
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

    with pytest.raises(MemoryShortError, match="generation 1 from 3 hosts"):
        hosts.prepare(arrived=run_out)
    store = hosts.stores["c"]
    assert not list(store.directory.glob("fetched-*")) and not store.generations()


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
            suspected = restore.suspected
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
