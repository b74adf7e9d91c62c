"""Memory of a CUDA device into a store and back, and its fingerprints: what the host would have
written and computed."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from scalai.core.messages.worker_messages import RankSnapshot
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import plan
from scalai.core.tensors.region import Box, Piece, row_major, whole
from scalai.runtime.live import Slot, collection_of, held_rows, piece_view, wanted_rows
from scalai.runtime.live_files import MappedFile, read_rows
from scalai.runtime.live_fingerprints import device_fingerprint, fingerprint_of, live_fingerprints
from scalai.runtime.staging import RING_BYTES
from scalai.store.host import HostStore
from scalai.store.moves import holders_of, read_orders
from support.written_rows import DTYPES, write_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (5, 3), (2, 3, 70), (3000, 1), (300, 1500))


def values(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    numel = Tensor("", shape, dtype).numel
    bound = 2 if dtype == "BOOL" else 120
    random = torch.randint(0, bound, (numel,), generator=torch.Generator().manual_seed(numel))
    return random.to(torch.float32).to(DTYPES[dtype])


def every_slot(device: str) -> Iterator[Slot]:
    """Yield a slot of every dtype and shape, whole; matrices transposed as well."""
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor, buffer = Tensor(f"{dtype}/{shape}", shape, dtype), values(shape, dtype)
            yield Slot(tensor, buffer.to(device), (Piece(whole(shape), 0, row_major(shape)),))
            if len(shape) == 2:
                turned = Tensor(f"{dtype}/{shape}/t", shape, dtype)
                yield Slot(turned, buffer.to(device), (Piece(whole(shape), 0, (1, shape[0])),))


def through_the_store(store: HostStore, slots: list[Slot], *, is_mapped: bool) -> list[Slot]:
    """Write what the slots hold, and return others on the device that were filled from it."""
    rows = held_rows(slots)
    slot = store.reserve({0: collection_of(rows)})
    order = slot.orders[0]
    mapped = MappedFile(order) if is_mapped else None
    written = RankSnapshot(write_rows(rows, order, mapped=mapped), "dp0")
    store.seal(slot, step=1, about={}, parts={0: written})
    manifest = store.commit(slot, 1)
    with store.open_rows(1) as stored:
        assert not list(stored.damage()), "fingerprints of the device are those of the files"
    filled = [Slot(s.tensor, torch.zeros_like(s.buffer), s.pieces) for s in slots]
    planned = plan(holders_of([manifest]), [Holder(store.host, collection_of(rows), 0)])
    orders = read_orders(planned, [manifest], {store.host: store.generation_directory(1)})
    read_rows(wanted_rows(filled), orders[0])
    return filled


@pytest.mark.parametrize("is_mapped", [False, True])
def test_every_dtype_shape_and_stride_goes_out_and_in(store: HostStore, is_mapped: bool) -> None:
    slots = list(every_slot("cuda"))
    filled = through_the_store(store, slots, is_mapped=is_mapped)
    for old, new in zip(slots, filled, strict=True):
        assert new.buffer.is_cuda, new.tensor.name
        assert torch.equal(old.buffer.view(torch.uint8), new.buffer.view(torch.uint8)), old.tensor


@pytest.mark.parametrize("is_mapped", [False, True])
def test_what_is_larger_than_all_buffers_of_the_ring_goes_out_and_in(
    store: HostStore, is_mapped: bool
) -> None:
    """In pieces that end anywhere, and beside small ones: the ring's buffers come around."""
    columns = 1001
    rows = 5 * RING_BYTES // (4 * columns)
    large = torch.randn(rows * columns, device="cuda")
    slots = [
        Slot(Tensor("param/w", (rows, columns), "F32"), large,
             (Piece(whole((rows, columns)), 0, (columns, 1)),)),
        Slot(Tensor("param/t", (rows, columns), "F32"), large.clone(),
             (Piece(whole((rows, columns)), 0, (1, rows)),)),
        Slot(Tensor("param/b", (3,), "F32"), large[:3].clone(), (Piece(whole((3,)), 0, (1,)),)),
    ]  # fmt: skip
    filled = through_the_store(store, slots, is_mapped=is_mapped)
    for old, new in zip(slots, filled, strict=True):
        assert torch.equal(old.buffer, new.buffer), old.tensor


def test_fingerprints_are_those_of_the_host() -> None:
    """Of pieces, too, which begin anywhere in their tensor."""
    for on_host, on_device in zip(every_slot("cpu"), every_slot("cuda"), strict=True):
        for slot in (on_host, on_device):
            (piece,) = slot.pieces
            shape = slot.tensor.shape
            box = Box(tuple(n // 3 for n in shape), tuple(n - n // 3 for n in shape))
            parts = (piece, piece.sub(box))
            found = live_fingerprints([(slot, part) for part in parts])
            if slot is on_host:
                expected = found
        assert np.array_equal(found, expected), on_host.tensor


@pytest.mark.parametrize("stride", ["row by row", "column by column"])
def test_fingerprints_of_more_than_a_block_are_those_of_the_host(stride: str) -> None:
    shape = (4099, 9001)
    buffer = torch.randn(shape[0] * shape[1]).to(torch.bfloat16)
    strides = row_major(shape) if stride == "row by row" else (1, shape[0])
    piece = Piece(whole(shape), 0, strides)
    tensor = Tensor("param/w", shape, "BF16")
    (expected,) = live_fingerprints([(Slot(tensor, buffer, (piece,)), piece)])
    on_device = Slot(tensor, buffer.cuda(), (piece,))
    found = device_fingerprint(piece_view(on_device, piece), piece.box, shape)
    assert fingerprint_of(found) == int(expected)
