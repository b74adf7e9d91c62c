"""Is what a conversion reads what was saved? Each storage that it reads must have its CRC-32.

Workers take the checksum of the bytes that they read, run by run, while these are in a core's
cache. At the end the runs of a storage are combined to that of the whole; what of it nobody wanted,
as padding, is read then. So a storage is checked whole also where it is read in part.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import Checkpoint, Placed
from scalai.converters.checksums import Stored, refuse_damaged
from scalai.converters.crc32 import combined
from scalai.converters.forked import map_forked
from scalai.converters.work import Work
from scalai.converters.zip_members import Member, storages
from scalai.core.tensors.collection import MAX_NDIM, Columns
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, row_major
from scalai.store.files import map_file

_FILE_BITS = 44
"""A file has less than 2^44 bytes (16 TiB): its number and a byte in it make one key."""
FILL_BYTES = 64 << 20
"""Of what nobody wanted, the most that is read at once by one worker."""
FILL_COUNT = 256

Run = tuple[int, int, int, int]
"""Bytes that were read: number of the file, begin, size, CRC-32."""


@dataclass(frozen=True, eq=False, slots=True)
class Records:
    """The storages that a conversion reads, as columns [records], by file and begin.

    Attributes:
        file: Number among the source's files.
        begin, size_bytes: Where the bytes lie.
        crc: The CRC-32 that was saved; 0: none.
        bare_files: Files of which it reads what lies in no storage: of other formats.
    """

    file: Columns
    begin: Columns
    size_bytes: Columns
    crc: Columns
    bare_files: tuple[str, ...]

    @property
    def checked(self) -> int:
        """How many have a checksum."""
        return int(np.count_nonzero(self.crc))

    @property
    def unchecked(self) -> int:
        """How many have none."""
        return len(self.crc) - self.checked


class Runs:
    """Checksums of what a task reads."""

    def __init__(self, counted: npt.NDArray[np.bool_]) -> None:
        """``counted`` [copies] says of which copies they are taken."""
        self._counted = counted
        self.found: list[Run] = []

    def counts(self, copy: int) -> bool:
        """Tell whether a checksum is wanted of what a copy reads."""
        return bool(self._counted[copy])

    def add(self, file: int, begin: int, data: memoryview) -> None:
        """Take the checksum of bytes; of those right behind the last ones together with these."""
        if self.found:
            last, start, size, crc = self.found[-1]
            if last == file and start + size == begin:
                self.found[-1] = last, start, size + len(data), zlib.crc32(data, crc)
                return
        self.found.append((file, begin, len(data), zlib.crc32(data)))


def find_records(source: Checkpoint, work: Work) -> Records:
    """Return the storages of the source that ``work`` reads. Reads directories alone."""
    placed = work.source
    rows = np.unique(work.copies.source_row)
    columns: list[list[int]] = [[], [], [], []]
    is_kept = np.array([file.content is not None for file in placed.files], dtype=np.bool_)
    for number in np.unique(placed.file[rows]).tolist():
        if is_kept[number]:
            continue
        members = _storages(source.directory, placed.files[number].path)
        for begin, size, crc in sorted((m.begin, m.size_bytes, m.crc) for m in members):
            for column, value in zip(columns, (number, begin, size, crc), strict=True):
                column.append(value)
    numbers, begins, sizes, crcs = (np.array(column, dtype=np.int64) for column in columns)
    keys = (numbers << _FILE_BITS) + begins
    wanted = (placed.file[rows].astype(np.int64) << _FILE_BITS) + placed.begin[rows]
    at = np.searchsorted(keys, wanted, side="right") - 1
    is_inside = at >= 0
    is_inside[is_inside] = (wanted < np.append(keys + sizes, 0)[at])[is_inside]
    bare = np.unique(placed.file[rows[~is_inside & ~is_kept[placed.file[rows]]]])
    touched = np.unique(at[is_inside])
    paths = tuple(placed.files[number].path for number in bare.tolist())
    return Records(numbers[touched], begins[touched], sizes[touched], crcs[touched], paths)


def counted(work: Work, records: Records) -> npt.NDArray[np.bool_]:
    """Return of which copies workers take checksums, [copies]: what several copies read is taken
    once, and nothing of what has none to compare with."""
    placed, copies = work.source, work.copies
    row = copies.source_row
    has_crc = np.zeros(len(placed.files), dtype=np.bool_)
    has_crc[records.file[records.crc != 0]] = True
    item = np.array([ITEM_BYTES[t.dtype] for t in placed.collection.tensors], dtype=np.int64)
    item = np.where(placed.rounded(), ITEM_BYTES["F32"], item[placed.collection.tensor])
    inside = ((copies.offset - placed.collection.offset[row]) * placed.stride[row]).sum(axis=1)
    key = (placed.file[row].astype(np.int64) << _FILE_BITS) + placed.begin[row] + inside * item[row]
    order = np.lexsort((-copies.shape.prod(axis=1), key))
    is_first = np.ones(len(key), dtype=np.bool_)
    is_first[order[1:]] = key[order[1:]] != key[order[:-1]]
    return np.asarray(is_first & has_crc[placed.file[row]], dtype=np.bool_)


def run_of(placed: Placed, row: int, part: Box) -> tuple[int, int] | None:
    """Return begin and size of the bytes of a source row for which a part of it vouches.

    These are its own, where they lie behind each other. Of a part that is cut across (some
    columns of some rows) they are the whole rows, for whichever part has their first elements, so
    that parts side by side make one run. None: another part vouches for them, or the row has gaps.
    """
    _, box = placed.collection.box(row)
    item = placed.item_bytes(row)
    stride = placed.stride[row, MAX_NDIM - len(box.shape) :].tolist()
    dense = row_major(box.shape)
    if any(size > 1 and a != b for size, a, b in zip(box.shape, stride, dense, strict=True)):
        return None
    inside = [low - at for low, at in zip(part.offset, box.offset, strict=True)]
    axis = next((axis for axis, size in enumerate(part.shape) if size > 1), len(part.shape) - 1)
    if any(inside[axis + 1 :]):
        return None
    begin = int(placed.begin[row]) + item * sum(a * b for a, b in zip(inside, dense, strict=True))
    return begin, item * (part.shape[axis] * dense[axis] if part.shape else 1)


def check_records(source: Checkpoint, records: Records, runs: Iterable[Run], workers: int) -> None:
    """Compare the storages that were read with their checksums; reads what of them nobody has.

    Raises:
        ProofError: One differs; names file, bytes, storage and tensors.
    """
    by_record: dict[int, list[Run]] = {at: [] for at in np.flatnonzero(records.crc).tolist()}
    keys = (records.file << _FILE_BITS) + records.begin
    for run in sorted(runs):
        at = int(np.searchsorted(keys, (run[0] << _FILE_BITS) + run[1], side="right")) - 1
        if at in by_record:
            by_record[at].append(run)
    tiles = {at: list(_tiles(records, at, found)) for at, found in by_record.items()}
    del by_record
    gaps = [tile for found in tiles.values() for tile in found if tile[3] is None]
    read = _fill(source, gaps, workers)
    damaged = []
    for at, found in tiles.items():
        crc = 0
        for file, begin, size, known in found:
            crc = combined(crc, read[file, begin] if known is None else known, size)
        if crc != records.crc[at]:
            damaged.append(_stored(source, records, at))
    refuse_damaged(source.directory, damaged, source.placed)


_Tile = tuple[int, int, int, int | None]
"""A run; its CRC-32 is None where it is still to be read."""


def _tiles(records: Records, at: int, runs: Sequence[Run]) -> Iterator[_Tile]:
    """Yield runs, in their order, that make up a record, with what lies between them."""
    file, begin = int(records.file[at]), int(records.begin[at])
    end = begin + int(records.size_bytes[at])
    for run in runs:
        if begin <= run[1] and run[1] + run[2] <= end:
            yield from _gap(file, begin, run[1])
            yield run
            begin = run[1] + run[2]
    yield from _gap(file, begin, end)


def _gap(file: int, begin: int, end: int) -> Iterator[_Tile]:
    for low in range(begin, end, FILL_BYTES):
        yield file, low, min(FILL_BYTES, end - low), None


def _fill(source: Checkpoint, gaps: Sequence[_Tile], workers: int) -> dict[tuple[int, int], int]:
    """Return the checksums of bytes that are read now, by file and begin."""
    batches: list[list[_Tile]] = []
    filled = FILL_BYTES
    for gap in gaps:
        if filled + gap[2] > FILL_BYTES or len(batches[-1]) == FILL_COUNT:
            batches.append([])
            filled = 0
        batches[-1].append(gap)
        filled += gap[2]
    found = {}
    team = workers if len(batches) > 1 else 0
    for batch, crcs in map_forked(lambda batch: _crcs(source, batch), batches, team):
        found.update({gap[:2]: crc for gap, crc in zip(batch, crcs, strict=True)})
    return found


def _crcs(source: Checkpoint, gaps: Sequence[_Tile]) -> list[int]:
    found: list[int] = []
    last, data = -1, memoryview(b"")
    for file, begin, size, _ in gaps:
        if file != last:
            last, data = file, map_file(source.directory / source.placed.files[file].path)
        found.append(zlib.crc32(data[begin : begin + size]))
    return found


def _stored(source: Checkpoint, records: Records, at: int) -> Stored:
    """Return a record with its name."""
    path, begin = source.placed.files[int(records.file[at])].path, int(records.begin[at])
    name = next(m.name for m in _storages(source.directory, path) if m.begin == begin)
    return Stored(path, name, begin, int(records.size_bytes[at]), int(records.crc[at]))


def _storages(directory: Path, path: str) -> Iterator[Member]:
    return storages(map_file(directory / path))
