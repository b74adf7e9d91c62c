"""The model of a generation as files: whole tensors, slices, and what keeps them while they are
open."""

import errno
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors

from scalai.core.errors import RoomError
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.region import Box, whole
from scalai.runtime.consumption import LEDGER
from scalai.store import directory as directory_module
from scalai.store.files import slices
from scalai.store.host import HostStore
from scalai.store.manifest import manifest_bytes, read_manifest, write_manifest
from scalai.store.pinned import expire_dropped
from scalai.vfs.model_files import StoredPiece, TensorElements, parse_slice, place_of
from scalai.vfs.nodes import Content, File, TreeLink, resolve, walk
from scalai.vfs.pins import Pins
from scalai.vfs.tree import Tree
from support.store_states import HALF, WEIGHT, Opener, generation, values_of

STEP = 3


@dataclass
class Clock:
    """Seconds that a test lets pass."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tree(store: HostStore, clock: Clock) -> Iterator[Tree]:
    """The tree of a job that has one generation."""
    generation(store, 1, STEP)
    with closing(Tree(store.directory.parent, pins=Pins(keep_s=60, clock=clock))) as made:
        yield made


def opened(tree: Tree, path: str = "model/w.npy") -> Content:
    _, node = resolve(tree, path)
    assert isinstance(node, File)
    return node.open()


def read(tree: Tree, path: str = "model/w.npy") -> bytes:
    with closing(opened(tree, path)) as content:
        return content.read(0, content.size_bytes)


def loaded(tree: Tree, path: str) -> Any:
    return np.load(io.BytesIO(read(tree, path)))


def is_weight(data: bytes, step: int = STEP, at: Any = ...) -> bool:
    """Whether a file of numpy's has the weight of a step, or a slice of it."""
    return np.array_equal(np.load(io.BytesIO(data)).view(np.uint32), values_of(WEIGHT, step)[at])


def check_expired(content: Content, why: str = "") -> None:
    with pytest.raises(OSError, match=f"its pin has expired: {why}"):
        content.read(0, 1000)


