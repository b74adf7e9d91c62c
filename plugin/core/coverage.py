"""Is a state whole: does someone hold every element of every tensor?

Asked of the deposits of a drain, of what survived a failure, and of a checkpoint before it is
believed.
"""

from collections.abc import Sequence

import numpy as np

from scalai.core.boxes import (
    NumberLine,
    check_inside,
    distinct,
    refine,
    self_overlapping,
    uncovered,
)
from scalai.core.collection import MAX_NDIM, Collection, Tensor
from scalai.core.errors import LayoutError
from scalai.core.region import Box, box_text, whole

NAMED = 5
"""Tensors, and boxes of each, named in an error."""


def find_gaps(collection: Collection) -> list[tuple[Tensor, Box]]:
    """Return the boxes that no row holds, of all tensors in the collection's table, in its order.

    Raises:
        LayoutError: A box reaches outside of its tensor.
    """
    line = NumberLine.of(collection.tensors)
    columns = (collection.tensor, collection.offset, collection.shape)
    check_inside(collection.tensors, line.shape, *columns)
    rows = np.flatnonzero(collection.numel())
    boxes = line.place(collection.tensor[rows], collection.offset[rows], collection.shape[rows])
    boxes = boxes.select(distinct(boxes)[0])
    atoms, _, _ = refine(line, boxes)
    held = np.zeros(len(collection.tensors), dtype=np.int64)
    np.add.at(held, atoms.tensor, atoms.numel())
    gaps: list[tuple[Tensor, Box]] = []
    for number, tensor in enumerate(collection.tensors):
        if held[number] == tensor.numel:
            continue
        skip = MAX_NDIM - len(tensor.shape)
        holders = [
            Box(tuple(atoms.offset[row, skip:].tolist()), tuple(atoms.shape[row, skip:].tolist()))
            for row in np.flatnonzero(atoms.tensor == number)
        ]
        gaps.extend((tensor, gap) for gap in uncovered(whole(tensor.shape), holders))
    return gaps


def find_overlaps(collection: Collection) -> list[tuple[Tensor, Box, Box]]:
    """Return the pairs of boxes that have elements in common without being equal (replicas)."""
    rows = np.flatnonzero(collection.numel())
    line = NumberLine.of(collection.tensors)
    boxes = line.place(collection.tensor[rows], collection.offset[rows], collection.shape[rows])
    first = rows[distinct(boxes)[0]]
    one, two = self_overlapping(boxes.select(distinct(boxes)[0]))
    pairs = []
    for left, right in zip(first[one].tolist(), first[two].tolist(), strict=True):
        tensor, box = collection.box(left)
        pairs.append((tensor, box, collection.box(right)[1]))
    return pairs


def check_coverage(collection: Collection, *, exact_partition: bool = True) -> None:
    """Raise ``LayoutError`` unless every element of every tensor of the table is held.

    Args:
        collection: The pieces of all holders.
        exact_partition: Also refuse boxes that overlap without being equal, so that every element
            is held exactly once by distinct boxes, as fingerprints of tensors need it.
    """
    gaps = find_gaps(collection)
    if gaps:
        missing = [(tensor, f"nobody holds {box_text(box)}") for tensor, box in gaps]
        raise LayoutError(
            f"the state is not whole: {_named(missing)}. "
            "Use a generation of which every holder is there, or an older one."
        )
    overlaps = find_overlaps(collection) if exact_partition else []
    if overlaps:
        found = [(t, f"{box_text(a)} overlaps {box_text(b)}") for t, a, b in overlaps]
        raise LayoutError(
            f"shards overlap without being replicas: {_named(found)}. "
            "They were described wrongly or come from two layouts; take the shards of one of them."
        )


def _named(found: Sequence[tuple[Tensor, str]]) -> str:
    """Return what was found in words, by tensor, cut short."""
    by_name: dict[str, list[str]] = {}
    for tensor, what in found:
        by_name.setdefault(f"{tensor.name!r} {list(tensor.shape)}", []).append(what)
    parts = [
        f"{name}: {', '.join(what[:NAMED])}{_more(len(what), 'boxes')}"
        for name, what in list(by_name.items())[:NAMED]
    ]
    return "; ".join(parts) + _more(len(by_name), "tensors")


def _more(count: int, what: str) -> str:
    return f" and {count - NAMED} more {what}" if count > NAMED else ""
