"""Generations of one host: snapshot, commit, recycling, and room."""

import os
from pathlib import Path

import numpy as np
import pytest

from scalai.core.errors import StoreError, UsageError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.region import Box, whole
from scalai.store import directory as directory_module
from scalai.store.directory import Room, check_budget
from scalai.store.host import HostStore
from scalai.store.manifest import UNNUMBERED, read_manifest
from scalai.store.parts import Extras
from support.store_states import (
    HALF,
    WEIGHT,
    Opener,
    full_disk,
    generation,
    is_undamaged,
    is_whole,
    report,
    snapshot,
    two_ranks,
    values_of,
    write,
)

FOLDER = Path("/dev/shm/j/a")
MUCH = 1 << 40


def all_of(*tensors: Tensor) -> Collection:
    return Collection.of([(tensor, whole(tensor.shape)) for tensor in tensors])


def test_what_is_written_is_read_back(store: HostStore) -> None:
    manifest = generation(store, 7, step=3)
    assert store.generations() == [7]
    assert is_whole(store, 7, step=3)
    assert manifest.about["consumed_samples"] == 36
    assert manifest.ranks == (0, 1)
    assert manifest.scalars == {"lr": 0.5, "of": {"r0": 0, "r1": 1}}
    assert manifest.rank_state == {"tp0": [0], "tp1": [1]}


def test_distinct_pieces_are_stored_once_and_replicas_share_the_writing(store: HostStore) -> None:
    slot = store.reserve(two_ranks())
    assert len(slot.collection) == 6  # two halves of the weight, four replicated tensors
    assert all(order.rows for order in slot.orders.values())
    pieces = [slot.collection.box(row) for row in range(6)]
    assert len({(tensor.name, box) for tensor, box in pieces}) == 6


def test_files_are_safetensors_files(store: HostStore) -> None:
    safetensors = pytest.importorskip("safetensors")
    generation(store, 1, step=1)
    found = {}
    for path in store.generation_directory(1).glob("*.safetensors"):
        with safetensors.safe_open(path, "np") as file:
            found.update({name: file.get_slice(name).get_shape() for name in file.keys()})
            if "param/w[0:6,4:8]" in found:
                right = file.get_tensor("param/w[0:6,4:8]").view(np.uint32)
                assert np.array_equal(right, values_of(WEIGHT, 1)[:, 4:])
    assert found["param/h[0:5,0:3]"] == [5, 3]
    assert found["step/w[]"] == []


def test_the_number_is_given_at_commit_and_never_twice(store: HostStore) -> None:
    slot, sealed = snapshot(store, step=1)
    assert sealed.generation == UNNUMBERED
    assert store.commit(slot, 5).generation == 5
    again, _ = snapshot(store, step=2)
    with pytest.raises(StoreError, match="never used twice"):
        store.commit(again, 5)
    assert is_whole(store, 5, step=1)
    store.commit(again, 6)
    assert store.generations() == [5, 6]


def test_only_what_is_sealed_is_committed(store: HostStore) -> None:
    with pytest.raises(StoreError, match="not sealed"):
        store.commit(store.reserve(two_ranks()), 1)


def test_rows_of_a_rank_that_did_not_report_are_left_out(store: HostStore) -> None:
    held = two_ranks()
    slot = store.reserve(held)
    prints = write(slot.orders[0], held[0])
    with pytest.raises(StoreError, match="fingerprints for the"):
        store.seal(slot, step=1, about={}, parts={0: report(0, prints[:-1])})
    store.seal(slot, step=1, about={}, parts={0: report(0, prints)})
    manifest = store.commit(slot, 1)
    assert manifest.ranks == (0,)
    assert len(manifest.collection) == len(slot.orders[0].rows)
    assert [f.name for f in manifest.files] == ["rank-0.safetensors"]


def test_survivors_take_over_what_a_lost_rank_should_have_written(store: HostStore) -> None:
    replicas = dict.fromkeys((0, 1), all_of(WEIGHT, HALF))
    slot = store.reserve(replicas)
    part = report(0, write(slot.orders[0], replicas[0]))
    orders = slot.take_over(1, alive=[0])
    extra = [(order, write(order, replicas[rank])) for rank, order in orders.items()]
    manifest = store.seal(slot, step=0, about={}, parts={0: part}, taken_over=extra)
    assert len(manifest.collection) == 2
    store.commit(slot, 1)
    assert is_undamaged(store, 1)


def test_empty_tensors_shards_and_ranks_are_named_and_no_trouble(store: HostStore) -> None:
    none = Tensor("param/none", (0, 4), "BF16")
    shards = Collection.of([(WEIGHT, Box((0, 0), (0, 8))), (WEIGHT, whole(WEIGHT.shape))])
    manifest = generation(store, 1, 1, {0: shards, 1: all_of(none), 2: Collection.of([])})
    read = read_manifest(store.generation_directory(1))
    assert read.collection.tensors == (WEIGHT, none)
    assert manifest.ranks == (0, 1, 2) and len(read.collection) == 1
    check_coverage(read.collection)