@pytest.mark.parametrize(
    "path",
    [
        "..", "model/../..", "generations/../../etc", "model/nothing.npy", "model/w.npz", "model/w",
        "model/w[0:2.npy", "model/w[9:10,:].npy", "model/w[0:7].npy", "model/w[0:2,0:2,0:2].npy",
        "model/w[-1:].npy", "model/w[1].npy", "model/w[3:1].npy", "model/w[a:b].npy",
        "generations/7", "generations/01", "generations/٣", "generations/../generations/1",
        "model/w.npy.npy", "model/[0:1].npy",
    ],
)  # fmt: skip
def test_a_name_that_is_none_leads_nowhere(tree: Tree, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        resolve(tree, path)


def test_a_file_is_no_folder(tree: Tree) -> None:
    with pytest.raises(NotADirectoryError):
        resolve(tree, "model/w.npy/x")


def test_a_tensor_of_which_a_host_that_is_not_here_has_a_part_is_an_error(
    tree: Tree, store: HostStore
) -> None:
    folder = store.generation_directory(1)
    manifest = read_manifest(folder)
    rows = [row for row in range(len(manifest.collection))
            if manifest.collection.box(row)[1] != Box((0, 4), (6, 4))]  # fmt: skip
    write_manifest(
        folder,
        replace(
            manifest, collection=manifest.collection.select(np.array(rows)),
            file=manifest.file[rows], begin=manifest.begin[rows],
            fingerprint=manifest.fingerprint[rows],
        ),
    )  # fmt: skip
    with pytest.raises(OSError, match=r"'param/w' is not whole here: \[0:6,4:8\]") as raised:
        opened(tree)
    assert raised.value.errno == errno.EIO
    assert is_weight(read(tree, "model/w[:,0:4].npy"), at=np.s_[:, :4])


def test_a_damaged_manifest_is_an_error_and_not_an_empty_folder(
    tree: Tree, store: HostStore
) -> None:
    path = store.generation_directory(1) / "manifest.json"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(OSError, match=r"generation 1 cannot be read: .* damaged"):
        resolve(tree, "model")


def test_a_file_that_was_cut_is_an_error(tree: Tree, store: HostStore) -> None:
    with closing(opened(tree)) as content:
        for file in store.generation_directory(1).glob("*.safetensors"):
            os.truncate(file, 8)
        with pytest.raises(OSError, match="the file ends"):
            content.read(0, content.size_bytes)


def test_a_job_that_was_begun_anew_under_its_name_is_not_taken_for_the_old_one(
    tree: Tree, store: HostStore
) -> None:
    assert read(tree)
    shutil.rmtree(store.generation_directory(1))
    with HostStore("job", "b", store.directory.parent.parent) as other:
        generation(other, 1, STEP + 1)
        with pytest.raises(OSError, match=r"begun anew under the same name. Mount it again"):
            read(tree)


def test_every_kind_of_tensor_is_whole_in_both_formats(tree: Tree) -> None:
    assert is_weight(read(tree))
    assert loaded(tree, "model/w.npy").dtype == np.float32
    assert loaded(tree, "model/w.step.npy").shape == ()
    assert loaded(tree, "model/w.mask.npy").dtype == np.bool_
    found = load_safetensors(read(tree, "model/w.safetensors"))["param/w"]
    assert np.array_equal(found.view(np.uint32), values_of(WEIGHT, STEP))
    half = loaded(tree, "model/h.npy")
    assert half.dtype == np.dtype("V2"), "numpy has no BF16: no numbers rather than wrong ones"
    assert half.tobytes() == values_of(HALF, STEP).tobytes()


def test_a_slice_is_a_file_that_no_listing_shows(tree: Tree) -> None:
    assert is_weight(read(tree, "model/w[1:3,2:].npy"), at=np.s_[1:3, 2:])
    assert is_weight(read(tree, "model/w[5:].npy"), at=np.s_[5:])
    assert loaded(tree, "model/w[2:2,:].npy").shape == (0, 8)
    entry = load_safetensors(read(tree, "model/w[1:3,:].safetensors"))
    assert list(entry) == ["param/w[1:3,0:8]"]
    names = list(resolve(tree, "model")[1].names())  # type: ignore[attr-defined]
    assert "w.npy" in names and not [name for name in names if "[" in name]


def test_the_ledger_is_a_file_where_there_is_one(tree: Tree, store: HostStore) -> None:
    with pytest.raises(FileNotFoundError):
        read(tree, "generations/1/ledger.json")
    folder = store.generation_directory(1)
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, scalars={**manifest.scalars, LEDGER: {"x": 1}}))
    assert json.loads(read(tree, "generations/1/ledger.json")) == {"x": 1}


@pytest.mark.fault
def test_an_open_file_stays_what_it_was_while_its_generation_goes(
    tree: Tree, store: HostStore
) -> None:
    with closing(opened(tree)) as content:
        first = content.read(0, 40)
        for number in range(2, 6):
            generation(store, number, STEP + number)
            store.drop(number - 1)
        assert is_weight(first + content.read(40, content.size_bytes))
    link = walk(tree, "model")
    assert isinstance(link, TreeLink) and link.target == "generations/5/model"
    assert is_weight(read(tree), STEP + 5)


@pytest.mark.fault
def test_a_pin_takes_no_memory_that_the_store_needs(tmp_path: Path) -> None:
    with HostStore("job", "a", tmp_path, budget_bytes=1 << 40) as store:
        manifest = generation(store, 1, STEP)
    each = sum(file.size_bytes for file in manifest.files)
    # Room for three generations, and for half of a manifest.
    budget = 3 * each + len(manifest_bytes(manifest)) // 2
    with HostStore("job", "a", tmp_path, budget_bytes=budget) as store:
        tree = Tree(store.directory.parent)
        content = opened(tree)
        generation(store, 2, STEP + 1)
        store.drop(1)
        assert not list((store.directory / "recycled").iterdir())
        assert content.read(0, 1000), "what only the pin keeps"
        generation(store, 3, STEP + 2)
        check_expired(content, "the store needed the room")
        content.close()
        tree.close()
        assert not list(store.directory.glob("pinned-*"))


