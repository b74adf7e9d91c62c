"""Many boxes at once, as columns: overlaps and mutual splits.

A non-empty box of a tensor is known by the flat indices of its first and its last element. One
number line holds all tensors, one behind the other: equal boxes are equal pairs of integers, and
only boxes with overlapping spans can overlap. So the search for overlaps is two binary searches for
each box.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.errors import LayoutError
from scalai.core.tensors.collection import MAX_NDIM, Columns, Tensor
from scalai.core.tensors.region import Box, box_text

PAIRS_AT_ONCE = 1 << 19
"""Candidate pairs tested at a time; bounds the memory of a search at some 100 MB."""


@dataclass(frozen=True, eq=False, slots=True)
class Boxes:
    """Non-empty boxes as columns, each [boxes] or [boxes, MAX_NDIM].

    ``tensor`` indexes the tensors of a ``NumberLine``; ``low`` and ``high`` are the span on it: the
    places of the first element and one behind the last.
    """

    tensor: Columns
    low: Columns
    high: Columns
    offset: Columns
    shape: Columns

    def __len__(self) -> int:
        return len(self.low)

    def numel(self) -> Columns:
        """Elements of each box, [boxes]."""
        return np.asarray(self.shape.prod(axis=1), dtype=np.int64)

    def select(self, rows: npt.NDArray[Any]) -> "Boxes":
        """Return the chosen boxes (indices or mask)."""
        return Boxes(
            self.tensor[rows],
            self.low[rows],
            self.high[rows],
            self.offset[rows],
            self.shape[rows],
        )

    def axes(self) -> npt.NDArray[np.bool_]:
        """Return True for axes with a box other than index 0 of size 1, [MAX_NDIM]."""
        return np.asarray((self.shape != 1).any(axis=0) | self.offset.any(axis=0), dtype=bool)

    def box(self, row: int) -> Box:
        """Return one box, with MAX_NDIM dims."""
        return Box(tuple(self.offset[row].tolist()), tuple(self.shape[row].tolist()))


@dataclass(frozen=True, eq=False, slots=True)
class NumberLine:
    """Tensors laid one behind the other: tensor ``i`` starts at ``start[i]``.

    ``shape`` and ``stride`` [tensors, MAX_NDIM] are right-aligned, strides row-major in elements.
    """

    start: Columns
    shape: Columns
    stride: Columns

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "NumberLine":
        """Lay out these tensors in order."""
        shape = right_aligned(tensors)
        # Sizes behind an axis, multiplied from the right; an empty tensor still takes one place.
        behind = np.concatenate([shape[:, 1:], np.ones((len(tensors), 1), np.int64)], axis=1)
        stride = np.cumprod(np.maximum(behind, 1)[:, ::-1], axis=1)[:, ::-1]
        length = np.maximum(shape, 1).prod(axis=1)
        return cls(np.cumsum(length) - length, shape, stride)

    def place(self, tensor: Columns, offset: Columns, shape: Columns) -> Boxes:
        """Return the boxes of tensors ``tensor`` [boxes] with their spans; none may be empty."""
        low = self.start[tensor] + np.einsum("ij,ij->i", offset, self.stride[tensor])
        reach = np.einsum("ij,ij->i", shape - 1, self.stride[tensor])
        return Boxes(tensor, low, low + reach + 1, offset, shape)


def right_aligned(tensors: Sequence[Tensor]) -> Columns:
    """Return the shapes of tensors, [tensors, MAX_NDIM], with leading sizes 1."""
    shape = np.ones((len(tensors), MAX_NDIM), dtype=np.int64)
    for row, tensor in zip(shape, tensors, strict=True):
        row[MAX_NDIM - len(tensor.shape) :] = tensor.shape
    return shape


def outside(sizes: Columns, tensor: Columns, offset: Columns, shape: Columns) -> Columns:
    """Return the indices of boxes reaching outside of their tensors.

    Args:
        sizes: Shapes of the tensors, from ``right_aligned``.
        tensor: Tensor of each box, [boxes].
        offset, shape: Each box, [boxes, MAX_NDIM].
    """
    # The sum of a damaged offset and shape may be too large for a column.
    wrong = (offset < 0) | (shape < 0) | (offset > sizes[tensor] - shape)
    return np.flatnonzero(wrong.any(axis=1))


def check_inside(
    tensors: Sequence[Tensor], sizes: Columns, tensor: Columns, offset: Columns, shape: Columns
) -> None:
    """Raise ``LayoutError`` if a box of ``tensors[tensor[i]]`` reaches outside of its tensor.

    ``sizes`` are the tensors' shapes from ``right_aligned``.
    """
    wrong = outside(sizes, tensor, offset, shape)
    if not len(wrong):
        return
    row = int(wrong[0])
    named = tensors[tensor[row]]
    skip = MAX_NDIM - len(named.shape)
    box = Box(tuple(offset[row, skip:].tolist()), tuple(shape[row, skip:].tolist()))
    raise LayoutError(
        f"box {box_text(box)} reaches outside of {named.name!r} {list(named.shape)} "
        f"({len(wrong)} such boxes). The shards were described for another model."
    )


def distinct(boxes: Boxes) -> tuple[Columns, Columns]:
    """Find equal boxes.

    Returns:
        ``first`` [distinct], a row of each distinct box, ordered by span; and ``number`` [boxes],
        the distinct box of each row.
    """
    if not len(boxes):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.lexsort((boxes.high, boxes.low))
    low, high = boxes.low[order], boxes.high[order]
    is_new = np.concatenate([[True], (low[1:] != low[:-1]) | (high[1:] != high[:-1])])
    number = np.empty(len(boxes), dtype=np.int64)
    number[order] = np.cumsum(is_new) - 1
    return order[is_new], number


def expand(counts: Columns) -> tuple[Columns, Columns]:
    """Return, for each item of runs of these lengths, its run and its position in it."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, eq=False, slots=True)
