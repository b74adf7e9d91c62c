"""Bit rot: bytes of a tensor in a checkpoint's files change, and nothing else does."""

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalai.converters.checkpoint import Checkpoint
from scalai.converters.zip_members import storages
from scalai.core.tensors.region import row_major

PAGE = 4096


@dataclass(frozen=True)
class Held:
    """A piece of a tensor that lies in a file without gaps."""

    tensor: str
    path: Path
    begin: int
    size_bytes: int


def held(checkpoint: Checkpoint, kind: str, least_bytes: int = 64) -> Held:
    """Return the largest piece of a kind in a checkpoint's files."""
    placed, found = checkpoint.placed, []
    for row in range(len(placed.collection)):
        piece, file = placed.piece(row), placed.files[placed.file[row]]
        size = piece.box.numel * piece.item_bytes
        is_one = file.content is None and piece.stride == row_major(piece.box.shape)
        if piece.tensor.name.startswith(f"{kind}/") and is_one and size >= least_bytes:
            path = checkpoint.directory / piece.file
            found.append(Held(piece.tensor.name, path, piece.begin, size))
    return max(found, key=lambda piece: piece.size_bytes)


def flip(data: bytes) -> bytes:
    """Change a bit in the middle."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def zero_a_page(data: bytes) -> bytes:
    size = min(PAGE, len(data))
    return bytes(size) + data[size:]


def swap_pages(data: bytes) -> bytes:
    size = min(PAGE, len(data) // 2)
    return data[size : 2 * size] + data[:size] + data[2 * size :]


def fill_with_nan(data: bytes) -> bytes:
    count = len(data) // 4
    return np.full(count, np.nan, np.float32).tobytes() + data[4 * count :]


def make_stale(data: bytes) -> bytes:
    """Return fp32 numbers as they were some steps before: all are a little less."""
    return (np.frombuffer(data, np.float32) * np.float32(0.9)).tobytes()


ROTS: Mapping[str, Callable[[bytes], bytes]] = {
    "a-bit": flip, "zeros": zero_a_page, "swapped": swap_pages,
    "nan": fill_with_nan, "stale": make_stale,
}  # fmt: skip


def rot(piece: Held, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a piece where they lie."""
    with open(piece.path, "r+b") as file:
        file.seek(piece.begin)
        data = file.read(piece.size_bytes)
        changed = change(data)
        assert len(changed) == len(data) and changed != data
        file.seek(piece.begin)
        file.write(changed)


def stamp_checksums(directory: Path, *, are_taken: bool = True) -> int:
    """Write the CRC-32 of every storage into its archive's directory, as torch has it there; or
    none, as torch does under ``set_crc32_options(False)``. Returns of how many."""
    count = 0
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        data = bytearray(path.read_bytes())
        members = sorted(storages(memoryview(bytes(data))), key=lambda member: member.begin)
        for member, entry in zip(members, _entries(bytes(data)), strict=bool(members)):
            crc = zlib.crc32(data[member.begin : member.begin + member.size_bytes])
            data[entry + 16 : entry + 20] = (crc if are_taken else 0).to_bytes(4, "little")
        path.write_bytes(data)
        count += len(members)
    return count


def _entries(data: bytes) -> Iterator[int]:
    """Yield where the entries of storages that hold something begin in archives' directories."""
    at = data.find(b"PK\1\2")
    while at >= 0:
        size, length = struct.unpack_from("<IH", data, at + 24)
        name = data[at + 46 : at + 46 + length]
        if size and name.partition(b"/")[2].startswith(b"data/"):
            yield at
        at = data.find(b"PK\1\2", at + 4)


def rename_archive(path: Path, name: str, device: str = "cpu") -> None:
    """Make one of torch's files one that was saved under another name, of tensors of a device."""
    with zipfile.ZipFile(path) as archive:
        members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    old, new = (f"X{chr(len(of))}\0\0\0{of}".encode() for of in ("cpu", device))
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            _, _, inner = member.partition("/")
            content = data.replace(old, new) if inner == "data.pkl" else data
            archive.writestr(f"{name}/{inner}", content)
