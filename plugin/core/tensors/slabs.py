"""Spatial slicing: one large sample cut over ranks, in slabs along its axes or zig-zag along one.

Source: slicing σ and partition φ of the PTC (Tenplex/Scalai, arXiv 2312.05181, section 3), with a
sample as the tensor and ranks that share one sample as the devices. Slabs with halos: spatial
partitioning of 3D networks (Oyama et al., "The Case for Strong Scaling in Deep Learning", arXiv
2007.12856). Zig-zag: context parallelism of Megatron-LM 0.16 (``get_batch_on_this_cp_rank`` of
megatron/core/utils.py). Both differ in: sizes need not divide, the first slabs have one more.

Boxes by rank make a ``Collection`` with the sample's ``Tensor``; ``plan.py`` plans the moves of a
change of the number of slabs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from scalai.core.errors import LayoutError, UsageError
from scalai.core.tensors.region import Box, Index, RowNumbers, row_numbers


@dataclass(frozen=True, slots=True)
class Slabs:
    """A sample of ``shape`` [axes] in ``parts`` [axes] contiguous parts an axis.

    Ranks are numbered row-major in the grid of parts: along the last axis first. Axes before these
    (channels, samples) are whole on every rank.

    Raises:
        UsageError: Shape and parts do not go together.
        LayoutError: An axis has fewer elements than parts.
    """

    shape: Index
    parts: Index

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.parts):
            raise UsageError(
                f"a sample {list(self.shape)} has {len(self.shape)} axes, and parts "
                f"{list(self.parts)} are of {len(self.parts)}. Give one number an axis, 1: whole."
            )
        for axis, (size, parts) in enumerate(zip(self.shape, self.parts, strict=True)):
            if parts < 1:
                raise UsageError(f"{parts} parts along axis {axis}: use 1 (whole) or more.")
            _check_enough(size, parts, axis, "slabs")

    @property
    def count(self) -> int:
        """Number of ranks of a sample."""
        return prod(self.parts)

    def slab(self, rank: int) -> Box:
        """Slab of this rank alone. The slabs of all ranks make up the sample."""
        return self.at(self._place(rank))

    def at(self, place: Index) -> Box:
        """Slab at a place of the grid of parts."""
        ranges = [
            cut(size, parts, part)
            for size, parts, part in zip(self.shape, self.parts, place, strict=True)
        ]
        return _box(ranges)

    def with_halo(self, rank: int, halo: Index) -> Box:
        """Slab with ``halo`` [axes] elements more on both sides, clipped at the sample's borders.

        Raises:
            UsageError: The halo has other axes, or is negative.
            LayoutError: It is wider than a neighbour's slab.
        """
        self._check_halo(halo)
        return self._widened(self.slab(rank), halo)

    def index(self, rank: int, halo: Index | None = None) -> tuple[slice, ...]:
        """A rank's slab, with its halo if one is given, as an array's index."""
        box = self.slab(rank) if halo is None else self.with_halo(rank, halo)
        return tuple(
            slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True)
        )

    def halo_sources(self, rank: int, halo: Index) -> tuple[tuple[int, Box], ...]:
        """Parts of a rank's halo by their owner's rank. Raises as ``with_halo``."""
        wanted = self.with_halo(rank, halo)
        shared = ((other, wanted.intersect(slab)) for other, slab in self._neighbours(rank))
        return tuple((other, box) for other, box in shared if box is not None)

    def halo_targets(self, rank: int, halo: Index) -> tuple[tuple[int, Box], ...]:
        """Parts of a rank's slab in others' halos, by rank. Raises as ``with_halo``."""
        self._check_halo(halo)
        own = self.slab(rank)
        shared = (
            (other, own.intersect(self._widened(slab, halo)))
            for other, slab in self._neighbours(rank)
        )
        return tuple((other, box) for other, box in shared if box is not None)

    def _neighbours(self, rank: int) -> Iterator[tuple[int, Box]]:
        """Yield the ranks beside this one, across corners too, and their slabs; ordered."""
        here = self._place(rank)
        beside = (
            range(max(place - 1, 0), min(place + 2, parts))
            for place, parts in zip(here, self.parts, strict=True)
        )
        for place in product(*beside):
            if place != here:
                yield int(np.ravel_multi_index(place, self.parts)), self.at(place)

    def _place(self, rank: int) -> Index:
        if not 0 <= rank < self.count:
            raise UsageError(f"rank {rank} is none of the {self.count} that share a sample.")
        return (
            tuple(int(place) for place in np.unravel_index(rank, self.parts)) if self.parts else ()
        )

    def _widened(self, slab: Box, halo: Index) -> Box:
        return _box(
            [
                (max(low - more, 0), min(low + size + more, whole))
                for low, size, more, whole in zip(
                    slab.offset, slab.shape, halo, self.shape, strict=True
                )
            ]
        )

    def _check_halo(self, halo: Index) -> None:
        """Refuse on all ranks alike: none waits for another one."""
        if len(halo) != len(self.shape) or min(halo, default=0) < 0:
            raise UsageError(
                f"halo {list(halo)} does not fit a sample {list(self.shape)}: give 0 or more "
                f"elements for each of its {len(self.shape)} axes."
            )
        for axis, (size, parts, more) in enumerate(zip(self.shape, self.parts, halo, strict=True)):
            if parts > 1 and more > size // parts:
                raise LayoutError(
                    f"a halo of {more} along axis {axis} is wider than a neighbour's slab of "
                    f"{size // parts} ({size} elements in {parts} parts): it would reach into the "
                    f"slab behind. Use at most {max(size // more, 1)} parts along this axis."
                )


def cut(size: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of part ``part`` of ``size`` elements; the first ``size % parts`` parts have
    one more."""
    each, rest = divmod(size, parts)
    low = part * each + min(part, rest)
    return low, low + each + (part < rest)


def zig_zag(size: int, cp: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The two chunks of a sequence of each rank, as [begin, end), by rank.

    The sequence is cut into ``2 * cp`` chunks, and rank ``r`` has chunks ``r`` and ``2 * cp - 1 -
    r``: with a causal mask all ranks compute equally much.

    Raises:
        UsageError: ``cp`` is below 1. LayoutError: There are more chunks than elements.
    """
    if cp < 1:
        raise UsageError(f"cp={cp} is not a degree; use 1 or more.")
    chunks = 2 * cp
    _check_enough(size, chunks, 0, "zig-zag chunks (two a rank)")
    return tuple(
        (cut(size, chunks, rank), cut(size, chunks, chunks - 1 - rank)) for rank in range(cp)
    )


def runs(shape: Index, box: Box) -> tuple[RowNumbers, int]:
    """First elements of a box's contiguous runs in a row-major tensor of this shape, [runs],
    ascending, and the length of each, in elements."""
    if not shape:
        return np.zeros(1, np.int64), 1
    inner = len(shape)
    while inner > 1 and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    behind = prod(shape[inner:])
    length = box.shape[inner - 1] * behind
    outer = Box((*box.offset[: inner - 1], 0), (*box.shape[: inner - 1], 1))
    row_elements = shape[inner - 1] * behind
    rows = row_numbers(outer, (*shape[: inner - 1], row_elements))
    return rows * row_elements + box.offset[inner - 1] * behind, length


def _check_enough(size: int, parts: int, axis: int, what: str) -> None:
    if size < parts:
        raise LayoutError(
            f"{size} elements along axis {axis} are too few for {parts} {what}: each needs one at "
            "least. Use fewer ranks along this axis, or a larger sample."
        )


def _box(ranges: list[tuple[int, int]]) -> Box:
    return Box(tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges))
