"""Two hosts, one resize: planned, fetched over the data plane, restored, and proven equal."""

import _thread
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scalai.core.errors import MemoryShortError, MismatchError, PeerError, StoreError
from scalai.core.host.state import Want
from scalai.core.messages.worker_messages import RankSnapshot
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import plan
from scalai.core.tensors.region import Box, Piece, row_major, whole
from scalai.launch.agent.data_plane import DataPlaneServer, Peer
from scalai.launch.agent.fetch import Restore, prepare_restore
from scalai.runtime.live import Slot, collection_of, held_rows, wanted_rows
from scalai.runtime.restore import read_rows
from scalai.store.generation import unite_hosts
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from scalai.store.moves import Fetched, fetch_lists, holders_of, read_orders
from scalai.store.parts import Extras
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


def rows_of(name: str, low: int, high: int, *, is_empty: bool = False) -> Slot:
    """Return a slot with rows ``[low, high)`` of a tensor; of a 0-d tensor, all of it."""
    shape = SHAPES[name]
    tensor = Tensor(name, shape, "F32")
    box = Box((low, *[0] * (len(shape) - 1)), (high - low, *shape[1:])) if shape else whole(shape)
    inner = int(np.prod(shape[1:]))
    values = full(name)[low * inner : high * inner].clone() if shape else full(name)
    buffer = torch.zeros_like(values) if is_empty else values
    return Slot(tensor, buffer, (Piece(box, 0, row_major(box.shape)),))


def shard(rank: int, degree: int, *, is_empty: bool = False) -> list[Slot]:
    """Return what a rank of ``degree`` ranks has: its rows of every tensor."""
    return [
        rows_of(
            name,
            rank * max(shape[:1], default=1) // degree,
            (rank + 1) * max(shape[:1], default=1) // degree,
            is_empty=is_empty,
        )
        for name, shape in SHAPES.items()
    ]


def snapshot(store: HostStore, rank: int, degree: int) -> HostManifest:
    rows = held_rows(shard(rank, degree))
    slot = store.reserve({rank: collection_of(rows)})
    part = RankSnapshot(tuple(write_rows(rows, slot.orders[rank])), f"tp{rank}", {"lr": 1}, rank)
    store.seal(slot, step=4, about=ABOUT, parts={rank: part})
    return store.commit(slot, 1)


def fetch_all(store: HostStore, lists: list[Fetched], peers: dict[str, DataPlaneServer]) -> None:
    for entry in lists:
        asked = entry.asked
        peer = Peer(peers[asked.host].address, TOKEN, asked.host, timeout_s=5)
        peer.fetch(1, asked.row, asked.pieces, entry.path, entry.begin)


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_a_host_restores_from_itself_and_from_others(open_store: Opener, degree: int) -> None:
    stores = {host: open_store(host=host) for host in ("a", "b", "c")}
    parts = [snapshot(stores[host], rank, 2) for rank, host in enumerate(("a", "b"))]
    servers = {host: DataPlaneServer(stores[host], TOKEN) for host in ("a", "b")}
    for host in ("a", "c"):
        store = stores[host]
        new = [shard(rank, degree, is_empty=True) for rank in range(degree)]
        targets = [Holder(host, collection_of(wanted_rows(s)), r) for r, s in enumerate(new)]
        planned = plan(holders_of(parts), targets, ["a", "c"])
        fetched = []
        for asked in fetch_lists(planned, parts, host):
            staged = store.stage(asked.pieces)
            fetched.append(Fetched(asked, staged.path, staged.begins))
        assert [entry.asked.host for entry in fetched] == (["b"] if host == "a" else ["a", "b"])
        fetch_all(store, fetched, servers)
        own = {"a": store.generation_directory(1)} if host == "a" else {}
        orders = read_orders(planned, parts, own, fetched)
        for rank, slots in enumerate(new):
            read_rows(wanted_rows(slots), travelled(orders[rank]))
            for slot, expected in zip(slots, shard(rank, degree), strict=True):
                assert torch.equal(slot.buffer, expected.buffer)
        assert planned.bytes_remote == sum(int(e.asked.pieces.size_bytes().sum()) for e in fetched)
    for server in servers.values():
        server.close()


