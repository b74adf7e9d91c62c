"""Live memory of a worker into files of its host, and back: a snapshot and a restore.

The file of a snapshot is mapped ahead of time (``MappedFile``), so that only a copy into warm pages
is left at the boundary. Measured on one core: a copy into a warm mapping 14 GB/s, ``pwrite`` into
the same pages 6, a copy into a new mapping 3.
"""

import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import torch

from scalai.core.errors import LayoutError, PeerError, StoreError
from scalai.core.jsonable import Json
from scalai.core.messages.worker_messages import (
    AwaitSlot,
    ReadOrder,
    Source,
    WriteOrder,
)
from scalai.core.tensors.collection import MAX_NDIM, Columns
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, Piece, row_major
from scalai.runtime.agent_folder import call_agent
from scalai.runtime.failpoints import reached
from scalai.runtime.live import INTEGERS, LiveState, Slot, host_bits, piece_view
from scalai.runtime.live_fingerprints import live_fingerprints
from scalai.runtime.staging import RING_BUFFERS, RING_BYTES, StagingRing, rings_for
from scalai.store.files import (
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    advise,
    blocks,
    contiguous_chunks,
    slices,
    write_at,
)

log = logging.getLogger(__name__)


class MappedFile:
    """The file of a ``WriteOrder`` in this process's memory. Costs page tables, no second copy.

    Making it blocks for some 0.2 s a GB, without holding the interpreter's lock: do it in a thread
    beside the training, as soon as the agent has reserved the file.

    Raises:
        StoreError: The file is missing.
    """

    def __init__(self, order: WriteOrder) -> None:
        try:
            with Path(order.path).open("r+b") as file:
                status = os.fstat(file.fileno())
                self._mapping = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise StoreError(f"{order.path} cannot be mapped ({error}). Snapshot again.") from error
        self._identity = (status.st_dev, status.st_ino, status.st_size)
        # If the kernel cannot do it ahead, the copy maps the pages.
        advise(self._mapping, 0, len(self._mapping), MADV_POPULATE_WRITE)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def is_current(self, path: str) -> bool:
        """Return True if ``path`` is still this file, with its length.

        Files of dropped generations get other names, and may be cut.
        """
        try:
            status = os.stat(path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino, status.st_size) == self._identity

    def place(self, begin: int, like: torch.Tensor) -> torch.Tensor:
        """Return the memory at byte ``begin`` as a contiguous tensor like ``like``."""
        size = prod(like.shape) * like.element_size()
        return self.bytes[begin : begin + size].view(like.dtype).view(like.shape)

    def as_row(self, slot: Slot, piece: Piece, begin: int) -> "Row":
        """Return a piece at byte ``begin`` as a row of live memory."""
        placed = self.place(begin, piece_view(slot, piece)).view(-1)
        moved = Piece(piece.box, 0, row_major(piece.box.shape))
        return replace(slot, buffer=placed, pieces=(moved,)), moved


def map_beside(directory: str, asked: AwaitSlot, keep: Callable[[MappedFile], None]) -> None:
    """Map a rank's file of the next snapshot in a thread, once the agent of this folder has made
    it.
    """

    def work() -> None:
        try:
            with closing(call_agent(directory)) as channel:
                order = channel.call(asked)
            if order is not None and order.rows:
                keep(MappedFile(order))
        except (PeerError, StoreError):
            return  # the round ends, or the file is in use: the snapshot does without

    with suppress(RuntimeError):  # no room for a thread: the snapshot does without
        threading.Thread(target=work, name="map-snapshot", daemon=True).start()


Row = tuple[Slot, Piece]


def ordered_fingerprints(
    rows: Sequence[Row], order: WriteOrder, known: Mapping[int, int]
) -> tuple[int, ...]:
    """Return the fingerprints of the ordered rows of live memory, in the order's order.

    Call it after the write: if the device has no room for the arithmetic, the file is read.

    Args:
        known: Fingerprints of the present values, by row: not computed again.
    """
    if all(row in known for row in order.rows):
        return tuple(known[row] for row in order.rows)
    places = zip(order.rows, order.begins, strict=True)
    unknown = [(row, begin) for row, begin in places if row not in known]
    left = replace(
        order,
        rows=tuple(row for row, _ in unknown),
        begins=tuple(begin for _, begin in unknown),
    )
    try:
        found = tuple(live_fingerprints([rows[row] for row in left.rows]).tolist())
    except torch.OutOfMemoryError as error:
        log.info("event=proof of the file, because the device has no room: %s", error)
        found = file_fingerprints(rows, left, MappedFile(left))
    every = {**known, **dict(zip(left.rows, found, strict=True))}
    return tuple(every[row] for row in order.rows)


