"""How many bytes the ranks of one layout hold of what those of another want, by host and by device.

A pair of cells (one that is held, one that is wanted) has bytes in common; no byte is in two pairs
of one kind. So what a host has, lacks and sends is a sum over pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalai.core.errors import RefusedError
from scalai.core.planner.buffers import Model
from scalai.core.planner.cells import Cells, cells_of
from scalai.core.planner.columns import NO_SHARDING, WEIGHTS, Layout, Workload
from scalai.core.tensors.boxes import Boxes, Index, expand, intersection
from scalai.core.tensors.collection import MAX_NDIM, Columns


@dataclass(frozen=True, eq=False, slots=True)
class Overlap:
    """Bytes that cells have in common, of all kinds of state that are cut alike.

    Attributes:
        held, wanted: The cells.
        first, second: The held and the wanted cell of each pair, [pairs].
        size_bytes: What they have in common, [pairs].
    """

    held: Cells
    wanted: Cells
    first: Columns
    second: Columns
    size_bytes: Columns


def state_bytes(work: Workload) -> tuple[int, int]:
    """Return the bytes of a parameter's weight, and of its master and moments."""
    return (4, 8) if work.precision == "fp32" else (2, 12)


def overlaps_of(work: Workload, before: Layout, after: Layout) -> tuple[Overlap, ...]:
    """Return what the ranks of ``before`` hold of what those of ``after`` want.

    With optimizer state over replicas a rank wants its weights whole, but holds its part alone: the
    rest may be one step old.

    Raises:
        RefusedError: A layout does not cut the model, or cuts experts otherwise than the rest.
    """
    for tp in {before.degrees.tp, after.degrees.tp}:
        if work.shape.experts and work.expert_tp not in (None, tp):
            raise RefusedError(
                f"experts have a tensor parallelism of {work.expert_tp}, not tp={tp}: where their "
                "parts lie is not modelled. Use the model's tensor parallelism for them."
            )
    model = Model.of(work.shape, before.degrees, after.degrees)
    weights, optimizer = state_bytes(work)
    old = cells_of(model, before.degrees, is_sharded=before.sharding != NO_SHARDING)
    new = cells_of(model, after.degrees, is_sharded=after.sharding != NO_SHARDING)
    if after.sharding in (NO_SHARDING, WEIGHTS):
        return (_overlap(old, new, weights + optimizer),)
    full = cells_of(model, after.degrees, is_sharded=False)
    return _overlap(old, full, weights), _overlap(old, new, optimizer)


def _overlap(held: Cells, wanted: Cells, item_bytes: int) -> Overlap:
    index = Index.of(_boxes(held))
    boxes = _boxes(wanted)
    two, one = index.overlapping(boxes)
    _, shape = intersection(index.boxes.select(one), boxes.select(two))
    code = held.cell[one] * wanted.count + wanted.cell[two]
    pairs, number = np.unique(code, return_inverse=True)
    size = summed(np.ravel(number), shape.prod(axis=1), len(pairs)) * item_bytes
    first, second = np.divmod(pairs, wanted.count)
    return Overlap(held, wanted, first, second, size)


def summed(number: Columns, size: Columns, count: int) -> Columns:
    """Return the sums of sizes by number, [count]. They are exact below 2^53."""
    sums: Columns = np.bincount(number, weights=size, minlength=count).astype(np.int64)
    return sums


def _boxes(cells: Cells) -> Boxes:
    start = (np.cumsum(cells.length) - cells.length)[cells.tensor]
    width = cells.width[cells.tensor]
    low = start + cells.row * width + cells.column
    reach = (cells.rows - 1) * width + cells.columns
    offset = np.zeros((len(low), MAX_NDIM), dtype=np.int64)
    shape = np.ones((len(low), MAX_NDIM), dtype=np.int64)
    offset[:, -2], offset[:, -1] = cells.row, cells.column
    shape[:, -2], shape[:, -1] = cells.rows, cells.columns
    return Boxes(cells.tensor, low, low + reach, offset, shape)


def joined(cell: Columns, place: Columns, count: int) -> tuple[Columns, Columns]:
    """Return, by cell, the distinct places that have it: the first entry of each cell
    [cells + 1], and the places."""
    most = int(place.max(initial=-1)) + 1
    both = np.unique(cell * most + place)
    owner, found = np.divmod(both, max(most, 1))
    return np.searchsorted(owner, np.arange(count + 1)), found


def by_place(
    overlap: Overlap, before: Columns, after: Columns
) -> tuple[Columns, Columns, Columns, Columns]:
    """Return each pair at each of the places that want it.

    Args:
        before, after: The place (host or device) of each rank, [ranks]; below 0: it is gone.

    Returns:
        The pair and the place of each entry, which is distinct; and of the pairs' held cells the
        first source [pairs + 1] and the sources.
    """
    held, wanted = overlap.held, overlap.wanted
    where = before[held.holder_rank]
    here = where >= 0
    begin, source = joined(held.holder_cell[here], where[here], held.count)
    wanted_begin, place = joined(wanted.holder_cell, after[wanted.holder_rank], wanted.count)
    pair, entry = expand((wanted_begin[1:] - wanted_begin[:-1])[overlap.second])
    return pair, place[wanted_begin[:-1][overlap.second[pair]] + entry], begin, source


def needed_and_held(
    overlaps: Sequence[Overlap], before: Columns, after: Columns, places: int, others: int
) -> tuple[Columns, Columns]:
    """Return the bytes that each new place needs, [places], and what each old place holds of them,
    [places, others]."""
    needed = np.zeros(places, dtype=np.int64)
    common = np.zeros(places * others, dtype=np.int64)
    for overlap in overlaps:
        pair, place, begin, source = by_place(overlap, before, after)
        needed += summed(place, overlap.size_bytes[pair], places)
        cell = overlap.first[pair]
        entry, number = expand((begin[1:] - begin[:-1])[cell])
        holder = source[begin[:-1][cell[entry]] + number]
        size = overlap.size_bytes[pair[entry]]
        common += summed(place[entry] * others + holder, size, places * others)
    return needed, common.reshape(places, others)