class Index:
    """Boxes ordered by ``low`` for many searches."""

    boxes: Boxes
    order: Columns
    low: Columns
    reach: Columns
    """The highest ``high`` so far, in this order: ascending, for binary search."""
    axes: npt.NDArray[np.bool_]
    """Axes with a box other than index 0 of size 1, [MAX_NDIM]."""

    @classmethod
    def of(cls, boxes: Boxes) -> "Index":
        """Order these boxes."""
        order = np.argsort(boxes.low, kind="stable")
        reach = np.maximum.accumulate(boxes.high[order])
        return cls(boxes, order, boxes.low[order], reach, boxes.axes())

    def overlapping(self, left: Boxes) -> tuple[Columns, Columns]:
        """Return all pairs (row of ``left``, row of these boxes) with a common element.

        Ordered by the row of ``left``, then by ``low``.
        """
        begin = np.searchsorted(self.reach, left.low, side="right")
        count = np.maximum(np.searchsorted(self.low, left.high, side="left") - begin, 0)
        axes = np.flatnonzero(self.axes | left.axes())
        pairs = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        for rows in _batches(count):
            owner, position = expand(count[rows])
            one = owner + rows.start
            two = self.order[begin[rows][owner] + position]
            for axis in axes:
                start, other = left.offset[one, axis], self.boxes.offset[two, axis]
                stop, end = start + left.shape[one, axis], other + self.boxes.shape[two, axis]
                meets = np.minimum(stop, end) > np.maximum(start, other)
                one, two = one[meets], two[meets]
            pairs.append((one, two))
        return np.concatenate([one for one, _ in pairs]), np.concatenate([two for _, two in pairs])


def _batches(count: Columns) -> Iterator[slice]:
    """Yield slices of rows with counts of about ``PAIRS_AT_ONCE`` in sum."""
    total = np.cumsum(count)
    begin = 0
    while begin < len(count):
        done = int(total[begin - 1]) if begin else 0
        stop = int(np.searchsorted(total, done + PAIRS_AT_ONCE, side="right"))
        stop = max(stop, begin + 1)
        yield slice(begin, stop)
        begin = stop


def self_overlapping(boxes: Boxes) -> tuple[Columns, Columns]:
    """Return the pairs of different rows (smaller row first) with a common element."""
    one, two = Index.of(boxes).overlapping(boxes)
    keep = one < two
    return one[keep], two[keep]


