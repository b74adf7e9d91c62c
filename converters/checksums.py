"""The checksums that torch keeps of storages: a CRC-32 of each member of a file.

Readers look at metadata alone, so a damaged storage is found by its second copy, by its masters or
not at all. Here all bytes are read. A checksum of 0 is none: torch writes it under
``set_crc32_options(False)``, and so do we.

Source: caffe2/serialize/inline_container.cc of torch 2.13; in files of ``torch_dist`` one archive
lies behind the other (torch/distributed/checkpoint/filesystem.py).
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalai.converters.checkpoint import Checkpoint, Placed
from scalai.converters.forked import map_forked
from scalai.converters.zip_members import storages
from scalai.core.errors import ProofError
from scalai.store.files import map_file

BLOCK_BYTES = 256 << 10
MEMBERS = 64
"""Members that a worker takes at once."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A storage in a file: its name there, where it lies, and its checksum."""

    file: str
    name: str
    begin: int
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Checked:
    """What a checkpoint's files note of the bytes that were read.

    Attributes:
        records: Storages that have the CRC-32 that was saved with them.
        records_without: Storages that were saved without one.
        files_without: Files of formats that have none.
        is_proven: Whether the fingerprints of all tensors are what the layout, or a conversion
            beside it, notes.
    """

    records: int
    records_without: int
    files_without: int
    is_proven: bool

    @property
    def lacking(self) -> str:
        """What is not recorded, in words; empty where all is."""
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
    """Return which storages of a checkpoint's files have checksums."""
    with_one = without = bare = 0
    for file in {file.path for file in checkpoint.placed.files if file.content is None}:
        crcs = [member.crc for member in all_storages_in(checkpoint.directory, file)]
        without += crcs.count(0)
        with_one += len(crcs) - crcs.count(0)
        bare += not crcs
    return Checked(with_one, without, bare, is_proven)


def check_checksums(checkpoint: Checkpoint, workers: int) -> int:
    """Compare all storages of a checkpoint's files with the checksums beside them.

    Returns:
        How many have one.

    Raises:
        ProofError: One differs; names file, bytes and tensors.
    """
    files = {file.path for file in checkpoint.placed.files if file.content is None}
    members = [m for file in sorted(files) for m in storages_in(checkpoint.directory, file)]
    batches = [members[at : at + MEMBERS] for at in range(0, len(members), MEMBERS)]

    def damaged(batch: list[Stored]) -> list[Stored]:
        return [member for member in batch if is_damaged(checkpoint.directory, member)]

    found = [m for _, some in map_forked(damaged, batches, workers) for m in some]
    duplicates = () if checkpoint.duplicates is None else (checkpoint.duplicates,)
    refuse_damaged(checkpoint.directory, found, checkpoint.placed, *duplicates)
    return len(members)


def refuse_damaged(directory: Path, found: Sequence[Stored], *placed: Placed) -> None:
    """Raise ``ProofError`` if there are damaged storages; it names the first, with the pieces of
    ``placed`` that lie in it."""
    if not found:
        return
    first = min(found, key=lambda member: (member.file, member.begin))
    names = sorted({name for some in placed for name in _tensors_in(some, first)})
    more = f" and {len(found) - 1} other storages" if len(found) > 1 else ""
    raise ProofError(
        f"{directory / first.file}: bytes {first.begin} to {first.begin + first.size_bytes} "
        f"({first.name}, with {', '.join(names[:5])}){more} are not what their CRC-32 was taken "
        "of. The file is damaged: copy it again, or use another checkpoint."
    )


def storages_in(directory: Path, file: str) -> Iterator[Stored]:
    """Yield the storages of a file that have a checksum; none of one that is not torch's."""
    return (stored for stored in all_storages_in(directory, file) if stored.crc)


def all_storages_in(directory: Path, file: str) -> Iterator[Stored]:
    """Yield the storages of a file; those that were saved without a checksum have 0."""
    for member in storages(map_file(directory / file)):
        yield Stored(file, member.name, member.begin, member.size_bytes, member.crc)


def is_damaged(directory: Path, member: Stored) -> bool:
    """Read a storage whole, and compare it with its checksum."""
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


def _tensors_in(placed: Placed, member: Stored) -> Iterator[str]:
    """Yield the tensors of which pieces begin in a storage."""
    for row, (number, begin) in enumerate(
        zip(placed.file.tolist(), placed.begin.tolist(), strict=True)
    ):
        is_inside = member.begin <= begin < member.begin + member.size_bytes
        if is_inside and placed.files[number].path == member.file:
            yield placed.collection.box(row)[0].name
