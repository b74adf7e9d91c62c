"""Fingerprints of the tensors in a checkpoint's files."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import Checkpoint, Placed
from scalai.converters.forked import map_forked
from scalai.converters.source_files import SourceFiles
from scalai.converters.work import HERE
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.fingerprint import combine, piece_fingerprint, tensor_fingerprints
from scalai.core.tensors.plan import plan
from scalai.core.tensors.region import Box, whole
from scalai.core.tensors.sources import Holder
from scalai.store.files import blocks

PART_ELEMENTS = 1 << 22
"""Elements that are looked at at a time."""
BATCH = 64
"""Rows that one process takes at a time."""


def fingerprints(checkpoint: Checkpoint, workers: int) -> Mapping[str, int]:
    """Return the fingerprint of every tensor.

    Raises:
        LayoutError: Holes, or shards that overlap without being replicas.
        ProofError: Replicas of a shard differ.
    """
    placed = checkpoint.placed
    check_coverage(placed.collection, exact_partition=not checkpoint.may_overlap)
    if checkpoint.may_overlap:
        placed = _without_overlaps(placed)
        checkpoint = replace(checkpoint, placed=placed)
    rows = row_fingerprints(checkpoint, range(len(placed.collection)), workers)
    return tensor_fingerprints(placed.collection, rows)


def row_fingerprints(
    checkpoint: Checkpoint, rows: Sequence[int], workers: int
) -> npt.NDArray[np.uint64]:
    """Return the fingerprints of some rows as they are now."""
    values, files = np.zeros(len(rows), dtype=np.uint64), SourceFiles(checkpoint.directory)

    def compute(numbers: range) -> list[int]:
        return [_row_fingerprint(files, checkpoint.placed, rows[number]) for number in numbers]

    for numbers, found in map_forked(compute, batches(len(rows)), workers):
        values[numbers.start : numbers.stop] = found
    return values


def _without_overlaps(placed: Placed) -> Placed:
    """Return rows that hold every element once."""
    tensors = placed.collection.tensors
    wanted = Collection.of((tensor, whole(tensor.shape)) for tensor in tensors)
    copies = plan([Holder(HERE, placed.collection)], [Holder(HERE, wanted)]).copies
    row = copies.source_row
    items = np.array([ITEM_BYTES[t.dtype] for t in tensors], dtype=np.int64)
    number = placed.collection.tensor[row]
    shift = ((copies.offset - placed.collection.offset[row]) * placed.stride[row]).sum(axis=1)
    return Placed(
        Collection(tensors, number, copies.offset, copies.shape),
        placed.file[row], placed.begin[row] + shift * items[number], placed.stride[row],
        placed.files,
    )  # fmt: skip


def _row_fingerprint(files: SourceFiles, placed: Placed, row: int) -> int:
    tensor, box = placed.collection.box(row)
    views = ((part, files.view(placed, row, part)) for part in parts_of(box))
    prints = (piece_fingerprint(view, part, tensor.shape) for part, view in views)
    return combine(prints)


def parts_of(box: Box) -> Iterator[Box]:
    """Yield a box in parts of a bounded number of elements."""
    for block in blocks(box.shape, PART_ELEMENTS):
        yield Box(tuple(a + b for a, b in zip(box.offset, block.offset, strict=True)), block.shape)


def batches(count: int) -> list[range]:
    return [range(low, min(low + BATCH, count)) for low in range(0, count, BATCH)]
