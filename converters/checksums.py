"""The CRC-32 that torch saves with each storage, compared with the bytes.

Readers look at metadata alone; a damaged storage is found here. ``check_checksums`` reads all
bytes. A conversion takes checksums of its reads, run by run, while the bytes are in a core's cache:
``check_records`` combines the runs of a storage and reads the rest, such as padding. A checksum of
0 means none: torch writes it under ``set_crc32_options(False)``, and so does Scalai.

A CRC-32 is the remainder of the bytes as a polynomial over GF(2). Appending ``n`` bytes multiplies
it by x^(8n), modulo CRC-32's polynomial; a polynomial is an integer here, with x^0 in its highest
bit.

Source: caffe2/serialize/inline_container.cc of torch 2.13; in files of ``torch_dist`` one archive
lies behind the other (torch/distributed/checkpoint/filesystem.py). zlib 1.2.13 (M. Adler), crc32.c:
``crc32_combine``, ``x2nmodp`` and ``multmodp``, which Python's zlib does not offer.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import Checkpoint, PlacedTensors
from scalai.converters.forked import map_forked
from scalai.converters.work import Work
from scalai.converters.zip_members import StorageMember, storages
from scalai.core.errors import ProofError
from scalai.core.tensors.collection import MAX_NDIM, Columns
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, row_major
from scalai.store.files import map_file

BLOCK_BYTES = 256 << 10
MEMBERS = 64
"""Members of a worker's batch."""


@dataclass(frozen=True, slots=True)
class FileStorage:
    """A storage in a file."""

    file: str
    name: str
    begin: int
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Checked:
    """Checksums of the bytes read.

    Attributes:
        records: Storages equal to the CRC-32 saved with them.
        records_without: Storages saved without one.
        files_without: Files of formats without checksums.
        is_proven: All tensors have the fingerprints recorded by the layout, or by a conversion
            beside it.
    """

    records: int
    records_without: int
    files_without: int
    is_proven: bool

    @property
    def lacking(self) -> str:
        """Missing records, in words; empty if there are none."""
        if self.is_proven:
            return ""
        lacking = []
        if self.records_without:
            lacking.append(f"{self.records_without} records were saved without a CRC-32")
        if self.files_without:
            lacking.append(f"{self.files_without} files are of a format without checksums")
        return f"{' and '.join(lacking)}: damage in them is not seen" if lacking else ""

    def __str__(self) -> str:
        found_notes = []
        if self.records:
            found_notes.append(f"{self.records} records have the CRC-32 that was saved with them")
        if self.is_proven:
            found_notes.append(
                "all tensors have the fingerprints that were recorded beside the source"
            )
        return "; ".join([*found_notes, *filter(None, [self.lacking])])


def count_checksums(checkpoint: Checkpoint, *, is_proven: bool) -> Checked:
    """Count a checkpoint's storages with and without checksums."""
    with_one = without = bare = 0
    for file in {file.path for file in checkpoint.placed.files if file.content is None}:
        crcs = [member.crc for member in all_storages_in(checkpoint.directory, file)]
        without += crcs.count(0)
        with_one += len(crcs) - crcs.count(0)
        bare += not crcs
    return Checked(with_one, without, bare, is_proven)


def check_checksums(checkpoint: Checkpoint, workers: int) -> int:
    """Compare all storages of a checkpoint's files with their checksums.

    Returns:
        Number of storages with one.

    Raises:
        ProofError: One differs; names file, bytes and tensors.
    """
    files = {file.path for file in checkpoint.placed.files if file.content is None}
    members = [m for file in sorted(files) for m in storages_in(checkpoint.directory, file)]
    member_batches = [members[at : at + MEMBERS] for at in range(0, len(members), MEMBERS)]

    def damaged(batch: list[FileStorage]) -> list[FileStorage]:
        return [member for member in batch if is_damaged(checkpoint.directory, member)]

    found = [m for _, some in map_forked(damaged, member_batches, workers) for m in some]
    duplicates = () if checkpoint.duplicates is None else (checkpoint.duplicates,)
    refuse_damaged(checkpoint.directory, found, checkpoint.placed, *duplicates)
    return len(members)


