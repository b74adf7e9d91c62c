"""Live memory into a store and back: whole, strided, replicated, in every width, and resharded."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scalai.core.errors import LayoutError, StoreError
from scalai.core.messages.worker_messages import RankSnapshot, ReadOrder
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import plan
from scalai.core.tensors.region import Box, Piece, row_major, whole
from scalai.runtime.live import (
    Slot,
    collection_of,
    held_rows,
    piece_view,
    wanted_rows,
)
from scalai.runtime.live_files import MappedFile, Row, ordered_fingerprints, read_rows
from scalai.runtime.live_fingerprints import device_fingerprint, fingerprint_of, live_fingerprints
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from scalai.store.moves import holders_of, read_orders
from support.store_states import Opener
from support.wire import travelled
from support.written_rows import DTYPES, write_rows


def whole_tensor(name: str, shape: tuple[int, ...], dtype: str) -> Slot:
    """Return a slot that holds a tensor whole, with values that are its own."""
    tensor = Tensor(name, shape, dtype)
    numel = tensor.numel
    generator = torch.Generator().manual_seed(len(name) + numel)
    values = torch.randint(0, 2 if dtype == "BOOL" else 120, (numel,), generator=generator)
    buffer = values.to(torch.float32).to(DTYPES[dtype])
    return Slot(tensor, buffer, (Piece(whole(shape), 0, row_major(shape)),))


def emptied(slot: Slot) -> Slot:
    return Slot(slot.tensor, torch.zeros_like(slot.buffer), slot.pieces)


def committed(
    store: HostStore, ranks: Sequence[Sequence[Slot]], *, is_mapped: bool = False
) -> HostManifest:
    """Snapshot what the ranks hold as generation 1, every message through JSON."""
    rows = [held_rows(slots) for slots in ranks]
    slot = store.reserve({rank: collection_of(of_rank) for rank, of_rank in enumerate(rows)})
    parts = {}
    for rank, of_rank in enumerate(rows):
        order = travelled(slot.orders[rank])
        mapped = MappedFile(order) if is_mapped and order.rows else None
        parts[rank] = RankSnapshot(write_rows(of_rank, order, mapped=mapped), f"dp{rank}")
    store.seal(slot, step=1, about={}, parts=parts)
    return store.commit(slot, 1)


def restore(store: HostStore, manifest: HostManifest, ranks: Sequence[Sequence[Slot]]) -> None:
    """Fill what the ranks want from generation 1."""
    targets = [
        Holder(store.host, collection_of(wanted_rows(slots)), rank)
        for rank, slots in enumerate(ranks)
    ]
    planned = plan(holders_of([manifest]), targets)
    orders = read_orders(planned, [manifest], {store.host: store.generation_directory(1)})
    for rank, slots in enumerate(ranks):
        if rank in orders:
            read_rows(wanted_rows(slots), travelled(orders[rank]))


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 4)])
def test_every_dtype_and_shape_goes_out_and_in(
    store: HostStore, dtype: str, shape: tuple[int, ...], is_mapped: bool
) -> None:
    slots = [whole_tensor("param/w", shape, dtype)]
    manifest = committed(store, [slots], is_mapped=is_mapped)
    again = [emptied(slot) for slot in slots]
    restore(store, manifest, [again])
    bits = [slot.buffer.view(torch.uint8) for slot in (*slots, *again)]
    assert torch.equal(*bits)
    with store.open_rows(1) as rows:
        assert not list(rows.damage())


def column_shard(full: Slot, rank: int, degree: int, *, transposed: bool = False) -> Slot:
    """Return the columns of ``rank`` in a buffer of their own, row-major or transposed."""
    height, width = full.tensor.shape
    low, high = rank * width // degree, (rank + 1) * width // degree
    part = full.buffer.view(height, width)[:, low:high]
    buffer = (part.t() if transposed else part).reshape(-1).clone()
    stride = (1, height) if transposed else (high - low, 1)
    return Slot(full.tensor, buffer, (Piece(Box((0, low), (height, high - low)), 0, stride),))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 3), (3, 2)])
def test_shards_are_cut_anew(store: HostStore, before: int, after: int, transposed: bool) -> None:
    full = whole_tensor("param/w", (13, 12), "F32")
    shards = [[column_shard(full, r, before, transposed=transposed)] for r in range(before)]
    manifest = committed(store, shards, is_mapped=transposed)
    expected = [column_shard(full, rank, after) for rank in range(after)]
    found = [emptied(slot) for slot in expected]
    restore(store, manifest, [[slot] for slot in found])
    assert all(torch.equal(a.buffer, b.buffer) for a, b in zip(found, expected, strict=True))
    for old, new in zip(found, expected, strict=True):
        assert np.array_equal(
            live_fingerprints(wanted_rows([old])), live_fingerprints(wanted_rows([new]))
        )


def test_a_fused_buffer_of_two_boxes_and_a_flat_range(store: HostStore) -> None:
    full = whole_tensor("param/gate_up", (8, 4), "BF16")
    two_boxes = Slot(
        full.tensor,
        torch.cat([full.buffer[:8], full.buffer[16:24]]),
        (Piece(Box((0, 0), (2, 4)), 0, (4, 1)), Piece(Box((4, 0), (2, 4)), 8, (4, 1))),
    )
    others = Slot(
        full.tensor,
        full.buffer,
        (Piece(Box((2, 0), (2, 4)), 8, (4, 1)), Piece(Box((6, 0), (2, 4)), 24, (4, 1))),
    )
    manifest = committed(store, [[two_boxes], [others]])
    again = emptied(full)
    restore(store, manifest, [[again]])
    assert torch.equal(again.buffer, full.buffer)


def test_stale_copies_are_filled_and_never_written(store: HostStore) -> None:
    full = whole_tensor("param/w", (6,), "F32")
    own_range = Slot(full.tensor, full.buffer, full.pieces, is_wanted=False)
    stale = Slot(full.tensor, torch.zeros(6), full.pieces, is_held=False)
    manifest = committed(store, [[own_range, stale]])
    assert len(manifest.collection) == 1
    restore(store, manifest, [[own_range, stale]])
    assert torch.equal(stale.buffer, full.buffer)


def test_several_ranks_on_a_host_snapshot_and_another_number_restores(open_store: Opener) -> None:
    store = open_store()
    weights = [whole_tensor(f"param/w{n}", (4, 8), "F32") for n in range(5)]
    step = whole_tensor("step/w0", (), "F32")
    ranks = [[*(column_shard(w, rank % 2, 2) for w in weights), step] for rank in range(4)]
    manifest = committed(store, ranks)
    assert manifest.size_bytes == 5 * 4 * 8 * 4 + 4
    again = [[emptied(slot) for slot in (*weights, step)]]
    restore(store, manifest, again)
    for old, new in zip((*weights, step), again[0], strict=True):
        assert torch.equal(old.buffer, new.buffer)


def check_device(slot: Slot, piece: Piece) -> None:
    """Compare a piece's fingerprint by a device's arithmetic with the host's."""
    found = device_fingerprint(piece_view(slot, piece), piece.box, slot.tensor.shape)
    assert fingerprint_of(found) == int(live_fingerprints([(slot, piece)])[0])


