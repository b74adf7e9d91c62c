"""Whole tensors, put together from the pieces in which a generation stores them."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scalai.core.tensors.boxes import uncovered
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, box_text, flat_range, row_major
from scalai.store.files import slices
from scalai.store.generation import Generation
from scalai.vfs.pins import Pin

RUN_BYTES = 1 << 20
"""Bytes of rows that are read at once where a box wants only a part of each row."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A piece: its box, and the file of a part and the byte at which it lies row-major."""

    box: Box
    part: int
    file: int
    begin: int


def pieces_of(generation: Generation, name: str) -> list[Stored]:
    """Return the pieces of a tensor that the parts at hand hold, each box once."""
    found: dict[Box, Stored] = {}
    for number, part in enumerate(generation.hosts):
        held = part.collection
        known = [n for n, tensor in enumerate(held.tensors) if tensor.name == name]
        for row in np.flatnonzero(np.isin(held.tensor, known)).tolist():
            box = held.box(row)[1]
            place = Stored(box, number, int(part.file[row]), int(part.begin[row]))
            if box.numel:
                found.setdefault(box, place)
    return list(found.values())


class TensorElements:
    """The elements of a box of a tensor, read from the files that a pin keeps.

    Raises:
        OSError: Some are on no host whose part is at hand.
    """

    def __init__(self, tensor: Tensor, box: Box, pieces: list[Stored], pin: Pin) -> None:
        self._tensor, self._box, self._pieces, self._pin = tensor, box, pieces, pin
        self._is_open = True
        gaps = uncovered(box, (piece.box for piece in pieces)) if box.numel else []
        if gaps:
            raise OSError(
                errno.EIO,
                f"{tensor.name!r} is not whole here: {box_text(gaps[0])} is on no host whose part "
                "is at hand. Name a durable directory, which has all of them.",
            )

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes ``[begin, end)`` of the box. Raises ``OSError``."""
        item = ITEM_BYTES[self._tensor.dtype]
        low, high = begin // item, -(-end // item)
        out = bytearray()
        for inner in flat_range(self._box.shape, low, high):
            offset = tuple(a + b for a, b in zip(self._box.offset, inner.offset, strict=True))
            out += self._gather(Box(offset, inner.shape), item)
        return bytes(memoryview(out)[begin - low * item : end - low * item])

    def _gather(self, wanted: Box, item: int) -> bytes:
        """Return the bytes of a box, row-major, from the pieces that it meets."""
        values = np.empty(wanted.shape, dtype=f"V{item}")
        left = [wanted]
        for piece in self._pieces:
            if not left:
                break
            rest: list[Box] = []
            for box in left:
                common = box.intersect(piece.box)
                if common is None:
                    rest.append(box)
                    continue
                self._copy(values, wanted, piece, common, item)
                rest += uncovered(box, [common])
            left = rest
        assert not left, "every element is in some piece"
        return values.tobytes()

    def _copy(
        self, values: "np.ndarray[tuple[int, ...], np.dtype[np.void]]", wanted: Box,
        piece: Stored, common: Box, item: int,
    ) -> None:  # fmt: skip
        """Read what a box has in common with a piece into ``values`` [wanted.shape]."""
        for part in _runs(piece.box, common, RUN_BYTES // item):
            first = _place(piece.box, part.offset)
            last = _place(piece.box, tuple(a + n - 1 for a, n in zip(part.offset, part.shape,
                                                                     strict=True)))  # fmt: skip
            data = self._pin.read(
                piece.part, piece.file, piece.begin + first * item, (last - first + 1) * item
            )
            strides = tuple(step * item for step in row_major(piece.box.shape))
            found = np.ndarray(part.shape, f"V{item}", data, strides=strides)
            inside = (a - b for a, b in zip(part.offset, wanted.offset, strict=True))
            values[slices(Box(tuple(inside), part.shape))] = found

    def close(self) -> None:
        """Let go; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._pin.release()


def _place(box: Box, index: tuple[int, ...]) -> int:
    """Return the place of an element in a box that lies row-major."""
    inside = (at - low for at, low in zip(index, box.offset, strict=True))
    return sum(at * step for at, step in zip(inside, row_major(box.shape), strict=True))


def _runs(held: Box, wanted: Box, limit: int) -> Iterator[Box]:
    """Yield a part of a piece as boxes, between whose first and last elements at most ``limit``
    others lie in the piece; a row that is longer is taken whole."""
    strides = row_major(held.shape)
    reach = sum((size - 1) * step for size, step in zip(wanted.shape, strides, strict=True)) + 1
    axis = next((n for n, size in enumerate(wanted.shape) if size > 1), None)
    if reach <= limit or axis is None or reach == wanted.numel:
        yield wanted
        return
    middle = wanted.shape[axis] // 2
    for low, size in ((0, middle), (middle, wanted.shape[axis] - middle)):
        offset, shape = list(wanted.offset), list(wanted.shape)
        offset[axis], shape[axis] = offset[axis] + low, size
        yield from _runs(held, Box(tuple(offset), tuple(shape)), limit)