@pytest.mark.fault
def test_a_pin_of_a_dropped_generation_expires_after_a_while(
    tree: Tree, store: HostStore, clock: Clock
) -> None:
    content = opened(tree)
    clock.now = 1000
    tree.pins.sweep()
    assert content.read(0, 1000), "what is not dropped does not expire"
    generation(store, 2, STEP + 1)
    store.drop(1)
    tree.pins.sweep()
    clock.now += 59
    tree.pins.sweep()
    assert content.read(0, 1000)
    clock.now += 1
    tree.pins.sweep()
    check_expired(content, "it was kept for 60 s")
    content.close()
    assert not list(store.directory.glob("pinned-*/generation-*"))


def test_a_file_that_is_closed_twice_ends_no_other_readers_pin(tree: Tree) -> None:
    first, second = opened(tree), opened(tree)
    first.close()
    first.close()
    assert second.read(0, 1000)
    second.close()


@pytest.fixture
def pinned(tree: Tree, store: HostStore) -> Iterator[Content]:
    """A tensor of a generation that was dropped."""
    with closing(opened(tree)) as content:
        generation(store, 2, STEP + 1)
        store.drop(1)
        yield content


@pytest.mark.fault
def test_a_pin_takes_no_room_that_replicas_need(
    pinned: Content, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def little(path: Path) -> int:
        return 0 if list(store.directory.glob("pinned-*/generation-1")) else 1 << 12

    monkeypatch.setattr(directory_module, "free_bytes", little)
    store.check_spare(1 << 10)
    check_expired(pinned)
    with pytest.raises(RoomError, match="replicas of"):
        store.check_spare(1 << 20)


@pytest.mark.fault
def test_a_pin_takes_no_room_that_a_fetch_needs(
    pinned: Content, store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = os.posix_fallocate

    def with_little_room(descriptor: int, begin: int, size: int) -> None:
        if list(store.directory.glob("pinned-*/generation-1")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", with_little_room)
    large = Tensor("param/large", (1 << 16,), "F32")
    store.unstage(store.stage(Collection.of([(large, whole(large.shape))])))
    check_expired(pinned)


def test_the_store_counts_its_room_while_pins_come_and_go(tree: Tree, store: HostStore) -> None:
    is_over = threading.Event()

    def reads() -> None:
        while not is_over.is_set():
            read(tree)

    with ThreadPoolExecutor() as threads:
        reader = threads.submit(reads)
        try:
            for _ in range(200):
                assert store.most_bytes() > 0
                assert not expire_dropped(store.directory), "nothing is dropped"
        finally:
            is_over.set()
        reader.result(20)


@pytest.mark.fault
def test_a_number_that_is_used_again_keeps_no_pin_of_the_generation_before(
    tree: Tree, store: HostStore, clock: Clock
) -> None:
    old = opened(tree)
    store.drop(1)
    generation(store, 1, STEP + 1)
    assert old.read(0, 1000), "it was pinned"
    assert expire_dropped(store.directory)
    check_expired(old, "the store needed the room")
    tree.pins.sweep()
    clock.now += 60
    tree.pins.sweep()
    check_expired(old, "it was kept for 60 s")
    old.close()
    assert not list(store.directory.glob("pinned-*/generation-*"))


def test_a_pin_of_a_number_that_is_used_again_stays(store: HostStore) -> None:
    for step in (STEP, STEP + 1):
        generation(store, 1, step)
        tree = Tree(store.directory.parent)
        content = opened(tree)
        assert not expire_dropped(store.directory)
        assert content.read(0, 1000)
        store.drop(1)
        tree.close()


@pytest.mark.fault
@pytest.mark.parametrize("who", ["reader", "store"])
def test_pins_of_a_process_that_is_gone_are_removed(tree: Tree, store: HostStore, who: str) -> None:
    stale = store.directory / "pinned-1-dead"
    (stale / "generation-1").mkdir(parents=True, mode=0o700)
    stale.chmod(0o700)
    (stale / "lock").write_bytes(b"")
    (stale / "lock").chmod(0o600)
    if who == "reader":
        read(tree)
    else:
        store.close()
        HostStore("job", "a", store.directory.parent.parent).close()
    assert not stale.exists()


def test_a_durable_generation_is_read_while_it_is_removed(
    open_store: Opener, tmp_path: Path
) -> None:
    store = open_store()
    generation(store, 1, STEP)
    kept = tmp_path / "kept" / "generation-1" / "a"
    shutil.copytree(store.generation_directory(1), kept)
    with closing(Tree(tmp_path / "kept")) as tree, closing(opened(tree)) as content:
        shutil.rmtree(kept.parent)
        assert is_weight(content.read(0, content.size_bytes))


def test_places_of_parameters_are_single_paths() -> None:
    assert str(place_of("param/decoder.layers.0.mlp.weight")) == "decoder/layers/0/mlp/weight"
    assert str(place_of("exp_avg/decoder.weight")) == "decoder/weight.exp_avg"
    hostile = ["param/..", "param/../../etc", "param/a..b", "param//a", "param/a[0:1]", "param/",
               "x.y/a", "param/a%2Eb", "param/é"]  # fmt: skip
    places = [str(place_of(name)) for name in hostile]
    assert len(set(places)) == len(places)
    assert not [place for place in places if ".." in place.split("/") or place[:1] == "/"]


@given(st.data())
def test_any_bytes_of_any_slice_are_those_of_the_tensor(data: st.DataObject) -> None:
    """Cut into any grid of pieces, which overlap in their last rows."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    values = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    tensor = Tensor("param/x", shape, "U32")
    cut = data.draw(st.integers(0, shape[0]))
    boxes = [Box((0,) * len(shape), (cut, *shape[1:])), whole(shape)]
    if 0 < cut < shape[0]:
        boxes[1] = Box((cut - 1, *[0] * (len(shape) - 1)), (shape[0] - cut + 1, *shape[1:]))
    rows = Collection.of([(tensor, box) for box in boxes if box.numel])
    wanted = Box(*_ranges(data, shape))
    found = _elements(rows, values, tensor, wanted)
    expected = values[slices(wanted)].tobytes()
    low = data.draw(st.integers(0, len(expected)))
    high = data.draw(st.integers(low, len(expected)))
    assert found.read(low, high) == expected[low:high]


def _ranges(data: st.DataObject, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    low = [data.draw(st.integers(0, size)) for size in shape]
    high = [data.draw(st.integers(a, size)) for a, size in zip(low, shape, strict=True)]
    return tuple(low), tuple(b - a for a, b in zip(low, high, strict=True))


@dataclass
class Files:
    """A pin whose files are these pieces."""

    pieces: list[bytes]

    def read(self, part: int, file: int, begin: int, size: int) -> bytearray:
        assert begin + size <= len(self.pieces[file])
        return bytearray(self.pieces[file][begin : begin + size])

    def release(self) -> None:
        pass


def _elements(rows: Collection, values: Any, tensor: Tensor, wanted: Box) -> TensorElements:
    boxes = [rows.box(row)[1] for row in range(len(rows))]
    pieces = [StoredPiece(box, 0, row, 0) for row, box in enumerate(boxes)]
    files = Files([values[slices(box)].tobytes() for box in boxes])
    return TensorElements(tensor, wanted, pieces, files)  # type: ignore[arg-type]


def test_a_slice_is_parsed_as_numpy_would_without_clipping() -> None:
    assert parse_slice("1:3,:", (4, 5)) == Box((1, 0), (2, 5))
    assert parse_slice("", (4, 5)) == Box((0, 0), (4, 5))
    assert parse_slice(":0", (4,)) == Box((0,), (0,))