def file_fingerprints(
    rows: Sequence[Row], order: WriteOrder, mapped: MappedFile | None
) -> tuple[int, ...]:
    """Return the fingerprints of the ordered rows in the file, in the order's order; ``mapped`` is
    None for an empty order.
    """
    if mapped is None:
        return ()
    placed = list[Row]()
    for number, begin in zip(order.rows, order.begins, strict=True):
        slot, piece = rows[number]
        placed.append(mapped.as_row(slot, piece, begin))
    return tuple(int(value) for value in live_fingerprints(placed))


def place_rows(
    rows: Sequence[Row],
    order: WriteOrder,
    rings: Mapping[torch.device, StagingRing] | None = None,
    mapped: MappedFile | None = None,
) -> None:
    """Write the ordered rows of this rank.

    Blocks. Call it between two optimizer steps: the memory must not change meanwhile.

    Args:
        rows: Held rows of this rank (``held_rows``).
        order: Rows and their places in the file.
        rings: Pinned buffers by device; made here, slowly, if missing.
        mapped: File of the order, mapped beforehand: twice as fast. Another file is ignored.

    Raises:
        LayoutError: The order names unknown rows. Nothing is written.
        StoreError: The file is missing, too short, or cannot be written.
    """
    if not order.rows:
        return
    views = ordered_views(rows, order)
    rings = rings or rings_for({view.device for view in views})
    if mapped is not None and mapped.is_current(order.path):
        for view, begin in zip(views, order.begins, strict=True):
            _copy_into(mapped, view, begin, rings)
    else:
        _write_file(order, views, rings)


def ordered_views(rows: Sequence[Row], order: WriteOrder) -> list[torch.Tensor]:
    """Return the bits of the ordered rows in the live memory, in the order's order.

    Raises:
        LayoutError: The order names unknown rows.
        StoreError: The order's file is missing or too short.
    """
    if not order.rows:
        return []
    unknown = next((row for row in order.rows if not 0 <= row < len(rows)), None)
    if unknown is not None:
        raise LayoutError(
            f"the order names row {unknown}, but this rank holds {len(rows)}. The slots "
            "changed since they were published; publish them again."
        )
    views = [piece_view(slot, piece) for slot, piece in (rows[row] for row in order.rows)]
    _check_size(order, views)
    return views


def _check_size(order: WriteOrder, views: Sequence[torch.Tensor]) -> None:
    try:
        size = os.stat(order.path).st_size
    except OSError as error:
        raise StoreError(
            f"{order.path} cannot be opened ({error.strerror}); the agent made it. Snapshot again."
        ) from error
    ends = [
        begin + view.numel() * view.element_size()
        for begin, view in zip(order.begins, views, strict=True)
    ]
    if size < max(ends):
        raise StoreError(
            f"{order.path} is {size} bytes long; this rank's rows end at {max(ends)}. Snapshot "
            "again."
        )


def _copy_into(
    mapped: MappedFile, view: torch.Tensor, begin: int, rings: Mapping[torch.device, StagingRing]
) -> None:
    if view.device.type == "cpu":
        mapped.place(begin, view).copy_(view)
        return
    copy_from_device(mapped, view, begin, rings)


def copy_from_device(
    mapped: MappedFile, view: torch.Tensor, begin: int, rings: Mapping[torch.device, StagingRing]
) -> None:
    """Copy a piece of a device to byte ``begin`` of a mapped file, through the device's ring."""
    ring = rings[view.device]
    for chunk in _device_chunks(view, ring):
        ring.move(mapped.place(begin, chunk), chunk)
        begin += len(chunk)


def _write_file(
    order: WriteOrder, views: Sequence[torch.Tensor], rings: Mapping[torch.device, StagingRing]
) -> None:
    descriptor = -1
    try:
        descriptor = os.open(order.path, os.O_WRONLY)
        for view, begin in zip(views, order.begins, strict=True):
            for chunk in _chunks(view, rings):
                write_at(descriptor, chunk, begin)
                begin += len(chunk)
    except OSError as error:
        raise StoreError(
            f"{order.path} cannot be written ({error.strerror}). Snapshot again."
        ) from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _chunks(view: torch.Tensor, rings: Mapping[torch.device, StagingRing]) -> Iterator[memoryview]:
    """Yield the bytes of a piece in row-major order; each chunk is valid until the next one."""
    if view.device.type == "cpu":
        yield from contiguous_chunks(host_bits(view))
    else:
        for chunk in _device_chunks(view, rings[view.device]):
            yield chunk.numpy().data


