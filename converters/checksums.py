"""The checksums that torch keeps of storages: a CRC-32 of each member of a file.

Readers look at metadata alone, so a damaged storage is found by its second copy, by its masters or
not at all. Here all bytes are read. A checksum of 0 is none: torch writes it under
``set_crc32_options(False)``, and so do we.

Source: caffe2/serialize/inline_container.cc of torch 2.13; in files of ``torch_dist`` one archive
lies behind the other (torch/distributed/checkpoint/filesystem.py).
"""

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalai.converters.checkpoint import Checkpoint, Placed
from scalai.converters.forked import map_forked
from scalai.converters.torch_archive import UNREADABLE, Window, member_begin
from scalai.core.errors import ProofError

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
    twins = () if checkpoint.twins is None else (checkpoint.twins,)
    refuse_damaged(checkpoint.directory, found, checkpoint.placed, *twins)
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
    with open(directory / file, "rb") as opened:
        end = opened.seek(0, 2)
        while end:
            window = Window(opened, 0, end)
            try:
                with zipfile.ZipFile(window) as archive:
                    members = archive.infolist()
                    begins = {m.filename: member_begin(window, m) for m in members}
            except UNREADABLE:
                return  # of another format, or what was refused where a tensor of it was read
            for member in members:
                name = member.filename.partition("/")[2]
                if member.CRC and name.startswith("data/"):
                    at = begins[member.filename]
                    yield Stored(file, name, at, member.file_size, member.CRC)
            begin = min((member.header_offset for member in members), default=0)
            end = begin if begin < end else 0


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