def test_files_of_dropped_generations_are_reused_whatever_their_size(store: HostStore) -> None:
    for number in (1, 2):
        generation(store, number, step=number)
    inodes = {p.stat().st_ino for p in store.generation_directory(1).glob("*.safetensors")}
    store.drop(1)
    assert store.generations() == [2]
    generation(store, 3, step=3)
    assert inodes == {p.stat().st_ino for p in store.generation_directory(3).glob("*.safetensors")}
    assert is_whole(store, 3, step=3) and is_whole(store, 2, step=2)
    big, small = Tensor("w", (1 << 15,), "F32"), Tensor("w", (100,), "F32")
    for number, tensor in enumerate((big, small, big), start=4):
        generation(store, number, number, {0: all_of(tensor)})
        with store.open_rows(number) as rows:
            assert np.array_equal(rows.view(0), values_of(tensor, number))
        store.drop(number)


@pytest.mark.parametrize("is_in_pool", [False, True])
def test_a_file_with_a_second_name_is_never_reused(
    store: HostStore, tmp_path: Path, is_in_pool: bool
) -> None:
    generation(store, 1, step=1)
    files = list(store.generation_directory(1).glob("*.safetensors"))
    if is_in_pool:
        store.drop(1)
        files = list((store.directory / "recycled").iterdir())
    kept = {}
    for path in files:
        os.link(path, tmp_path / path.name)
        kept[tmp_path / path.name] = path.read_bytes()
    if not is_in_pool:
        store.drop(1)
    generation(store, 2, step=2)
    assert kept and all(path.read_bytes() == content for path, content in kept.items())


def test_a_reader_keeps_a_dropped_generation(store: HostStore) -> None:
    generation(store, 1, step=1)
    with store.open_rows(1) as rows:
        before = [rows.view(row).copy() for row in range(len(rows.manifest.collection))]
        store.drop(1)
        assert store.generations() == []
        for number in (2, 3):
            generation(store, number, step=number)
        for row, values in enumerate(before):
            assert np.array_equal(rows.view(row), values)
    assert not list(store.directory.glob("dropped-*"))


def test_jobs_and_hosts_do_not_collide(open_store: Opener) -> None:
    stores = [open_store(job, host) for job in ("x", "y") for host in ("a", "b")]
    for step, one in enumerate(stores):
        generation(one, 1, step)
    stores[0].remove()
    assert stores[1].directory.parent.exists() and not stores[0].directory.exists()
    assert all(is_whole(one, 1, step) for step, one in enumerate(stores) if step)
    stores[1].remove()
    assert not stores[1].directory.parent.exists()


@pytest.mark.parametrize(
    "name", ["coordinator.json", "owner-000000000001.json", "coordinator.lock"]
)
def test_no_host_has_the_name_of_a_file_of_its_job(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="the job's own files"):
        HostStore("job", name, tmp_path)


def test_pieces_of_other_hosts_lie_in_the_pages_of_the_last_but_one_generation(
    open_store: Opener,
) -> None:
    first, second = open_store(host="a"), open_store(host="b")
    pages = list[set[int]]()
    for number in range(1, 6):
        manifest = generation(first, number, step=number)
        generation(second, number, step=number)
        staged = second.stage(manifest.collection)
        second.extend(number, staged, fingerprints=manifest.fingerprint)
        folder = second.generation_directory(number)
        pages.append({each.stat().st_ino for each in folder.glob("*.safetensors")})
        if number > 1:
            first.drop(number - 1)
            second.drop(number - 1)
    assert pages[2] == pages[4] != pages[3] == pages[1], "nothing was made anew"


def test_fetched_pieces_become_part_of_a_generation(open_store: Opener) -> None:
    first, second = open_store(host="a"), open_store(host="b")
    manifest = generation(first, 4, step=2)
    extras = Extras(manifest.scalars, {"r7": 7}, (7,), None)
    staged = second.stage(manifest.collection)
    with first.open_rows(4) as rows, open(staged.path, "r+b") as file:
        for row, begin in enumerate(staged.begins.tolist()):
            file.seek(begin)
            file.write(rows.view(row).tobytes())
    second.adopt_empty(manifest)
    grown = second.extend(4, staged, extras)
    assert grown.host == "b" and grown.scalars == manifest.scalars
    assert grown.ranks == (7,) and grown.rank_state == {"r7": 7}
    first.remove()
    second.close()
    assert is_whole(open_store(host="b"), 4, step=2)


