"""The worker's side of a restore: pieces in files of this host into live memory."""

import mmap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from scalai.core.errors import LayoutError, StoreError
from scalai.core.jsonable import Json
from scalai.core.messages.worker_messages import RankRestored, ReadOrder, Source
from scalai.core.tensors.collection import MAX_NDIM, Columns
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, Piece
from scalai.runtime.failpoints import reached
from scalai.runtime.live import INTEGERS, LiveState, Slot, piece_view
from scalai.runtime.live_fingerprints import live_fingerprints
from scalai.runtime.staging import RING_BYTES, StagingRing, rings_for
from scalai.store.files import MADV_POPULATE_READ, advise, blocks, slices

Row = tuple[Slot, Piece]
NEAR_BYTES = 1 << 16
"""Stretches of a file nearer than this are mapped as one."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A live state filled from a generation: its scalars, its own note, the begin (monotonic clock)
    and the mapping's seconds.
    """

    scalars: dict[str, Json]
    note: str
    began: float
    mapped_s: float

    def proven(self, rank: int, round: int, wanted: Sequence[Row]) -> RankRestored:
        """Return this rank's report, with fingerprints of its wanted rows."""
        read = time.monotonic()
        fingerprints = live_fingerprints(wanted)
        return RankRestored(
            rank=rank,
            round=round,
            fingerprints=np.asarray(fingerprints, dtype=np.uint64),
            seconds={
                "restore": read - self.began,
                "page_fault": self.mapped_s,
                "proof": time.monotonic() - read,
            },
            note=self.note,
        )


def fill_state(
    state: LiveState,
    wanted: Sequence[Row],
    source: Source,
    rings: Mapping[torch.device, StagingRing],
) -> Filled:
    """Fill the live state of this rank from the files of its host. Raises as ``read_rows``."""
    began = time.monotonic()
    reached("restore")
    sources = map_sources(wanted, source.order)
    mapped_s = time.monotonic() - began
    read_rows(wanted, source.order, rings, sources)
    scalars, rank_state = source.scalars.value(), source.rank_state.value()
    state.load_scalars(scalars)
    note = state.load_rank_state(rank_state.get(state.coordinate), source.step)
    return Filled(scalars, note, began, mapped_s)


def read_rows(
    rows: Sequence[Row],
    order: ReadOrder,
    rings: Mapping[torch.device, StagingRing] | None = None,
    sources: Sequence[torch.Tensor] | None = None,
) -> None:
    """Fill the wanted rows of this rank. Blocks until the bytes are in place.

    Args:
        rows: Wanted rows of this rank (``wanted_rows``).
        order: Copies; each wanted element is in exactly one.
        rings: Pinned buffers by device; made here, slowly, if missing.
        sources: Result of ``map_sources``.

    Raises:
        LayoutError: The copies do not fill the rows, or lie outside of them. Nothing is written.
        StoreError: A file is missing or too short. Nothing is written.
    """
    _check_filled(rows, order)
    sources = map_sources(rows, order) if sources is None else sources
    copies = [_resolve(rows, order, copy, sources) for copy in range(len(order))]
    rings = rings or rings_for({target.device for target, _ in copies})
    for ring in rings.values():
        ring.begin()
    for target, source in copies:
        if target.device.type == "cpu":
            target.copy_(source)
        else:
            _to_device(target, source, rings[target.device])
    for ring in rings.values():
        ring.end()
        ring.stream.synchronize()


def _check_filled(rows: Sequence[Row], order: ReadOrder) -> None:
    wanted = np.array([piece.box.numel for _, piece in rows], dtype=np.int64)
    unknown = order.row[(order.row < 0) | (order.row >= len(rows))]
    if len(unknown):
        raise LayoutError(
            f"a copy fills row {unknown[0]}, but this rank wants {len(rows)}. The slots "
            "changed since they were published; publish them again."
        )
    filled = np.bincount(order.row, order.shape.prod(axis=1), minlength=len(rows)).astype(np.int64)
    if (filled != wanted).any():
        row = int((filled != wanted).argmax())
        slot, piece = rows[row]
        raise LayoutError(
            f"copies bring {filled[row]} elements to the piece {list(piece.box.offset)}+"
            f"{list(piece.box.shape)} of {slot.tensor.name!r}, which has {wanted[row]}. Plan again."
        )


