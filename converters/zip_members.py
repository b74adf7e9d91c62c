"""The storages of torch's archives in a file, of which several may lie behind each other.

Reads directories alone, and the headers of storages; ``zipfile`` takes three times as long, and a
``torch_dist`` checkpoint has an archive a tensor.

Source: APPNOTE.TXT 6.3.10 (PKWARE), sections 4.3.7, 4.3.12 and 4.3.14 to 4.3.16; differs in: no
comment behind a directory, no encryption, no spanned archives, as torch writes none.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = struct.Struct("<4s22xHH")
_ENTRY = struct.Struct("<4s12xIIIHHH8xI")
_END = struct.Struct("<4s6xHIIH")
_END_64 = struct.Struct("<4s28xQQQ")
_LOCATOR_BYTES = 20
_FULL = 0xFFFFFFFF
_WIDE = 1
"""The extra field with what does not fit into 32 bits."""


@dataclass(frozen=True, slots=True)
class Member:
    """A storage: its name behind the archive's own, where its bytes lie, and its CRC-32; 0: none
    was taken."""

    name: str
    begin: int
    size_bytes: int
    crc: int


def storages(data: memoryview) -> Iterator[Member]:
    """Yield the storages of all archives in a file, the last archive first.

    Ends where no archive is: at a file of another format, or at a damaged directory, which whoever
    reads a tensor of it refuses.
    """
    end = len(data)
    while end:
        try:
            begin, members = _archive(data, end)
        except (struct.error, ValueError):
            return
        yield from members
        end = begin


def _archive(data: memoryview, end: int) -> tuple[int, list[Member]]:
    """Return where an archive that ends at a byte begins, and its storages. Raises ``ValueError``
    or ``struct.error`` where there is none."""
    if end < _END.size:
        raise ValueError("too short")
    at = end - _END.size
    mark, count, size, offset, comment = _END.unpack_from(data, at)
    _expect(mark == b"PK\5\6" and not comment)
    wide = at - _LOCATOR_BYTES - _END_64.size
    if wide >= 0 and bytes(data[wide + _END_64.size : wide + _END_64.size + 4]) == b"PK\6\7":
        mark, count, size, offset = _END_64.unpack_from(data, wide)
        _expect(mark == b"PK\6\6")
        at = wide
    place = at - size
    begin = place - offset  # where archives lie before this one, its offsets do not count them
    _expect(0 <= begin <= place)
    members = []
    for _ in range(count):
        _expect(place + _ENTRY.size <= at)
        mark, crc, packed, size, name_bytes, extra_bytes, note_bytes, header = _ENTRY.unpack_from(
            data, place
        )
        _expect(mark == b"PK\1\2")
        place += _ENTRY.size
        name = bytes(data[place : place + name_bytes]).decode(errors="replace").partition("/")[2]
        place += name_bytes
        if _FULL in (packed, size, header):
            size, header = _wide(bytes(data[place : place + extra_bytes]), packed, size, header)
        place += extra_bytes + note_bytes
        if name.startswith("data/") and size:
            members.append(Member(name, _content(data, begin + header, size, end), size, crc))
    _expect(place == at)
    return begin, members


def _content(data: memoryview, at: int, size: int, end: int) -> int:
    """Return where the bytes behind a local header begin."""
    _expect(at + _HEADER.size <= end)
    mark, name_bytes, extra_bytes = _HEADER.unpack_from(data, at)
    begin = at + _HEADER.size + int(name_bytes) + int(extra_bytes)
    _expect(mark == b"PK\3\4" and begin + size <= end)
    return begin


def _wide(extra: bytes, packed: int, size: int, header: int) -> tuple[int, int]:
    """Return size and header's place of an entry by its extra fields."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == _WIDE:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, 4))
            found = [
                next(values, _FULL) if value == _FULL else value for value in (size, packed, header)
            ]
            return found[0], found[2]
        extra = extra[4 + length :]
    raise ValueError("no size")


def _expect(is_so: bool) -> None:
    if not is_so:
        raise ValueError("no archive")