def test_a_durable_copy_is_the_same_generation(store: HostStore, tmp_path: Path) -> None:
    manifest = generation(store, 3, step=1)
    target = store.copy_to(3, tmp_path / "disk")
    assert target == tmp_path / "disk" / "generation-3" / "a"
    assert store.copy_to(3, tmp_path / "disk") == target
    store.drop(3)
    generation(store, 3, step=9)
    with pytest.raises(StoreError, match="another state"):
        store.copy_to(3, tmp_path / "disk")
    assert read_manifest(target).digest() == manifest.digest()


# ------------------------------------------------------------------ room


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (Room(in_use=0, reusable=0, free=200), 200),
        (Room(in_use=0, reusable=200, free=0), 200),
        (Room(in_use=100, reusable=0, free=100), 100),
        (Room(in_use=300, reusable=0, free=100), 100),  # an older one is still read
    ],
)
def test_what_fits_may_keep_the_files_of_one_more_generation(room: Room, kept: int) -> None:
    assert check_budget(100, 0, room, None, "a", FOLDER) == kept


@pytest.mark.parametrize(
    "room",
    [
        Room(in_use=0, reusable=99, free=100),  # the next one would not fit beside this one
        Room(in_use=300, reusable=50, free=49),  # this one does not fit beside what is there
    ],
)
def test_what_does_not_fit_twice_is_refused_with_what_there_is(room: Room) -> None:
    found = f"need 200; {FOLDER} has {room.in_use} in use, {room.reusable} to reuse"
    with pytest.raises(StoreError, match=f"{found} and {room.free} free"):
        check_budget(100, 0, room, None, "a", FOLDER)


@pytest.mark.fault
@pytest.mark.parametrize(("in_use", "limit", "kept"), [(0, 200, 200), (120, 220, 100)])
def test_a_limit_holds_however_much_is_free_and_counts_what_is_in_use(
    in_use: int, limit: int, kept: int
) -> None:
    room = Room(in_use=in_use, reusable=0, free=MUCH)  # fetched pieces among it
    assert check_budget(100, 0, room, limit, "a", FOLDER) == kept
    with pytest.raises(StoreError, match=f"beside {in_use} in use; the store may take {limit - 1}"):
        check_budget(100, 0, room, limit - 1, "a", FOLDER)


def test_too_little_room_is_refused_with_sizes_and_the_way_out(
    store: HostStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation(store, 1, step=1)
    big = {0: all_of(Tensor("w", (1 << 20,), "F32"))}
    monkeypatch.setattr(directory_module, "free_bytes", lambda directory: 6 << 20)
    with pytest.raises(StoreError, match=r"need 83\d+;.*--shm-size=1g.*--store-dir"):
        store.reserve(big)
    assert is_whole(store, 1, step=1)
    monkeypatch.undo()
    with HostStore("job", "tight", tmp_path, budget_bytes=100) as tight:
        with pytest.raises(StoreError, match=r"may take 100.*--store-budget-gb"):
            tight.reserve(two_ranks())
        monkeypatch.setattr("os.posix_fallocate", full_disk)
        with pytest.raises(StoreError, match=r"No space left.*--shm-size"):
            store.reserve(two_ranks())
        for each in (store, tight):
            assert not list(each.directory.glob("snapshot-*")), "nothing is left behind"


def test_room_for_manifests_takes_none_from_snapshots_and_replicas(tmp_path: Path) -> None:
    held = two_ranks()
    with HostStore("job", "host", tmp_path) as store:
        needed = store.reserve(held).size_bytes
    budget = 2 * needed + 1000  # of which the committed manifest takes a part
    with HostStore("job", "host", tmp_path / "tight", budget_bytes=budget) as store:
        generation(store, 1, step=1, held=held)
        slot = store.reserve(held)
        assert sum(path.stat().st_size for path in slot.directory.glob(".manifest*")) > 1000
        assert 0 < store.most_bytes() <= budget
        store.check_spare(1)


@pytest.mark.fault
def test_manifests_need_no_more_room_than_was_made_for_the_snapshot(store: HostStore) -> None:
    held = two_ranks()
    slot = store.reserve(held)
    spares = {path.stat().st_ino: path.stat() for path in slot.directory.glob(".manifest*")}
    assert len(spares) == 2
    parts = {rank: report(rank, write(slot.orders[rank], held[rank])) for rank in held}
    store.seal(slot, step=1, about={"consumed_samples": 1, "degrees": {}}, parts=parts)
    sealed = (slot.directory / "manifest.json").stat()
    store.commit(slot, 1)
    committed = (store.generation_directory(1) / "manifest.json").stat()
    for written in (sealed, committed):
        assert written.st_ino in spares and written.st_size <= spares[written.st_ino].st_size
    assert sealed.st_ino != committed.st_ino
    assert not list(store.generation_directory(1).glob(".*"))
