"""Fills in the CRC-32 of every member of torch's archives, as a save by torch has them.

What our writer lays out has none (0), so a conversion of it would not be slowed by comparing them.
"""

import mmap
import struct
import zlib
from pathlib import Path

_END = struct.Struct("<4s6xHIIH")
_END_64 = struct.Struct("<4s28xQQQ")
_ENTRY = struct.Struct("<4s24xHHH8xI")
_FULL = 0xFFFFFFFF
_LOCATOR_BYTES = 20


def fill_in(folder: Path) -> None:
    """Fill in the checksums of all files of a ``torch_dist`` checkpoint of ours."""
    for path in sorted(folder.rglob("*.distcp")):
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            end = len(data)
            while end:
                end = _fill_in_archive(data, end)


def _fill_in_archive(data: mmap.mmap, end: int) -> int:
    """Fill in the archive that ends at a byte; return where it begins."""
    at = end - _END.size
    mark, count, size, offset, _ = _END.unpack_from(data, at)
    assert mark == b"PK\5\6", f"no archive ends at byte {end}"
    wide = at - _LOCATOR_BYTES - _END_64.size
    if wide >= 0 and data[wide : wide + 4] == b"PK\6\6":
        _, count, size, offset = _END_64.unpack_from(data, wide)
        at = wide
    entry = at - size
    begin = entry - offset
    for _ in range(count):
        mark, name_bytes, extra_bytes, note_bytes, header = _ENTRY.unpack_from(data, entry)
        assert mark == b"PK\1\2" and header < _FULL, "an archive of more than 4 GiB"
        local = begin + header
        size, more, rest = struct.unpack_from("<IHH", data, local + 22)
        content = local + 30 + more + rest
        crc = zlib.crc32(memoryview(data)[content : content + size])
        struct.pack_into("<I", data, local + 14, crc)
        struct.pack_into("<I", data, entry + 16, crc)
        entry += _ENTRY.size + name_bytes + extra_bytes + note_bytes
    return int(begin)