def map_sources(rows: Sequence[Row], order: ReadOrder) -> list[torch.Tensor]:
    """Map the files of an order as bytes, with the pages for its copies.

    Mapping many pages at once takes a fraction of the time. Private: torch has no read-only
    tensors; nothing writes to them.

    Raises:
        StoreError: A file is missing.
    """
    item = np.array([ITEM_BYTES[slot.tensor.dtype] for slot, _ in rows], dtype=np.int64)[order.row]
    # Elements of the stored piece before the copy's first and up to its last, row-major.
    sizes = np.flip(order.source_shape, axis=1)
    strides = np.flip(np.cumprod(sizes, axis=1) // np.maximum(sizes, 1), axis=1)
    first = ((order.offset - order.source_offset) * strides).sum(axis=1)
    last = first + ((order.shape - 1) * strides).sum(axis=1)
    low, high = order.begin + first * item, order.begin + (last + 1) * item
    return [
        _map(path, low[order.file == number], high[order.file == number])
        for number, path in enumerate(order.files)
    ]


def _map(path: str, begins: Columns, ends: Columns) -> torch.Tensor:
    try:
        with Path(path).open("rb") as file:
            if file.seek(0, 2) == 0:
                return torch.empty(0, dtype=torch.uint8)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be mapped ({error.strerror}). Restore from another generation."
        ) from error
    for low, high in _stretches(begins, ends):
        # If the kernel cannot do it ahead, or the file is too short, the copy finds out.
        advise(data, low, min(high, len(data)), MADV_POPULATE_READ)
    return torch.frombuffer(data, dtype=torch.uint8)


def _stretches(low: Columns, high: Columns) -> Iterator[tuple[int, int]]:
    by_low = np.argsort(low, kind="stable")
    reached = 0
    start = -1
    for begin, end in zip(low[by_low].tolist(), high[by_low].tolist(), strict=True):
        if start < 0 or begin > reached + NEAR_BYTES:
            if start >= 0:
                yield start, reached
            start = begin
        reached = max(reached, end)
    if start >= 0:
        yield start, reached


def _resolve(
    rows: Sequence[Row], order: ReadOrder, copy: int, sources: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return target and source view of one copy, both [copy's shape] signed integers."""
    slot, piece = rows[order.row[copy]]
    item, skip = ITEM_BYTES[slot.tensor.dtype], MAX_NDIM - len(slot.tensor.shape)
    box = _box(order.offset[copy, skip:], order.shape[copy, skip:])
    stored = _box(order.source_offset[copy, skip:], order.source_shape[copy, skip:])
    for name, outer in (("wanted", piece.box), ("stored", stored)):
        if box.numel and box.intersect(outer) != box:
            raise LayoutError(
                f"a copy of box {list(box.offset)}+{list(box.shape)} of {slot.tensor.name!r} "
                f"leaves the {name} piece {list(outer.offset)}+{list(outer.shape)}. Plan again."
            )
    begin, size = int(order.begin[copy]), stored.numel * item
    source = sources[order.file[copy]]
    if not 0 <= begin <= begin + size <= len(source):
        raise StoreError(
            f"{order.files[order.file[copy]]} is {len(source)} bytes long; a piece of "
            f"{slot.tensor.name!r} should end at {begin + size}. Restore from another generation."
        )
    values = source[begin : begin + size].view(INTEGERS[item]).view(stored.shape)
    inside = tuple(a - b for a, b in zip(box.offset, stored.offset, strict=True))
    return piece_view(slot, piece.sub(box)), values[slices(Box(inside, box.shape))]


def _box(offset: Columns, shape: Columns) -> Box:
    return Box(tuple(offset.tolist()), tuple(shape.tolist()))


def _to_device(target: torch.Tensor, source: torch.Tensor, ring: StagingRing) -> None:
    for block in blocks(source.shape, RING_BYTES // source.element_size()):
        buffer, event = ring.next_buffer()
        flat = buffer[: block.numel * source.element_size()]
        staged = flat.view(source.dtype).view(block.shape)
        ring.move(staged, source[slices(block)])
        with torch.cuda.stream(ring.stream):
            target[slices(block)].copy_(staged, non_blocking=True)
            event.record(ring.stream)
