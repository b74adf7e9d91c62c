"""Some tasks: copy, sync to disk, read back. Runs in a worker process.

The fingerprint of the bytes read is taken at their place in the source, by the source's own boxes
and strides; that of the bytes written from the destination's file, by the destination's. They are
equal only if every element is at its place.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import CheckpointFile, PlacedTensors
from scalai.converters.checksums import Run, Runs, run_of
from scalai.converters.journal import Noted
from scalai.converters.source_files import SourceFiles, place_of_part
from scalai.converters.work import Task, Unit, Work, copies_into
from scalai.core.errors import ProofError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import Bits, bits_dtype
from scalai.core.tensors.fingerprint import combine, piece_fingerprint
from scalai.core.tensors.region import Box, box_text, row_major
from scalai.runtime.at_once import at_once
from scalai.store.files import contiguous_chunks, read_at, slices, start_writing, write_at

BLOCK_BYTES = 1 << 20
"""Bytes read before their checksum is taken, while in a core's cache."""
EARLY_BYTES = 1 << 20
"""Least bytes whose way to the disk begins before the sync. Small files go together, at it."""


KnownBytes = Sequence[tuple[int, bytes]]
"""Headers and the like of a file: offset and bytes."""


class Scratch:
    """Reused memory: the first touch of fresh pages is slow. Each forked process has its own."""

    def __init__(self) -> None:
        self._bytes: Bits = np.empty(0, dtype=np.uint8)

    def array(self, unit: Unit, tensor: Tensor) -> Bits:
        """Return bits [unit.block.shape]. The next call overwrites them."""
        if self._bytes.nbytes < unit.size_bytes:
            self._bytes = np.empty(unit.size_bytes, dtype=np.uint8)
        values: Bits = self._bytes[: unit.size_bytes].view(bits_dtype(tensor.dtype))
        return values.reshape(unit.block.shape)


class Gatherer:
    """Puts units together from the source's files, kept open until ``close``."""

    def __init__(self, work: Work, source: Path) -> None:
        self.files = SourceFiles(source)
        self._work = work
        self._scratch = Scratch()

    def __enter__(self) -> "Gatherer":
        return self

    def __exit__(self, *raised: object) -> None:
        self.files.close()

    def gather(self, unit: Unit, runs: Runs | None = None) -> tuple[Bits, int]:
        """Return the elements of a unit and their fingerprint. The next call overwrites them.
        ``runs`` takes the checksums of the bytes read. Raises ``OSError``."""
        work = self._work
        tensor, box = work.target.collection.box(unit.row)
        wanted = wanted_box(box, unit)
        buffer = self._scratch.array(unit, tensor)
        fingerprints = []
        for copy, row, part in copies_into(work, unit.row, wanted):
            inside = tuple(low - at for low, at in zip(part.offset, wanted.offset, strict=True))
            values = buffer[slices(Box(inside, part.shape))]
            taken = runs if runs is not None and runs.counts(copy) else None
            self._read_into(values, row, part, taken)
            fingerprints.append(piece_fingerprint(values, part, tensor.shape))
        return buffer, combine(fingerprints)

    def _read_into(self, values: Bits, row: int, part: Box, runs: Runs | None) -> None:
        """Copy a part of a source row. A run of bytes at both ends is read without a mapping, whose
        page faults cost more than the copy."""
        placed = self._work.source
        view = self.files.view(placed, row, part)
        number = int(placed.file[row])
        file = placed.files[number]
        is_run = view.flags.c_contiguous and values.flags.c_contiguous
        is_made = file.content is not None or bool(file.overlays)
        if is_made or placed.is_rounded_at(row) or not is_run:
            run = run_of(placed, row, part) if runs is not None else None
            if runs is not None and run is not None:
                begin, size = run
                runs.add(number, begin, self.files.bytes_of(file.path)[begin : begin + size])
            np.copyto(values, view)
            return
        begin, _ = place_of_part(placed, row, part)
        opened = self.files.opened(file.path)
        for block in contiguous_chunks(values, BLOCK_BYTES):
            read_at(opened.descriptor, block, begin)
            if runs is not None:
                runs.add(number, begin, block)
            begin += len(block)


@dataclass(frozen=True, eq=False, slots=True)
class CopyJob:
    """Shared by all tasks: the work, the gatherer of the source, the growing destination, the
    copies to take checksums of [copies], and the known bytes of files not made yet, by number."""

    work: Work
    gatherer: Gatherer
    destination: Path
    counted: npt.NDArray[np.bool_]
    unmade: Mapping[int, KnownBytes]
    read_back: Scratch = field(default_factory=Scratch)

    def open(self, number: int) -> int:
        """Open a file of the destination. Raises ``OSError``."""
        file = self.work.target.files[number]
        if number in self.unmade:
            return make_file(self.destination, file, self.unmade[number])
        return os.open(self.destination / file.path, os.O_RDWR)