SHAPES = [(), (9,), (5, 300), (2, 3, 70), (3000, 1), (2500, 150)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_device_computes_the_same_fingerprint(dtype: str, shape: tuple[int, ...]) -> None:
    [(slot, piece)] = held_rows([whole_tensor("param/w", shape, dtype)])
    box = Box(tuple(n // 3 for n in shape), tuple(n - n // 3 for n in shape))
    for part in (piece, piece.sub(box)):
        check_device(slot, part)


@pytest.mark.parametrize("dtype", ["F32", "I64", "BF16", "BOOL"])
def test_a_device_computes_the_same_of_transposed_memory_and_in_blocks(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = column_shard(whole_tensor("param/w", (70, 600), dtype), 1, 3, transposed=True)
    check_device(*held_rows([slot])[0])
    monkeypatch.setattr("scalai.runtime.live_fingerprints.BLOCK", 64)
    check_device(*held_rows([whole_tensor("param/w", (7, 140), dtype)])[0])


@pytest.mark.parametrize("shape", [(300, 1), (1, 300), (1, 1), (300, 1, 1)])
def test_a_device_computes_the_same_where_a_dimension_of_one_has_any_stride(
    shape: tuple[int, ...],
) -> None:
    stride = tuple(700 if n == 1 else 1 for n in shape)
    check_device(whole_tensor("param/w", shape, "I64"), Piece(whole(shape), 0, stride))


def test_a_mapping_is_known_by_its_file_not_by_its_name(store: HostStore) -> None:
    rows = held_rows([whole_tensor("param/w", (4, 4), "F32")])
    held = {0: collection_of(rows)}
    first = store.reserve(held)
    mapped = MappedFile(first.orders[0])
    store.discard(first)
    second = store.reserve(held)
    # The second has the same pages under another name; only its own name may reach them.
    assert not mapped.is_current(first.orders[0].path)
    fingerprints = write_rows(rows, second.orders[0], mapped=mapped)
    part = RankSnapshot(fingerprints, "dp0")
    store.seal(second, step=0, about={}, parts={0: part})
    store.commit(second, 1)
    with store.open_rows(1) as stored:
        assert not list(stored.damage())


def read_order(store: HostStore, manifest: HostManifest) -> ReadOrder:
    collection = manifest.collection
    directory = store.generation_directory(1)
    return ReadOrder(
        tuple(str(directory / stored.name) for stored in manifest.files),
        np.arange(len(collection)), collection.offset, collection.shape, manifest.file,
        manifest.begin, collection.offset, collection.shape,
    )  # fmt: skip


def test_nothing_is_overwritten_by_a_restore_that_is_refused(store: HostStore) -> None:
    slots = [whole_tensor(f"param/w{n}", (4, 4), "F32") for n in range(2)]
    manifest = committed(store, [slots])
    order = read_order(store, manifest)
    bad: dict[str, tuple[dict[str, Any], type[Exception]]] = {
        "a row is not filled": ({"row": np.array([0, 0])}, LayoutError),
        "a row is not there": ({"row": np.array([0, 9])}, LayoutError),
        "a row below the first": ({"row": np.array([0, -1])}, LayoutError),
        "outside of the piece": (
            {"source_offset": np.array([[0] * 6, [0, 0, 0, 0, 2, 0]])}, LayoutError,
        ),
        "beyond the end": ({"begin": np.array([order.begin[0], 1 << 30])}, StoreError),
        "no such file": ({"files": ("/no/such/file",)}, StoreError),
    }  # fmt: skip
    for what, (change, kind) in bad.items():
        again = [emptied(slot) for slot in slots]
        with pytest.raises(kind):
            read_rows(wanted_rows(again), replace(order, **change))
        assert all(not slot.buffer.any() for slot in again), what


def test_a_restore_from_a_truncated_file_is_refused(store: HostStore) -> None:
    slots = [whole_tensor("param/w", (4, 4), "F32")]
    manifest = committed(store, [slots])
    path = store.generation_directory(1) / manifest.files[0].name
    os.truncate(path, path.stat().st_size - 4)
    again = [emptied(slot) for slot in slots]
    with pytest.raises(StoreError, match=f"{path} is .* bytes long"):
        read_rows(wanted_rows(again), read_order(store, manifest))
    assert not again[0].buffer.any()


def test_a_snapshot_that_does_not_fit_is_refused(store: HostStore, tmp_path: Path) -> None:
    rows = held_rows([whole_tensor("param/w", (4, 4), "F32")])
    slot = store.reserve({0: collection_of(rows)})
    order = slot.orders[0]
    for wrong, error, why in (
        (replace(order, rows=(3,)), LayoutError, "row 3, .*publish them again"),
        (replace(order, rows=(-1,)), LayoutError, "row -1, .*publish them again"),
        (replace(order, path=str(tmp_path / "none")), StoreError, "cannot be opened"),
        (replace(order, begins=(1 << 20,)), StoreError, "bytes long"),
    ):
        with pytest.raises(error, match=why):
            write_rows(rows, wrong)


def test_a_slot_whose_buffer_is_not_what_its_tensor_says_is_refused() -> None:
    tensor = Tensor("param/w", (4,), "F32")
    pieces = (Piece(whole((4,)), 0, (1,)),)
    for buffer in (torch.zeros(4, dtype=torch.float64), torch.zeros(3), torch.zeros(2, 2)):
        [(slot, piece)] = held_rows([Slot(tensor, buffer, pieces)])
        with pytest.raises(LayoutError, match="adapter"):
            piece_view(slot, piece)


@pytest.mark.fault
def test_a_device_without_room_for_a_proof_has_its_file_proven(
    store: HostStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a failure comes in the middle of a forward pass."""
    caplog.set_level("INFO")
    slots = [column_shard(whole_tensor("param/w", (13, 12), "F32"), 1, 3, transposed=True)]
    rows = held_rows(slots)

    def no_room(asked: Sequence[Row]) -> Any:
        if asked[0][0].buffer is slots[0].buffer:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB")
        return live_fingerprints(asked)

    slot = store.reserve({0: collection_of(rows)})
    monkeypatch.setattr("scalai.runtime.live_files.live_fingerprints", no_room)
    found = write_rows(rows, slot.orders[0])
    assert found == tuple(map(int, live_fingerprints(rows))) and "has no room" in caplog.text
    store.discard(slot)


def test_fingerprints_from_before_a_write_are_told_beside_those_of_the_other_rows(
    store: HostStore,
) -> None:
    rows = held_rows([whole_tensor(f"param/{name}", (7, 5), "F32") for name in ("a", "bb", "ccc")])
    slot = store.reserve({0: collection_of(rows)})
    first, second, third = map(int, live_fingerprints(rows))
    assert ordered_fingerprints(rows, slot.orders[0], {1: 7}) == (first, 7, third)
    assert ordered_fingerprints(rows, slot.orders[0], {0: 5, 1: 7, 2: 9}) == (5, 7, 9)
    assert ordered_fingerprints(rows, slot.orders[0], {}) == (first, second, third)
    store.discard(slot)