def test_what_was_fetched_outlives_its_host(open_store: Opener) -> None:
    stores = {host: open_store(host=host) for host in ("a", "b")}
    parts = [snapshot(stores[host], rank, 2) for rank, host in enumerate(("a", "b"))]
    generation = unite_hosts(parts)
    new = shard(0, 1, is_empty=True)
    targets = [Holder("a", collection_of(wanted_rows(new)), 0)]
    planned = plan(holders_of(parts), targets)
    [asked] = fetch_lists(planned, parts, "a")
    staged = stores["a"].stage(asked.pieces)
    with DataPlaneServer(stores["b"], TOKEN) as server:
        fetch_all(stores["a"], [Fetched(asked, staged.path, staged.begins)], {"b": server})
    extras = Extras(generation.scalars, {"tp1": 1}, (1,), None)
    grown = stores["a"].extend(1, staged, extras)
    stores["b"].remove()
    stores["a"].close()
    again = open_store(host="a")
    assert again.manifest(1).digest() == grown.digest()
    assert grown.rank_state == {"tp0": 0, "tp1": 1}
    alone = plan(holders_of([grown]), targets)
    assert alone.bytes_remote == 0
    orders = read_orders(alone, [grown], {"a": again.generation_directory(1)})
    read_rows(wanted_rows(new), orders[0])
    for slot, expected in zip(new, shard(0, 1), strict=True):
        assert torch.equal(slot.buffer, expected.buffer)


def test_a_durable_generation_is_read_without_its_hosts(open_store: Opener, tmp_path: Path) -> None:
    stores = {host: open_store(host=host) for host in ("a", "b")}
    parts = [snapshot(stores[host], rank, 2) for rank, host in enumerate(("a", "b"))]
    directories = {host: store.copy_to(1, tmp_path / "disk") for host, store in stores.items()}
    for store in stores.values():
        store.remove()
    new = shard(0, 1, is_empty=True)
    targets = [Holder("z", collection_of(wanted_rows(new)), 0)]
    planned = plan(holders_of(parts, host="z", readable=directories), targets)
    assert planned.bytes_remote == 0
    read_rows(wanted_rows(new), read_orders(planned, parts, directories)[0])
    for slot, expected in zip(new, shard(0, 1), strict=True):
        assert torch.equal(slot.buffer, expected.buffer)


def prepare(stores: dict[str, HostStore], first: Callable[[], None] = lambda: None) -> Restore:
    """Fetch for host c what a and b wrote."""
    parts = {host: snapshot(stores[host], rank, 2) for rank, host in enumerate("ab")}
    wants = {0: Want(collection_of(wanted_rows(shard(0, 1, is_empty=True))), "tp1")}
    with DataPlaneServer(stores["a"], TOKEN) as a, DataPlaneServer(stores["b"], TOKEN) as b:
        sources = listed(parts, {"a": a.address, "b": b.address}, ranks=2)
        begin = start(sources=sources, generation=1, group=("a", "b", "c"))
        first()
        return prepare_restore(stores["c"], begin, wants, TOKEN)