def make_file(directory: Path, file: CheckpointFile, known: KnownBytes) -> int:
    """Open a file of a target, in its size and with its known bytes. Raises ``OSError``."""
    path = directory / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, file.size_bytes)
        for at, data in known:
            write_at(descriptor, memoryview(data), at)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def run_tasks(job: CopyJob, tasks: Sequence[Task]) -> dict[int, Noted]:
    """Copy the units of some tasks, sync them to disk, read them back.

    Returns:
        By task, the fingerprint of the bytes written for each row, and the checksums of the bytes
        read.

    Raises:
        ProofError: Bytes read back differ from bytes read.
    """
    with ExitStack() as stack:
        descriptors = []
        for task in tasks:
            descriptors.append(job.open(task.file))
            stack.callback(os.close, descriptors[-1])
        left = [_copy(job, *pair) for pair in zip(tasks, descriptors, strict=True)]
        _sync(descriptors)
        return {
            task.number: Noted(_read_rows(job, task, descriptor, prints), runs)
            for task, descriptor, (prints, runs) in zip(tasks, descriptors, left, strict=True)
        }


def _copy(job: CopyJob, task: Task, descriptor: int) -> tuple[list[int], Sequence[Run]]:
    """Write a task's units; return their fingerprints in the source, and the checksums of the bytes
    read."""
    left, runs = [], Runs(job.counted)
    for unit in task.units:
        buffer, fingerprint = job.gatherer.gather(unit, runs)
        left.append(fingerprint)
        data, begin = buffer.reshape(-1).view(np.uint8).data, _begin(job.work.target, unit)
        write_at(descriptor, data, begin)
        if len(data) >= EARLY_BYTES:
            start_writing(descriptor, begin, len(data))
    return left, runs.found


def _sync(descriptors: Sequence[int]) -> None:
    """Bring files to disk. Asked at once, a file system does so for several at a time."""
    at_once(os.fdatasync, descriptors)


def _read_rows(job: CopyJob, task: Task, descriptor: int, left: Sequence[int]) -> dict[int, int]:
    """Return the fingerprints of the bytes written for each row. Raises as ``run_tasks``."""
    target = job.work.target
    rows: dict[int, int] = {}
    for unit, before in zip(task.units, left, strict=True):
        after = _read_back(target, unit, descriptor, job.read_back)
        if before != after:
            tensor, box = target.collection.box(unit.row)
            path = job.destination / target.files[task.file].path
            raise ProofError(
                f"{box_text(wanted_box(box, unit))} of {tensor.name!r} has fingerprint "
                f"{after:016x} in {path}, and {before:016x} in the source. The disk or the memory "
                "is not sound: check them and run again."
            )
        rows[unit.row] = combine((rows.get(unit.row, 0), after))
    _let_go(descriptor, *_range(target, task))
    return rows


def _let_go(descriptor: int, begin: int, size: int) -> None:
    """Give the memory of proven bytes back, if the system does that: it serves the next ones.

    Fresh pages take a virtual machine several times as long as the copy into them.
    """
    with suppress(OSError):
        os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)


def wanted_box(box: Box, unit: Unit) -> Box:
    offset = tuple(a + b for a, b in zip(box.offset, unit.block.offset, strict=True))
    return Box(offset, unit.block.shape)


def _begin(target: PlacedTensors, unit: Unit) -> int:
    """Return a unit's offset in its file. Rows of a target are contiguous."""
    tensor, box = target.collection.box(unit.row)
    steps = row_major(box.shape)
    at = sum(low * step for low, step in zip(unit.block.offset, steps, strict=True))
    return int(target.begin[unit.row]) + at * np.dtype(bits_dtype(tensor.dtype)).itemsize


def _range(target: PlacedTensors, task: Task) -> tuple[int, int]:
    """Return begin and size of a task's bytes in its file, with the headers among them."""
    first, last = task.units[0], task.units[-1]
    begin = _begin(target, first)
    return begin, _begin(target, last) + last.size_bytes - begin


def _read_back(target: PlacedTensors, unit: Unit, descriptor: int, scratch: Scratch) -> int:
    tensor, box = target.collection.box(unit.row)
    values = scratch.array(unit, tensor)
    read_at(descriptor, values.reshape(-1).view(np.uint8).data, _begin(target, unit))
    return piece_fingerprint(values, wanted_box(box, unit), tensor.shape)
