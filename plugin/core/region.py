"""Geometry: boxes of a global tensor, and where their elements lie in a flat local buffer.

Source: the sub-tensors of slicing σ (Tenplex/Scalai, arXiv 2312.05181, section 3). Differs in: a
sub-tensor is a list of boxes with strides rather than one contiguous range, so that fused,
transposed and flat-range shards are the same case.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

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
        """Return the common box, or None where nothing is common."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(h - lo for lo, h in zip(low, high, strict=True)))


def box_text(box: Box) -> str:
    """Return a box as index ranges, such as ``[0:4,2:8]``: in messages, and in the names of entries
    of a generation's files."""
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
        """Return the part of this piece that covers ``box``, which must lie inside."""
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
    """Yield elements ``[low, high)`` of a row-major tensor as at most ``2 * ndim - 1`` boxes, in
    order."""
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
    """Yield the parts of ``piece`` whose elements lie in ``[low, high)`` of the flat buffer.

    ``start`` of what is returned counts from ``low``. Holds for a piece whose axes nest (a slice or
    a transpose of a row-major buffer): sorted by stride, its elements are in lexicographic order.
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
