"""One task: copy, bring to disk, read back. Runs in a worker process.

The fingerprint of what is read is taken where it lies in the source, by the source's own boxes and
strides; that of what was written from the destination's file, by the destination's. They are equal
only if every element is at its place.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from scalai.converters.checkpoint import Placed
from scalai.converters.rounding import rounded
from scalai.converters.work import Task, Unit, Work, copies_into
from scalai.core.collection import MAX_NDIM
from scalai.core.errors import ProofError
from scalai.core.fingerprint import combine, piece_fingerprint
from scalai.core.region import Box, row_major
from scalai.store.files import Bits, bits_dtype, box_text, map_file, slices


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """What all tasks share: the work, where the source lies, where the destination grows."""

    work: Work
    source: Path
    destination: Path


def run_task(job: Job, task: Task) -> dict[int, int]:
    """Copy a task's units, bring them to disk, read them back.

    Returns:
        The fingerprint of what was written of each row.

    Raises:
        ProofError: What was read back is not what was read.
    """
    target = job.work.target
    path = job.destination / target.files[task.file].path
    left: list[int] = []
    descriptor = os.open(path, os.O_RDWR)
    try:
        for unit in task.units:
            buffer, fingerprint = _gather(job, unit)
            left.append(fingerprint)
            _write_all(descriptor, buffer, _begin(target, unit))
        os.fdatasync(descriptor)
        arrived = [_read_back(target, unit, descriptor) for unit in task.units]
    finally:
        os.close(descriptor)
    rows: dict[int, int] = {}
    for unit, before, after in zip(task.units, left, arrived, strict=True):
        if before != after:
            tensor, box = target.collection.box(unit.row)
            raise ProofError(
                f"{box_text(_wanted(box, unit))} of {tensor.name!r} has fingerprint {after:016x} "
                f"in {path}, and {before:016x} in the source. The disk or the memory is not "
                "sound: check them and run again."
            )
        rows[unit.row] = combine((rows.get(unit.row, 0), after))
    return rows


def source_view(directory: Path, placed: Placed, row: int, part: Box) -> Bits:
    """Return the part of a source row that covers the box ``part``, as bits; a copy only where it
    has to be rounded."""
    tensor, box = placed.collection.box(row)
    is_rounded = placed.is_rounded is not None and bool(placed.is_rounded[row])
    dtype = np.dtype(np.float32 if is_rounded else bits_dtype(tensor))
    stride = placed.stride[row, MAX_NDIM - len(box.shape) :].tolist()
    shift = sum(
        (low - start) * step
        for low, start, step in zip(part.offset, box.offset, stride, strict=True)
    )
    file = placed.files[placed.file[row]]
    data = memoryview(file.content) if file.content is not None else _map(directory / file.path)
    view: Bits = np.ndarray(
        part.shape,
        dtype,
        data,
        int(placed.begin[row]) + shift * dtype.itemsize,
        [step * dtype.itemsize for step in stride],
    )
    return rounded(view.view(np.float32), tensor.dtype) if is_rounded else view


@lru_cache(maxsize=64)
def _map(path: Path) -> memoryview:
    return map_file(path)


def _gather(job: Job, unit: Unit) -> tuple[Bits, int]:
    """Return the elements of a unit, put together from the source, and their fingerprint."""
    work = job.work
    tensor, box = work.target.collection.box(unit.row)
    wanted = _wanted(box, unit)
    buffer: Bits = np.empty(wanted.shape, dtype=bits_dtype(tensor))
    fingerprints = []
    for row, part in copies_into(work, unit.row, wanted):
        view = source_view(job.source, work.source, row, part)
        inside = tuple(low - at for low, at in zip(part.offset, wanted.offset, strict=True))
        np.copyto(buffer[slices(Box(inside, part.shape))], view)
        fingerprints.append(piece_fingerprint(view, part, tensor.shape))
    return buffer, combine(fingerprints)


def _wanted(box: Box, unit: Unit) -> Box:
    """Return a unit's box in the tensor."""
    offset = tuple(a + b for a, b in zip(box.offset, unit.block.offset, strict=True))
    return Box(offset, unit.block.shape)


def _begin(target: Placed, unit: Unit) -> int:
    """Return where a unit begins in its file. Rows of a target are contiguous."""
    tensor, box = target.collection.box(unit.row)
    steps = row_major(box.shape)
    at = sum(low * step for low, step in zip(unit.block.offset, steps, strict=True))
    return int(target.begin[unit.row]) + at * np.dtype(bits_dtype(tensor)).itemsize


def _write_all(descriptor: int, buffer: Bits, begin: int) -> None:
    data = buffer.reshape(-1).view(np.uint8).data
    while data:
        written = os.pwrite(descriptor, data, begin)
        data, begin = data[written:], begin + written


def _read_back(target: Placed, unit: Unit, descriptor: int) -> int:
    """Return the fingerprint of what lies in the destination's file."""
    tensor, box = target.collection.box(unit.row)
    data = os.pread(descriptor, unit.size_bytes, _begin(target, unit))
    values: Bits = np.frombuffer(data, dtype=bits_dtype(tensor)).reshape(unit.block.shape)
    return piece_fingerprint(values, _wanted(box, unit), tensor.shape)
