"""Some tasks: copy, bring to disk, read back. Runs in a worker process.

The fingerprint of what is read is taken where it lies in the source, by the source's own boxes and
strides; that of what was written from the destination's file, by the destination's. They are equal
only if every element is at its place.
"""

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from weakref import finalize

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import Placed
from scalai.converters.journal import Noted
from scalai.converters.records import Run, Runs, run_of
from scalai.converters.rounding import rounded
from scalai.converters.work import Task, Unit, Work, copies_into
from scalai.core.collection import MAX_NDIM, Tensor
from scalai.core.dtypes import Bits, bits_dtype
from scalai.core.errors import ProofError
from scalai.core.fingerprint import combine, piece_fingerprint
from scalai.core.region import Box, row_major
from scalai.runtime.at_once import at_once
from scalai.store.files import (
    box_text,
    contiguous_chunks,
    map_file,
    slices,
)

OPEN_FILES = 64
"""Source files that a worker keeps open."""
BLOCK_BYTES = 1 << 20
"""What is read before its checksum is taken: it is in a core's cache then."""


@dataclass(frozen=True, eq=False, slots=True)
class Job:
    """What all tasks share: the work, where the source lies, where the destination grows, and of
    which copies checksums are taken [copies]."""

    work: Work
    source: Path
    destination: Path
    counted: npt.NDArray[np.bool_]


def run_tasks(job: Job, tasks: Sequence[Task]) -> dict[int, Noted]:
    """Copy the units of some tasks, bring them to disk, read them back.

    Returns:
        By task, the fingerprint of what was written of each row, and the checksums of what was
        read.

    Raises:
        ProofError: What was read back is not what was read.
    """
    files = job.work.target.files
    with ExitStack() as stack:
        descriptors = []
        for task in tasks:
            descriptors.append(os.open(job.destination / files[task.file].path, os.O_RDWR))
            stack.callback(os.close, descriptors[-1])
        left = [_copy(job, *pair) for pair in zip(tasks, descriptors, strict=True)]
        _sync(descriptors)
        return {
            task.number: Noted(_read_rows(job, task, descriptor, prints), runs)
            for task, descriptor, (prints, runs) in zip(tasks, descriptors, left, strict=True)
        }


def _copy(job: Job, task: Task, descriptor: int) -> tuple[list[int], Sequence[Run]]:
    """Write a task's units; return their fingerprints in the source, and the checksums of what was
    read of it."""
    left, runs = [], Runs(job.counted)
    for unit in task.units:
        buffer, fingerprint = gather(job.source, job.work, unit, runs)
        left.append(fingerprint)
        _write_all(descriptor, buffer, _begin(job.work.target, unit))
    return left, runs.found


def _sync(descriptors: Sequence[int]) -> None:
    """Bring files to disk. Asked at once, a file system does so for several at a time."""
    at_once(os.fdatasync, descriptors)


def _read_rows(job: Job, task: Task, descriptor: int, left: Sequence[int]) -> dict[int, int]:
    """Return the fingerprints of what was written of each row. Raises as ``run_tasks``."""
    target = job.work.target
    rows: dict[int, int] = {}
    for unit, before in zip(task.units, left, strict=True):
        after = _read_back(target, unit, descriptor)
        if before != after:
            tensor, box = target.collection.box(unit.row)
            path = job.destination / target.files[task.file].path
            raise ProofError(
                f"{box_text(wanted_box(box, unit))} of {tensor.name!r} has fingerprint "
                f"{after:016x} in {path}, and {before:016x} in the source. The disk or the memory "
                "is not sound: check them and run again."
            )
        rows[unit.row] = combine((rows.get(unit.row, 0), after))
    return rows


def source_view(directory: Path, placed: Placed, row: int, part: Box) -> Bits:
    """Return the part of a source row that covers the box ``part``, as bits; a copy only where it
    has to be rounded."""
    tensor, _ = placed.collection.box(row)
    begin, stride = _place(placed, row, part)
    file = placed.files[placed.file[row]]
    data = memoryview(file.content) if file.content is not None else _map(directory / file.path)
    if placed.is_rounded_at(row):
        masters = np.ndarray(part.shape, np.dtype(np.float32), data, begin, stride)
        return rounded(masters, tensor.dtype)
    view: Bits = np.ndarray(part.shape, np.dtype(bits_dtype(tensor.dtype)), data, begin, stride)
    return view


def _place(placed: Placed, row: int, part: Box) -> tuple[int, list[int]]:
    """Return where a part of a row begins in its file, and its strides, in bytes."""
    _, box = placed.collection.box(row)
    item = placed.item_bytes(row)
    stride = [item * step for step in placed.stride[row, MAX_NDIM - len(box.shape) :].tolist()]
    inside = zip(part.offset, box.offset, stride, strict=True)
    return int(placed.begin[row]) + sum((low - at) * step for low, at, step in inside), stride