def test_all_is_fetched_though_no_thread_can_begin(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = _thread.start_new_thread

    def refuse_here(*arguments: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("can't start new thread")
        return start(*arguments)  # the other hosts have theirs

    def refuse() -> None:
        monkeypatch.setattr(_thread, "start_new_thread", refuse_here)
        monkeypatch.setattr(threading, "_start_new_thread", refuse_here)

    stores = {host: open_store(host=host) for host in ("a", "b", "c")}
    restore = prepare(stores, refuse)
    assert restore.bytes_remote and stores["c"].generations() == [1]


def test_memory_that_runs_out_in_a_fetch_is_said_and_leaves_nothing(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object, **how: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Peer, "fetch", run_out)
    stores = {host: open_store(host=host) for host in ("a", "b", "c")}
    with pytest.raises(MemoryShortError, match="generation 1 from 2 hosts"):
        prepare(stores)
    assert not list(stores["c"].directory.glob("fetched-*")) and not stores["c"].generations()


# ------------------------------------------------------------------ who is asked, and who answers


class Hosts:
    """Hosts a and b with halves of a state, and their data planes; b2 has what b has."""

    def __init__(self, open_store: Opener) -> None:
        self.stores = {host: open_store(host=host) for host in ("a", "b", "b2", "c")}
        halves = {"a": 0, "b": 1, "b2": 1}
        self.parts = {host: snapshot(self.stores[host], rank, 2) for host, rank in halves.items()}
        self.servers = {host: DataPlaneServer(self.stores[host], TOKEN) for host in self.parts}
        self.addresses = {host: server.address for host, server in self.servers.items()}

    def prepare(self, host: str = "c", rank: int = 0, ranks: int = 0, **other: Any) -> Restore:
        """Fetch for one rank on a host, which wants the whole state."""
        sources = listed(other.get("parts", self.parts), self.addresses, ranks=ranks)
        wants = {rank: Want(collection_of(wanted_rows(shard(0, 1, is_empty=True))), f"tp{rank}")}
        begin = start(sources=sources, generation=1, group=(host,))
        return prepare_restore(self.stores[host], begin, wants, TOKEN)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


@pytest.fixture
def hosts(open_store: Opener) -> Iterator[Hosts]:
    made = Hosts(open_store)
    yield made
    made.close()


@pytest.mark.parametrize("gone", ["b", "b2"])
def test_a_source_that_is_gone_is_left_out_where_a_replica_answers(hosts: Hosts, gone: str) -> None:
    hosts.servers[gone].close()
    assert hosts.prepare().bytes_remote


def test_sources_that_are_gone_are_named_where_nobody_else_has_what_they_held(
    hosts: Hosts,
) -> None:
    hosts.servers["b"].close()
    hosts.servers["b2"].close()
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


def test_who_holds_other_pieces_than_the_coordinator_knows_is_not_believed(hosts: Hosts) -> None:
    parts = dict(hosts.parts)
    for host in ("b", "b2"):
        parts[host] = replace(parts[host], fingerprint=parts[host].fingerprint + np.uint64(1))
    with pytest.raises(PeerError, match="has other pieces of generation 1"):
        hosts.prepare(parts=parts)
    with pytest.raises(StoreError, match=r"host 'b' holds other pieces .* \(4, not 4\)"):
        hosts.prepare("b", parts=parts)


def test_who_has_all_that_it_wants_asks_nobody(hosts: Hosts) -> None:
    hosts.prepare()
    parts = {**hosts.parts, "c": hosts.stores["c"].manifest(1)}
    for server in hosts.servers.values():
        server.close()
    again = hosts.prepare(parts=parts)
    assert again.grown is None and not again.bytes_remote and again.bytes_local


def test_a_source_that_has_grown_meanwhile_still_gives_what_was_listed(hosts: Hosts) -> None:
    before = dict(hosts.parts)
    assert hosts.prepare("b").grown is not None
    assert len(hosts.stores["b"].manifest(1).collection) > len(before["b"].collection)
    hosts.servers["b2"].close()
    assert hosts.prepare(parts=before).bytes_remote


def test_the_state_of_a_rank_comes_from_who_has_it_and_stays_with_who_fetched(
    hosts: Hosts,
) -> None:
    restore = hosts.prepare(rank=1, ranks=2)
    assert restore.sources[1].rank_state.value() == {"tp1": 1}
    assert restore.grown is not None
    assert restore.grown.rank_state == {"tp1": 1} and restore.grown.ranks == (1,)


def test_no_rank_gets_its_state_where_some_are_missing(hosts: Hosts) -> None:
    parts = {host: hosts.parts[host] for host in ("b", "b2")}
    parts["a"] = replace(hosts.parts["a"], rank_state={})
    assert hosts.prepare(rank=1, ranks=2, parts=parts).sources[1].rank_state.value() == {}


def test_a_rank_whose_state_is_not_given_begins_no_new_one_alone(hosts: Hosts) -> None:
    """The others would go on with theirs."""
    parts = {host: hosts.parts[host] for host in ("a", "b")}
    grown = hosts.prepare().grown
    assert grown is not None
    whole = {**parts, "c": grown}
    hosts.servers["b"].close()
    with pytest.raises(PeerError, match="cannot be reached"):
        hosts.prepare(rank=1, ranks=2, parts=whole)


def test_states_of_ranks_are_found_wherever_they_lie(hosts: Hosts) -> None:
    """What was converted names one rank and has the states of all."""
    both = {"tp0": 0, "tp1": 1}
    sources = listed({"a": replace(hosts.parts["a"], rank_state=both)}, ranks=2).value
    assert sources.rank_states == {"tp0": 0, "tp1": 0}


def test_a_part_that_the_coordinator_does_not_know_yet_is_not_fetched_again(hosts: Hosts) -> None:
    """It came with a round that has ended before this was heard."""
    hosts.prepare()
    again = hosts.prepare()
    assert again.grown is None and not again.bytes_remote
