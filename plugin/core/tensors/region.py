"""Geometry: boxes of a global tensor, and the places of their elements in a flat local buffer.

Source: the sub-tensors of slicing σ (Tenplex/Scalai, arXiv 2312.05181, section 3). Differs in: a
sub-tensor is a list of boxes with strides rather than one contiguous range, so that fused,
transposed and flat-range shards are the same case.

``tables`` gives a piece as rows along its tensor's last axis: in place, or in small copies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from scalai.core.tensors.dtypes import Bits

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open box ``offset <= index < offset + shape`` of a global tensor, in elements."""

    offset: Index
    shape: Index

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a 0-d tensor."""
        return prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the common box, or None."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(h - lo for lo, h in zip(low, high, strict=True)))


def box_text(box: Box) -> str:
    """Return a box as index ranges, such as ``[0:4,2:8]``: for messages and entries of a
    generation's files.
    """
    ranges = (f"{low}:{low + size}" for low, size in zip(box.offset, box.shape, strict=True))
    return f"[{','.join(ranges)}]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box and its place in a flat local buffer.

    Element ``i`` of the box (relative to its offset) lies at ``start + sum(i * stride)`` of the
    buffer, in elements.
    """

    box: Box
    start: int
    stride: Index

    def sub(self, box: Box) -> "Piece":
        """Return the part of this piece at ``box``, which must lie inside."""
        shift = sum(
            (a - b) * s for a, b, s in zip(box.offset, self.box.offset, self.stride, strict=True)
        )
        return Piece(box, self.start + shift, self.stride)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Sequence[int]) -> Index:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def flat_range(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """Yield elements ``[low, high)`` of a row-major tensor as at most ``2 * ndim - 1`` ordered
    boxes.
    """
    if low >= high:
        return
    if len(shape) <= 1:
        yield Box((low,), (high - low,)) if shape else Box((), ())
        return
    inner = prod(shape[1:])
    first, head = divmod(low, inner)
    last, tail = divmod(high, inner)

    def in_row(row: int, start: int, stop: int) -> Iterator[Box]:
        for box in flat_range(shape[1:], start, stop):
            yield Box((row, *box.offset), (1, *box.shape))

    if first == last:
        yield from in_row(first, head, tail)
        return
    if head:
        yield from in_row(first, head, inner)
        first += 1
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if tail:
        yield from in_row(last, 0, tail)


def clip(piece: Piece, low: int, high: int) -> Iterator[Piece]:
    """Yield the parts of ``piece`` in ``[low, high)`` of the flat buffer.

    Their ``start`` counts from ``low``. Holds for a piece whose axes nest (a slice or a transpose
    of a row-major buffer): sorted by stride, its elements are in lexicographic order.
    """
    shape = piece.box.shape
    axes = sorted(range(len(shape)), key=lambda axis: (shape[axis] > 1, -piece.stride[axis]))
    sizes = [shape[axis] for axis in axes]
    strides = [piece.stride[axis] for axis in axes]

    def count_below(position: int) -> int:
        rest, count = position - piece.start, 0
        for k, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            if rest <= 0:
                return count
            if size == 1:
                continue
            index, inner = rest // stride, prod(sizes[k + 1 :])
            if index >= size:
                return count + size * inner
            count, rest = count + index * inner, rest - index * stride
        return count + (rest > 0)

    for box in flat_range(sizes, count_below(low), count_below(high)):
        offset, extent = [0] * len(axes), [0] * len(axes)
        for k, axis in enumerate(axes):
            offset[axis], extent[axis] = piece.box.offset[axis] + box.offset[k], box.shape[k]
        part = piece.sub(Box(tuple(offset), tuple(extent)))
        yield Piece(part.box, part.start - low, part.stride)


RowNumbers = npt.NDArray[np.int64]

MAX_ROWS = 1 << 17
"""Largest number of rows of a table."""
COPY_BYTES = 1 << 20
"""Largest copy of a part that is not readable row by row in place."""


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """Rows of a piece, ``matrix`` [rows, columns]; a small one may have any strides.

    ``rows`` [rows] are their numbers in the whole tensor, row-major; a tensor of 0 or 1 dims is row
    0. ``first`` is the place of the first column in the whole row, in elements.
    """

    matrix: Bits
    rows: RowNumbers
    first: int


def row_numbers(box: Box, shape: tuple[int, ...]) -> RowNumbers:
    """Return the number of every row of ``box`` in a tensor of this shape, [rows], row-major."""
    rows = np.zeros(1, dtype=np.int64)
    for start, size, stride in zip(box.offset, box.shape[:-1], row_major(shape[:-1]), strict=False):
        rows = (rows[:, None] + (start + np.arange(size)) * stride).reshape(-1)
    return rows


def tables(values: Bits, box: Box, shape: tuple[int, ...]) -> Iterator[Table]:
    """Yield a non-empty piece in tables.

    Args:
        values: Bit patterns of the piece [box.shape], any strides.
        box: Place of the piece in the global tensor.
        shape: Shape of the global tensor, in elements.
    """
    for part, part_box in _parts(values, box):
        matrix = part.reshape(-1, part.shape[-1] if part.ndim else 1)
        first = part_box.offset[-1] if part_box.offset else 0
        yield Table(matrix, row_numbers(part_box, shape), first)


def _parts(values: Bits, box: Box) -> Iterator[tuple[Bits, Box]]:
    """Yield parts of a piece with few rows: a matrix in place, or small."""
    rows = values.size // values.shape[-1] if values.ndim else 1
    is_matrix = values.ndim <= 2 and (not values.ndim or values.strides[-1] == values.itemsize)
    in_place = is_matrix or values.flags.c_contiguous
    if rows <= MAX_ROWS and (in_place or values.nbytes <= COPY_BYTES):
        yield values, box
        return
    axes = range(values.ndim - 1) if rows > MAX_ROWS else range(values.ndim)
    axis = max(axes, key=lambda k: values.shape[k])
    middle = values.shape[axis] // 2
    for low, high in ((0, middle), (middle, values.shape[axis])):
        offset, extent = list(box.offset), list(box.shape)
        offset[axis], extent[axis] = offset[axis] + low, high - low
        index = (slice(None),) * axis + (slice(low, high),)
        yield from _parts(values[index], Box(tuple(offset), tuple(extent)))