@lru_cache(maxsize=64)
def _map(path: Path) -> memoryview:
    return map_file(path)


def gather(source: Path, work: Work, unit: Unit, runs: Runs | None = None) -> tuple[Bits, int]:
    """Return the elements of a unit, put together from the source's directory, and their
    fingerprint. The next call overwrites them. ``runs``: where checksums of what is read go."""
    tensor, box = work.target.collection.box(unit.row)
    wanted = wanted_box(box, unit)
    buffer = _scratch("gathered", unit, wanted.shape, tensor)
    fingerprints = []
    for copy, row, part in copies_into(work, unit.row, wanted):
        inside = tuple(low - at for low, at in zip(part.offset, wanted.offset, strict=True))
        values = buffer[slices(Box(inside, part.shape))]
        taken = runs if runs is not None and runs.counts(copy) else None
        _read_into(values, source, work.source, row, part, taken)
        fingerprints.append(piece_fingerprint(values, part, tensor.shape))
    return buffer, combine(fingerprints)


def _read_into(
    values: Bits, directory: Path, placed: Placed, row: int, part: Box, runs: Runs | None
) -> None:
    """Copy a part of a source row. What is one run of bytes at both ends is read without a mapping,
    whose page faults cost more than the copy."""
    view = source_view(directory, placed, row, part)
    number = int(placed.file[row])
    file = placed.files[number]
    is_run = view.flags.c_contiguous and values.flags.c_contiguous
    if file.content is not None or placed.is_rounded_at(row) or not is_run:
        run = run_of(placed, row, part) if runs is not None else None
        if runs is not None and run is not None:
            begin, size = run
            runs.add(number, begin, _map(directory / file.path)[begin : begin + size])
        np.copyto(values, view)
        return
    begin, _ = _place(placed, row, part)
    opened = _open(directory / file.path)
    for block in contiguous_chunks(values, BLOCK_BYTES):
        _read_all(opened.descriptor, block, begin)
        if runs is not None:
            runs.add(number, begin, block)
        begin += len(block)


def _read_all(descriptor: int, data: memoryview, begin: int) -> None:
    """Fill memory from a file."""
    while data:
        count = os.preadv(descriptor, [data], begin)
        if not count:
            raise OSError(errno.EIO, f"the file ends at byte {begin}")
        data, begin = data[count:], begin + count


_buffers: dict[str, Bits] = {}
"""Memory of this process that is used again: the first touch of fresh pages is slow."""


def _scratch(use: str, unit: Unit, shape: tuple[int, ...], tensor: Tensor) -> Bits:
    """Return an array of this shape in memory that the next call for the same use overwrites."""
    if use not in _buffers or _buffers[use].nbytes < unit.size_bytes:
        _buffers[use] = np.empty(unit.size_bytes, dtype=np.uint8)
    values: Bits = _buffers[use][: unit.size_bytes].view(bits_dtype(tensor.dtype)).reshape(shape)
    return values


class _Opened:
    """A source file, open for reading while anybody refers to it.

    So whoever reads keeps it open, whatever is forgotten meanwhile; and it is closed at once when
    the last one lets go. A forked process closes its own descriptor alone.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, self.descriptor)


@lru_cache(maxsize=OPEN_FILES)
def _open(path: Path) -> _Opened:
    """Open a source file; the last ones stay open."""
    return _Opened(path)


def forget_files() -> None:
    """Close what stays open and mapped, and let go of the buffers: for a process that goes on with
    something else, and may come back to other files of these names."""
    _open.cache_clear()
    _map.cache_clear()
    _buffers.clear()


def wanted_box(box: Box, unit: Unit) -> Box:
    """Return a unit's box in the tensor."""
    offset = tuple(a + b for a, b in zip(box.offset, unit.block.offset, strict=True))
    return Box(offset, unit.block.shape)


def _begin(target: Placed, unit: Unit) -> int:
    """Return where a unit begins in its file. Rows of a target are contiguous."""
    tensor, box = target.collection.box(unit.row)
    steps = row_major(box.shape)
    at = sum(low * step for low, step in zip(unit.block.offset, steps, strict=True))
    return int(target.begin[unit.row]) + at * np.dtype(bits_dtype(tensor.dtype)).itemsize


def _write_all(descriptor: int, buffer: Bits, begin: int) -> None:
    data = buffer.reshape(-1).view(np.uint8).data
    while data:
        written = os.pwrite(descriptor, data, begin)
        data, begin = data[written:], begin + written


def _read_back(target: Placed, unit: Unit, descriptor: int) -> int:
    """Return the fingerprint of what lies in the destination's file."""
    tensor, box = target.collection.box(unit.row)
    values = _scratch("read back", unit, unit.block.shape, tensor)
    _read_all(descriptor, values.reshape(-1).view(np.uint8).data, _begin(target, unit))
    return piece_fingerprint(values, wanted_box(box, unit), tensor.shape)
