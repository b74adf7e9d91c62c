"""A piece of a tensor as rows along the tensor's last axis: in place, or in small copies."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scalai.core.dtypes import Bits
from scalai.core.region import Box, row_major

RowNumbers = npt.NDArray[np.int64]

MAX_ROWS = 1 << 17
"""Rows of a table."""
COPY_BYTES = 1 << 20
"""What cannot be read row by row in place is copied in parts of at most this size."""


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """Rows of a piece, ``matrix`` [rows, columns], any strides where it is small.

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
    """Yield a piece that is not empty in tables.

    Args:
        values: Bit patterns of the piece [box.shape], any strides.
        box: Where the piece lies in the global tensor.
        shape: The global tensor's shape, in elements.
    """
    for part, part_box in _parts(values, box):
        matrix = part.reshape(-1, part.shape[-1] if part.ndim else 1)
        first = part_box.offset[-1] if part_box.offset else 0
        yield Table(matrix, row_numbers(part_box, shape), first)


def _parts(values: Bits, box: Box) -> Iterator[tuple[Bits, Box]]:
    """Yield parts of a piece that have few rows and are a matrix in place, or else are small."""
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
