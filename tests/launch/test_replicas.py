"""A host keeps what others would take with them: fetched over the data plane into its own part."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scalai.core.errors import DamageError, RoomError, StoreError
from scalai.core.messages.commands import Replicate
from scalai.core.messages.reports import Replicated, Report, Suspected
from scalai.core.messages.shared import Shared
from scalai.core.messages.worker_messages import RankSnapshot
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import piece_fingerprint
from scalai.core.tensors.region import Box
from scalai.core.tensors.replicas import ring_of
from scalai.launch.agent import fetch
from scalai.launch.agent.data_plane import DataPlaneServer, Peer
from scalai.launch.agent.replicas import Kept, Replicas
from scalai.store.generation import unite_hosts
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from support.listed import listed
from support.store_states import Opener
from support.wire import travelled

TOKEN = b"token"
HOSTS = "abc"
WEIGHT, MASTER = Tensor("param/w", (6, 4), "F32"), Tensor("main/w", (6, 4), "F32")


class Job:
    """Three hosts, whose workers all hold the weight, and a third of its master each."""

    def __init__(self, open_store: Opener, *, has_master: bool = True) -> None:
        self.stores = {host: open_store(host=host) for host in HOSTS}
        self.parts = {
            host: self._snapshot(store, number, has_master)
            for number, (host, store) in enumerate(self.stores.items())
        }
        self.servers = {host: DataPlaneServer(s, TOKEN) for host, s in self.stores.items()}
        self.keepers = {host: Replicas(store, TOKEN) for host, store in self.stores.items()}

    @staticmethod
    def _snapshot(store: HostStore, number: int, has_master: bool) -> HostManifest:
        rows = [(MASTER, Box((2 * number, 0), (2, 4)))] if has_master else []
        rows += [(WEIGHT, Box((0, 0), (6, 4)))]
        held = Collection.of(rows)
        slot = store.reserve({number: held})
        path = slot.directory / slot.files[0].name
        path.write_bytes(path.read_bytes()[: -held.size_bytes().sum()] + _content(held))
        prints = _prints(held)
        part = RankSnapshot(prints, f"dp{number}", {"lr": 1}, {"seed": number})
        about = {"consumed_samples": 1, "world_size": 3, "tensors": 2, "snapshot": "run-1-4"}
        store.seal(slot, step=4, about=about, parts={number: part})
        return store.commit(slot, 1)

    def keep(self, host: str, order: int = 1, replicas: int = 1) -> Kept:
        self.keepers[host].begin(order)
        return self.keepers[host].keep(travelled(self.command(order, replicas)))

    def command(self, order: int, replicas: int = 1) -> Replicate:
        ring = ring_of(dict.fromkeys(HOSTS, ""), replicas)
        addresses = {name: server.address for name, server in self.servers.items()}
        return Replicate(order, listed(self.parts, addresses, ranks=3), Shared(ring))

    def replicated(self, host: str, order: int = 1) -> tuple[Report, ...]:
        self.keepers[host].begin(order)
        return self.keepers[host].replicated(travelled(self.command(order)))

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


def _content(held: Collection) -> bytes:
    """Return the bytes of pieces: each element of the master is its place, of the weight 7."""
    found = b""
    for row in range(len(held)):
        tensor, box = held.box(row)
        first = box.offset[0] * 4
        values = np.arange(first, first + box.numel) if tensor == MASTER else np.full(box.numel, 7)
        found += values.astype(np.float32).tobytes()
    return found


def _prints(held: Collection) -> tuple[int, ...]:
    data, begin, found = _content(held), 0, []
    for row in range(len(held)):
        tensor, box = held.box(row)
        bits = np.frombuffer(data, np.uint32, box.numel, begin).reshape(box.shape)
        found.append(piece_fingerprint(bits, box, tensor.shape))
        begin += 4 * box.numel
    return tuple(found)


@pytest.fixture
def job(open_store: Opener) -> Iterator[Job]:
    made = Job(open_store)
    yield made
    made.close()


def test_each_keeps_what_the_one_before_it_holds_alone(job: Job) -> None:
    for host, ward in (("a", "c"), ("b", "a"), ("c", "b")):
        kept = job.keep(host)
        assert kept.reason == "" and kept.size_bytes == 2 * 4 * 4
        assert kept.grown is not None and f"dp{HOSTS.index(ward)}" in kept.grown.rank_state
        with job.stores[host].open_rows(1) as rows:
            assert not list(rows.damage())
            held = {rows.manifest.collection.box(row) for row in range(len(rows.manifest.file))}
        assert (MASTER, Box((2 * HOSTS.index(ward), 0), (2, 4))) in held
    left = [job.stores[host].manifest(1) for host in "ab"]  # c is lost
    found = unite_hosts([replace(part, committed=None) for part in left], [None, None])
    assert found.step == 4 and set(found.rank_state) == {"dp0", "dp1", "dp2"}


def test_a_second_time_nothing_has_to_come(job: Job) -> None:
    job.parts["b"] = job.keep("b").grown or job.parts["b"]
    files = job.parts["b"].files
    again = job.keep("b", 2)
    assert again.size_bytes == 0 and job.stores["b"].manifest(1).files == files


def test_states_of_ranks_are_kept_where_no_piece_has_to_be(open_store: Opener) -> None:
    job = Job(open_store, has_master=False)
    try:
        kept = job.keep("b")
        assert kept.size_bytes == 0 and kept.grown is not None
        assert set(kept.grown.rank_state) == {"dp0", "dp1"}
        assert kept.grown.files == job.parts["b"].files
    finally:
        job.close()


def change(store: HostStore, begin: int, *, is_cut: bool = False) -> None:
    """Change a byte of what a host has written, so far before its end; or cut it there."""
    (path,) = store.generation_directory(1).glob("rank-*")
    data = bytearray(path.read_bytes())
    data[-begin] ^= 0xFF
    path.write_bytes(data[:-begin] if is_cut else data)


@pytest.mark.fault
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_a_host_has_not_committed_is_not_kept_and_it_is_named(job: Job, is_cut: bool) -> None:
    change(job.stores["a"], 97, is_cut=is_cut)  # the weight is the last 96 bytes
    suspects, given = job.replicated("b")
    assert isinstance(suspects, Suspected) and suspects.hosts == ("a",)
    assert isinstance(given, Replicated) and re.search(r"\ba\b", given.reason)
    assert not list(job.stores["b"].directory.glob("**/fetched-*"))
    assert job.stores["a"].examine(1), "it finds that itself"
    job.parts["a"] = job.stores["a"].manifest(1)
    *grown, again = job.replicated("b", 2)
    assert not any(isinstance(report, Suspected) for report in grown)
    assert isinstance(again, Replicated) and again.reason == "", "there is nothing to keep of it"


@pytest.mark.fault
def test_parts_of_a_damaged_piece_are_refused_by_who_has_it(job: Job, tmp_path: Path) -> None:
    """They have no fingerprints of their own."""
    row = int(np.flatnonzero(job.parts["a"].collection.tensor == 0)[0])
    tensor, box = job.parts["a"].collection.box(row)
    half = Collection.of([(tensor, Box(box.offset, (1, 4)))])
    path, none = tmp_path / "x", np.zeros(1, np.int64)
    path.write_bytes(bytes(64))
    peer = Peer(job.servers["a"].address, TOKEN, "a")
    rows = np.array([row])
    assert peer.fetch(1, rows, half, path, none, is_checked=True) == 16
    change(job.stores["a"], 1 if tensor == WEIGHT else 97)  # behind the half
    assert peer.fetch(1, rows, half, path, none) == 16, "a restore is proven as a whole"
    with pytest.raises(DamageError, match=r"refuses: .* has fingerprint"):
        peer.fetch(1, rows, half, path, none, is_checked=True)
    whole = Collection.of([(tensor, box)])
    assert peer.fetch(1, rows, whole, path, none, is_checked=True), "the other compares it"


def test_a_host_that_gives_nothing_is_named(job: Job) -> None:
    job.servers["a"].close()
    kept = job.keep("b")
    assert kept.grown is None and kept.reason.startswith("a: ")


@pytest.mark.fault
def test_the_next_snapshot_keeps_its_room(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    store = job.stores["b"]
    monkeypatch.setattr(store, "_budget_bytes", store.manifest(1).size_bytes)
    with pytest.raises(RoomError, match=r"for this host's next snapshot.*--replicas 0"):
        job.keep("b")
    assert store.manifest(1).files == job.parts["b"].files


def test_what_is_given_up_ends_and_leaves_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round begins while bytes arrive."""
    fetches = fetch.bring

    def bring(*given: object, **named: object) -> object:
        job.keepers["b"].give_up()
        return fetches(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("scalai.launch.agent.replicas.bring", bring)
    with pytest.raises(StoreError, match="not needed any more"):
        job.keep("b")
    store = job.stores["b"]
    assert store.manifest(1).files == job.parts["b"].files
    assert not list(store.directory.glob("fetched-*"))


def test_a_later_order_ends_an_earlier_one(job: Job) -> None:
    job.keepers["b"].begin(2)
    ring = Shared(ring_of(dict.fromkeys(HOSTS, ""), 1))
    with pytest.raises(StoreError, match="something newer"):
        job.keepers["b"].keep(Replicate(1, listed(job.parts), ring))


def test_an_agent_whose_memory_runs_out_lives_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> object:
        raise MemoryError

    monkeypatch.setattr("scalai.launch.agent.replicas.bring", full)
    ring = Shared(ring_of(dict.fromkeys(HOSTS, ""), 1))
    addresses = {name: server.address for name, server in job.servers.items()}
    job.keepers["b"].begin(1)
    (found,) = job.keepers["b"].replicated(Replicate(1, listed(job.parts, addresses), ring))
    assert isinstance(found, Replicated)
    assert found.is_lasting and "memory ran out" in found.reason