def refuse_damaged(directory: Path, found: Sequence[FileStorage], *placed: PlacedTensors) -> None:
    """Raise ``ProofError`` for damaged storages; it names the first, with its pieces."""
    if not found:
        return
    first = min(found, key=lambda member: (member.file, member.begin))
    names = sorted({name for some in placed for name in _tensors_in(some, first)})
    more = f" and {len(found) - 1} other storages" if len(found) > 1 else ""
    files = (file for some in placed for file in some.files if file.path == first.file)
    copies = [copy for file in files for copy in file.copies]
    way_out = "copy it again, or use another checkpoint"
    if copies:
        way_out = f"remove it, and its replica {directory / copies[0]} stands in"
    raise ProofError(
        f"{directory / first.file}: bytes {first.begin} to {first.begin + first.size_bytes} "
        f"({first.name}, with {', '.join(names[:5])}){more} are not what their CRC-32 was taken "
        f"of. The file is damaged: {way_out}."
    )


def storages_in(directory: Path, file: str) -> Iterator[FileStorage]:
    """Yield the storages of a file that have a checksum; none for other formats than torch's."""
    return (stored for stored in all_storages_in(directory, file) if stored.crc)


def all_storages_in(directory: Path, file: str) -> Iterator[FileStorage]:
    """Yield the storages of a file; ``crc`` is 0 without a checksum."""
    for member in storages(map_file(directory / file)):
        yield FileStorage(file, member.name, member.begin, member.size_bytes, member.crc)


def is_damaged(directory: Path, member: FileStorage) -> bool:
    crc, left = 0, member.size_bytes
    buffer = memoryview(bytearray(min(BLOCK_BYTES, left)))
    with open(directory / member.file, "rb", buffering=0) as opened:
        opened.seek(member.begin)
        while left:
            count = opened.readinto(buffer[: min(len(buffer), left)])
            if not count:
                break
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return crc != member.crc


def _tensors_in(placed: PlacedTensors, member: FileStorage) -> Iterator[str]:
    for row, (number, begin) in enumerate(
        zip(placed.file.tolist(), placed.begin.tolist(), strict=True)
    ):
        is_inside = member.begin <= begin < member.begin + member.size_bytes
        if is_inside and placed.files[number].path == member.file:
            yield placed.collection.box(row)[0].name


POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def combined(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two runs of bytes, by theirs and the length of the second."""
    return _product(_shift(second_bytes), first) ^ second


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials, the first not 0."""
    product, bit = 0, _ONE
    while True:
        if a & bit:
            product ^= b
            if not a & (bit - 1):
                return product
        bit >>= 1
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1


def _squares() -> tuple[int, ...]:
    """Return x^(2^n) for n below 32; beyond they repeat."""
    found = [_X]
    while len(found) < 32:
        found.append(_product(found[-1], found[-1]))
    return tuple(found)


_SQUARES = _squares()


@lru_cache(maxsize=4096)
def _shift(size_bytes: int) -> int:
    product, power = _ONE, 3
    while size_bytes:
        if size_bytes & 1:
            product = _product(_SQUARES[power & 31], product)
        size_bytes, power = size_bytes >> 1, power + 1
    return product


_FILE_BITS = 44
"""A file has less than 2^44 bytes (16 TiB): its number and a byte in it make one key."""
FILL_BYTES = 64 << 20
"""Most bytes of unread rest in a worker's batch."""
FILL_COUNT = 256

Run = tuple[int, int, int, int]
"""Bytes read: number of the file, begin, size, CRC-32."""


@dataclass(frozen=True, eq=False, slots=True)
class StorageRecords:
    """Storages read by a conversion, as columns [records], by file and begin.

    Attributes:
        file: Number among the source's files.
        begin, size_bytes: Place of the bytes.
        crc: The saved CRC-32; 0: none.
        bare_files: Files with reads outside of storages: of other formats.
    """

    file: Columns
    begin: Columns
    size_bytes: Columns
    crc: Columns
    bare_files: tuple[str, ...]

    @property
    def checked(self) -> int:
        return int(np.count_nonzero(self.crc))

    @property
    def unchecked(self) -> int:
        return len(self.crc) - self.checked


class Runs:
    """Checksums of a task's reads."""

    def __init__(self, counted: npt.NDArray[np.bool_]) -> None:
        """``counted`` [copies]: the copies to take checksums of."""
        self._counted = counted
        self.found: list[Run] = []

    def counts(self, copy: int) -> bool:
        return bool(self._counted[copy])

    def add(self, file: int, begin: int, data: memoryview) -> None:
        """Take the checksum of bytes; contiguous runs become one."""
        if self.found:
            last, start, size, crc = self.found[-1]
            if last == file and start + size == begin:
                self.found[-1] = last, start, size + len(data), zlib.crc32(data, crc)
                return
        self.found.append((file, begin, len(data), zlib.crc32(data)))


def find_records(source: Checkpoint, work: Work) -> StorageRecords:
    """Return the storages that ``work`` reads. Reads directories alone."""
    placed = work.source
    rows = np.unique(work.copies.source_row)
    columns: list[list[int]] = [[], [], [], []]
    is_kept = np.array([file.content is not None for file in placed.files], dtype=np.bool_)
    for number in np.unique(placed.file[rows]).tolist():
        if is_kept[number]:
            continue
        members = _members(source.directory, placed.files[number].path)
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
    return StorageRecords(numbers[touched], begins[touched], sizes[touched], crcs[touched], paths)


def counted(work: Work, records: StorageRecords) -> npt.NDArray[np.bool_]:
    """Return the copies to take checksums of, [copies]: bytes read by several copies count once,
    bytes without a saved checksum never."""
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


def run_of(placed: PlacedTensors, row: int, part: Box) -> tuple[int, int] | None:
    """Return begin and size of the bytes of a source row covered by a part of it.

    These are the part's own bytes, if contiguous. A part cut across (some columns of some rows)
    covers the whole rows if it has their first elements, so that parts side by side make one run.
    None: another part covers them, or the row has gaps.
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


def check_records(
    source: Checkpoint, records: StorageRecords, runs: Iterable[Run], workers: int
) -> None:
    """Compare the storages that were read with their checksums; reads the rest of them.

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
"""A run; its CRC-32 is None before it is read."""


def _tiles(records: StorageRecords, at: int, runs: Sequence[Run]) -> Iterator[_Tile]:
    """Yield runs, in order, and the gaps between them: together a record."""
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
    """Return the checksums of gaps, read now, by file and begin."""
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
    for batch, crcs in map_forked(lambda batch: crcs_of(source, batch), batches, team):
        found.update({gap[:2]: crc for gap, crc in zip(batch, crcs, strict=True)})
    return found


def crcs_of(source: Checkpoint, gaps: Sequence[_Tile]) -> list[int]:
    found: list[int] = []
    last, data = -1, memoryview(b"")
    for file, begin, size, _ in gaps:
        if file != last:
            last, data = file, map_file(source.directory / source.placed.files[file].path)
        found.append(zlib.crc32(data[begin : begin + size]))
    return found


def _stored(source: Checkpoint, records: StorageRecords, at: int) -> FileStorage:
    path, begin = source.placed.files[int(records.file[at])].path, int(records.begin[at])
    name = next(m.name for m in _members(source.directory, path) if m.begin == begin)
    return FileStorage(path, name, begin, int(records.size_bytes[at]), int(records.crc[at]))


def _members(directory: Path, path: str) -> Iterator[StorageMember]:
    return storages(map_file(directory / path))
