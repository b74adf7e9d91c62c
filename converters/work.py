"""The plan between two placed collections, cut into tasks of bounded size.

A *unit* is a contiguous part of one target row in its file and fits the buffer; a *task* is some
units of one file. Both follow from the input alone, so an interrupted run finds its tasks again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scalai.converters.checkpoint import Checkpoint, CheckpointTarget, PlacedTensors
from scalai.core.tensors.collection import MAX_NDIM, Columns, split_name
from scalai.core.tensors.coverage import check_coverage
from scalai.core.tensors.holders import Holder
from scalai.core.tensors.plan import Copies, plan
from scalai.core.tensors.region import Box
from scalai.store.files import blocks

TASK_BYTES = 128 << 20
"""Bytes of a task, the unit of syncing, reading back and the journal."""

BATCH_FILES = 64
"""Most tasks in a worker's batch."""
TURNS = 4
"""Fewest batches of each worker, given enough tasks."""

HERE = "here"
"""The one host of these plans."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a target row; ``block`` counts from the start of the row's box."""

    row: int
    block: Box
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Task:
    """Units of one target file."""

    number: int
    file: int
    units: tuple[Unit, ...]

    @property
    def size_bytes(self) -> int:
        return sum(unit.size_bytes for unit in self.units)


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """A checked plan and its tasks.

    ``first`` [rows + 1] is the first copy of each target row: copies are ordered by it.
    """

    source: PlacedTensors
    target: PlacedTensors
    copies: Copies
    first: Columns
    tasks: tuple[Task, ...]

    @property
    def size_bytes(self) -> int:
        return int(self.target.collection.size_bytes().sum())


def plan_work(source: Checkpoint, target: CheckpointTarget, buffer_bytes: int) -> Work:
    """Plan the copies into ``target``, and cut them into tasks.

    Raises:
        LayoutError: The source has holes, or shards that overlap without being replicas; or it
            lacks an element of the target.
    """
    check_coverage(source.placed.collection, exact_partition=not source.may_overlap)
    return work_between(source.placed, target.placed, buffer_bytes)


def work_between(source: PlacedTensors, target: PlacedTensors, buffer_bytes: int) -> Work:
    """Plan the copies into ``target`` from a source that is known to be whole.

    Raises:
        LayoutError: The source lacks an element of the target.
    """
    holders = [Holder(HERE, source.collection)], [Holder(HERE, target.collection)]
    copies = plan(*holders).copies
    first = np.searchsorted(copies.target_row, np.arange(len(target.collection) + 1))
    return Work(source, target, copies, first, tuple(_tasks(target, buffer_bytes)))


def copies_into(work: Work, row: int, wanted: Box) -> Iterator[tuple[int, int, Box]]:
    """Yield (copy, source row, box) of the elements in ``wanted``, a part of a target row's box."""
    skip = MAX_NDIM - len(wanted.shape)
    copies = work.copies
    for copy in range(int(work.first[row]), int(work.first[row + 1])):
        box = Box(
            tuple(copies.offset[copy, skip:].tolist()), tuple(copies.shape[copy, skip:].tolist())
        )
        common = box.intersect(wanted)
        if common is not None:
            yield copy, int(copies.source_row[copy]), common


def batches(tasks: Sequence[Task], workers: int) -> list[tuple[Task, ...]]:
    """Return tasks in batches, in order: many small files are synced to disk together.

    Args:
        tasks: The tasks to do.
        workers: Number of processes that share them; 0: this one alone.
    """
    total = sum(task.size_bytes for task in tasks)
    most = min(TASK_BYTES, total // (TURNS * max(workers, 1)))
    found: list[tuple[Task, ...]] = []
    batch: list[Task] = []
    filled = 0
    for task in tasks:
        if batch and (filled + task.size_bytes > most or len(batch) == BATCH_FILES):
            found.append(tuple(batch))
            batch, filled = [], 0
        batch.append(task)
        filled += task.size_bytes
    return [*found, tuple(batch)] if batch else found


def unused(source: Checkpoint, target: CheckpointTarget) -> Mapping[str, Sequence[str]]:
    """Return the source's tensors without one in the target, by kind."""
    wanted = {tensor.name for tensor in target.placed.collection.tensors}
    found: dict[str, list[str]] = {}
    for tensor in source.placed.collection.tensors:
        if tensor.name not in wanted:
            found.setdefault(split_name(tensor.name)[0], []).append(tensor.name)
    return found


def _tasks(target: PlacedTensors, buffer_bytes: int) -> Iterator[Task]:
    number = 0
    sizes = target.collection.size_bytes()
    for file in range(len(target.files)):
        rows = np.flatnonzero((target.file == file) & (sizes > 0))
        rows = rows[np.argsort(target.begin[rows], kind="stable")]
        units: list[Unit] = []
        filled = 0
        for row in rows.tolist():
            _, box = target.collection.box(row)
            item = int(sizes[row]) // box.numel
            for block in blocks(box.shape, max(buffer_bytes // item, 1)):
                units.append(Unit(row, block, block.numel * item))
                filled += block.numel * item
                if filled >= TASK_BYTES:
                    yield Task(number, file, tuple(units))
                    number, units, filled = number + 1, [], 0
        if units:
            yield Task(number, file, tuple(units))
            number += 1
