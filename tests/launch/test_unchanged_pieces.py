"""What a host keeps for others and has not changed since an older generation does not cross again:
it is copied on the host, and proven as what has come."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from scalai.core.collection import Collection, Tensor
from scalai.core.commands import Replicate
from scalai.core.errors import StoreError
from scalai.core.fingerprint import VERSION, piece_fingerprint
from scalai.core.messages import Shared
from scalai.core.region import Box
from scalai.core.replicas import ring_of
from scalai.core.worker_messages import RankSnapshot
from scalai.launch.agent.data_plane import DataPlaneServer
from scalai.launch.agent.replicas import Kept, Replicas
from scalai.store.files import contiguous_chunks
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from support.listed import listed
from support.store_states import Opener
from support.wire import travelled

TOKEN = b"token"
HOSTS = "abc"
TRAINED, FROZEN = Tensor("main/w", (6, 4), "F32"), Tensor("main/f", (12, 4), "F32")
EACH = {TRAINED: 2 * 4 * 4, FROZEN: 4 * 4 * 4}
"""Bytes of a third of each."""


class Job:
    """Three hosts, of which each holds a third of two tensors, and keeps that of the one before
    it."""

    def __init__(self, open_store: Opener) -> None:
        self.stores = {host: open_store(host=host) for host in HOSTS}
        self.servers = {host: DataPlaneServer(s, TOKEN) for host, s in self.stores.items()}
        self.keepers = {host: Replicas(store, TOKEN) for host, store in self.stores.items()}
        self.parts: dict[str, HostManifest] = {}
        self._orders = 0

    def write(self, number: int, content: Mapping[Tensor, int], order: str = HOSTS) -> None:
        """Commit a generation: each element is its place and the ``content`` of its tensor;
        ``order``: which host holds which third."""
        for host, store in self.stores.items():
            third = order.index(host)
            rows = [
                (t, Box((third * t.shape[0] // 3, 0), (t.shape[0] // 3, 4)))
                for t in (FROZEN, TRAINED)
            ]
            held = Collection.of(rows)
            slot = store.reserve({third: held})
            path = slot.directory / slot.files[0].name
            data, prints = b"", []
            for tensor, box in rows:
                values = np.arange(box.numel, dtype=np.float32) + box.offset[0] * 4
                values = (values + content[tensor]).reshape(box.shape)
                prints.append(piece_fingerprint(values.view(np.uint32), box, tensor.shape, VERSION))
                data += values.tobytes()
            path.write_bytes(path.read_bytes()[: -len(data)] + data)
            about = {
                "consumed_samples": 1,
                "world_size": 3,
                "tensors": 2,
                "snapshot": f"r-{number}",
            }
            part = RankSnapshot(tuple(prints), f"dp{third}", {"lr": 1}, {"seed": third})
            store.seal(slot, step=number, about=about, parts={third: part})
            self.parts[host] = store.commit(slot, number)

    def keep(self, host: str = "b") -> Kept:
        ring = ring_of(dict.fromkeys(HOSTS, ""), 1)
        addresses = {name: server.address for name, server in self.servers.items()}
        self._orders += 1
        command = Replicate(self._orders, listed(self.parts, addresses, ranks=3), Shared(ring))
        self.keepers[host].begin(self._orders)
        kept = self.keepers[host].keep(travelled(command))
        with self.stores[host].open_rows(self.parts[host].generation) as rows:
            assert not list(rows.damage())
            assert {t.name for t in rows.manifest.collection.tensors} == {TRAINED.name, FROZEN.name}
        return kept

    def kept_file(self, number: int, host: str = "b") -> str:
        (found,) = self.stores[host].generation_directory(number).glob("fetched-*")
        return str(found)


@pytest.fixture
def job(open_store: Opener) -> Iterator[Job]:
    made = Job(open_store)
    yield made
    for server in made.servers.values():
        server.close()


def test_what_is_frozen_crosses_once_and_what_is_trained_each_time(job: Job) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    first = job.keep()
    assert (first.size_bytes, first.unchanged_bytes) == (sum(EACH.values()), 0)
    for number in (2, 3):
        job.write(number, {TRAINED: number, FROZEN: 0})
        kept = job.keep()
        assert (kept.size_bytes, kept.unchanged_bytes) == (EACH[TRAINED], EACH[FROZEN])
        job.stores["b"].drop(number - 1)
        with job.stores["b"].open_rows(number) as rows:
            assert not list(rows.damage()), "the older generation's files are used again"


def test_where_nothing_has_changed_nobody_is_asked_for_bytes(job: Job) -> None:
    """It is proven as what has come, and as little taken for proven until the state is."""
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (0, sum(EACH.values()))
    assert kept.grown is not None and kept.grown.unproven == (len(kept.grown.files) - 1,)


def test_a_keeper_without_an_older_generation_fetches_all(job: Job) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})
    job.stores["b"].drop(1)
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (sum(EACH.values()), 0)


def test_an_older_generation_that_goes_meanwhile_is_done_without(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})
    store = job.stores["b"]
    open_rows = store.open_rows

    def dropped(generation: int) -> object:
        if 1 in store.generations():
            store.drop(1)
        return open_rows(generation)

    monkeypatch.setattr(store, "open_rows", dropped)
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (sum(EACH.values()), 0)


def test_a_copy_that_is_damaged_is_found_and_fetched_instead(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    with open(job.kept_file(1), "r+b") as file:
        file.seek(-EACH[TRAINED] - EACH[FROZEN], 2)  # the first element of the first piece
        file.write(b"\xff\xff\xff\x7f")
    job.write(2, {TRAINED: 1, FROZEN: 0})
    kept = job.keep()
    assert {kept.size_bytes, kept.unchanged_bytes} == set(EACH.values())
    assert "event=damaged generation=1 host=b" in caplog.text


def test_pieces_that_are_cut_otherwise_now_are_fetched(job: Job) -> None:
    """The degrees have changed in between: b keeps another third than before."""
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0}, "cba")
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (sum(EACH.values()), 0)


def test_what_this_host_had_written_itself_need_not_cross_either(job: Job) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.write(2, {TRAINED: 1, FROZEN: 0}, "bac")  # of what b has written, a has the content now
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (0, sum(EACH.values()))


def test_a_drop_and_later_writes_harm_neither(job: Job) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})
    job.keep()
    with open(job.kept_file(2), "r+b") as file:
        file.write(bytes(64))
    with job.stores["b"].open_rows(1) as rows:
        assert not list(rows.damage())


def test_what_is_given_up_while_it_is_copied_ends_and_leaves_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})

    def chunks(*given: object) -> object:
        job.keepers["b"].give_up()
        return contiguous_chunks(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("scalai.launch.agent.unchanged.contiguous_chunks", chunks)
    with pytest.raises(StoreError, match="not needed any more"):
        job.keep()
    store: HostStore = job.stores["b"]
    assert store.manifest(2).files == job.parts["b"].files
    assert not list(store.directory.glob("fetched-*"))