def intersection(left: Boxes, right: Boxes) -> tuple[Columns, Columns]:
    """Return offset and shape of the common part of rows ``i``; none may be empty."""
    offset = np.maximum(left.offset, right.offset)
    stop = np.minimum(left.offset + left.shape, right.offset + right.shape)
    return offset, stop - offset


def without(box: Box, hole: Box) -> Iterator[Box]:
    """Yield ``box`` minus ``hole`` as at most ``2 * ndim`` disjoint boxes."""
    common = box.intersect(hole)
    if common is None:
        yield box
        return
    offset, shape = list(box.offset), list(box.shape)
    for axis, (start, size) in enumerate(zip(common.offset, common.shape, strict=True)):
        before, behind = start - offset[axis], offset[axis] + shape[axis] - start - size
        for low, extent in ((offset[axis], before), (start + size, behind)):
            if extent:
                yield Box(
                    (*offset[:axis], low, *offset[axis + 1 :]),
                    (*shape[:axis], extent, *shape[axis + 1 :]),
                )
        offset[axis], shape[axis] = start, size


def uncovered(box: Box, holders: Iterable[Box]) -> list[Box]:
    """Return the parts of ``box`` outside of all ``holders``."""
    rest = [box]
    for hole in holders:
        rest = [part for piece in rest for part in without(piece, hole)]
    return rest


def refine(line: NumberLine, boxes: Boxes) -> tuple[Boxes, Columns, Columns]:
    """Split distinct boxes of the tensors on ``line`` at each other's boundaries.

    Returns:
        Disjoint ``atoms`` with the same cover, and the pairs (atom, row of ``boxes`` around it),
        ordered by atom. Boxes without overlaps are their own atoms.
    """
    one, two = self_overlapping(boxes)
    if not len(one):
        everyone = np.arange(len(boxes))
        return boxes, everyone, everyone
    alone = np.ones(len(boxes), dtype=bool)
    alone[one], alone[two] = False, False
    kept = np.flatnonzero(alone)
    cut = [atom for rows in _clusters(one, two) for atom in _split(boxes, rows)]
    parent = boxes.tensor[[rows[0] for _, rows in cut]]
    offset = np.array([box.offset for box, _ in cut], dtype=np.int64)
    shape = np.array([box.shape for box, _ in cut], dtype=np.int64)
    atoms = line.place(
        np.concatenate([boxes.tensor[kept], parent]),
        np.concatenate([boxes.offset[kept], offset]),
        np.concatenate([boxes.shape[kept], shape]),
    )
    counts = np.array([1] * len(kept) + [len(rows) for _, rows in cut], dtype=np.int64)
    members = np.array([row for _, rows in cut for row in rows], dtype=np.int64)
    return atoms, np.repeat(np.arange(len(atoms)), counts), np.concatenate([kept, members])


def _clusters(one: Columns, two: Columns) -> list[list[int]]:
    """Return the rows of the pairs in connected clusters, ordered by their lowest rows."""
    root: dict[int, int] = {}

    def find(row: int) -> int:
        while root.setdefault(row, row) != row:
            root[row] = root[root[row]]
            row = root[row]
        return row

    for first, second in zip(one.tolist(), two.tolist(), strict=True):
        low, high = sorted((find(first), find(second)))
        root[high] = low
    clusters: dict[int, list[int]] = {}
    for row in sorted(root):
        clusters.setdefault(find(row), []).append(row)
    return list(clusters.values())


def _split(boxes: Boxes, rows: Sequence[int]) -> list[tuple[Box, list[int]]]:
    atoms: list[tuple[Box, list[int]]] = []
    for row in rows:
        box = boxes.box(row)
        split: list[tuple[Box, list[int]]] = []
        for atom, members in atoms:
            common = atom.intersect(box)
            if common is None:
                split.append((atom, members))
                continue
            split.append((common, [*members, row]))
            split.extend((part, members) for part in without(atom, common))
        split.extend((part, [row]) for part in uncovered(box, (atom for atom, _ in atoms)))
        atoms = split
    return atoms