def _device_chunks(view: torch.Tensor, ring: StagingRing) -> Iterator[torch.Tensor]:
    under_way: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
    ring.begin()
    for block in blocks(view.shape, RING_BYTES // view.element_size()):
        if len(under_way) == RING_BUFFERS - 1:
            yield _arrived(under_way)
        buffer, event = ring.next_buffer()
        flat = buffer[: block.numel * view.element_size()]
        with torch.cuda.stream(ring.stream):
            target = flat.view(view.dtype).view(block.shape)
            target.copy_(view[slices(block)], non_blocking=True)
            event.record(ring.stream)
        under_way.append((flat, event))
    while under_way:
        yield _arrived(under_way)


def _arrived(under_way: "deque[tuple[torch.Tensor, torch.cuda.Event]]") -> torch.Tensor:
    flat, event = under_way.popleft()
    event.synchronize()
    return flat


NEAR_BYTES = 1 << 16
"""Stretches of a file nearer than this are mapped as one."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A live state filled from a generation: its scalars, its own note, the begin (monotonic
    clock), and of the time since then the seconds of mapping and of waiting for other hosts'
    pieces.
    """

    scalars: dict[str, Json]
    note: str
    began: float
    mapped_s: float
    waited_s: float


def fill_state(
    state: LiveState,
    wanted: Sequence[Row],
    source: Source,
    rings: Mapping[torch.device, StagingRing],
    more: Callable[[], ReadOrder | None],
) -> Filled:
    """Fill the live state of this rank from the files of its host, in part while pieces of other
    hosts still come.

    Args:
        more: Waits for further pieces, and returns the order to read them; None: there are none.

    Raises: As ``read_rows``.
    """
    began, mapped_s, waited_s = time.monotonic(), 0.0, 0.0
    reached("restore")
    left, order, place = elements_of(wanted), source.order, "rest"
    while True:
        mapping_at = time.monotonic()
        sources = map_sources(wanted, order)
        mapped_s += time.monotonic() - mapping_at
        left = read_rows(wanted, order, rings, sources, left)
        if not left.any():
            break
        reached(place)
        place = "batch"
        waiting_at = time.monotonic()
        further = more()
        waited_s += time.monotonic() - waiting_at
        if further is None:
            row = int(left.argmax())
            raise LayoutError(f"copies leave {left[row]} elements of {_named(wanted[row])}.")
        order = further
    scalars, rank_state = source.scalars.value(), source.rank_state.value()
    state.load_scalars(scalars)
    note = state.load_rank_state(rank_state.get(state.coordinate), source.step)
    return Filled(scalars, note, began, mapped_s, waited_s)


def elements_of(rows: Sequence[Row]) -> Columns:
    """Return the number of elements of each row."""
    return np.array([piece.box.numel for _, piece in rows], dtype=np.int64)


def read_rows(
    rows: Sequence[Row],
    order: ReadOrder,
    rings: Mapping[torch.device, StagingRing] | None = None,
    sources: Sequence[torch.Tensor] | None = None,
    left: Columns | None = None,
) -> Columns:
    """Fill elements of the wanted rows of this rank. Blocks until the bytes are in place.

    Args:
        rows: Wanted rows of this rank (``wanted_rows``).
        order: Copies; each wanted element is in at most one of all orders.
        rings: Pinned buffers by device; made here, slowly, if missing.
        sources: Result of ``map_sources``.
        left: Elements of each row before; None: all.

    Returns:
        Elements of each row that are left.

    Raises:
        LayoutError: The copies fill more than is left, or lie outside of the rows. Nothing is
            written.
        StoreError: A file is missing or too short. Nothing is written.
    """
    left = _left_behind(rows, order, elements_of(rows) if left is None else left)
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
    return left


def _left_behind(rows: Sequence[Row], order: ReadOrder, left: Columns) -> Columns:
    unknown = order.row[(order.row < 0) | (order.row >= len(rows))]
    if len(unknown):
        raise LayoutError(
            f"a copy fills row {unknown[0]}, but this rank wants {len(rows)}. The slots "
            "changed since they were published; publish them again."
        )
    filled = np.bincount(order.row, order.shape.prod(axis=1), minlength=len(rows)).astype(np.int64)
    if (filled > left).any():
        row = int((filled > left).argmax())
        raise LayoutError(
            f"copies bring {filled[row]} elements to {_named(rows[row])}, which lacks "
            f"{left[row]}. Plan again."
        )
    return left - filled


def _named(row: Row) -> str:
    slot, piece = row
    return f"the piece {list(piece.box.offset)}+{list(piece.box.shape)} of {slot.tensor.name!r}"


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
