"""The storages of torch's archives in a file; several archives may lie behind each other.

Reads directories alone, and the headers of storages; ``zipfile`` takes three times as long, and a
``torch_dist`` checkpoint has an archive a tensor.

Source: APPNOTE.TXT 6.3.10 (PKWARE), sections 4.3.7, 4.3.12 and 4.3.14 to 4.3.16; differs in: no
comment behind a directory, no encryption, no spanned archives, as torch writes none.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = struct.Struct("<4s22xHH")
_ENTRY = struct.Struct("<4s12xIIIHHHH6xI")
_END = struct.Struct("<4s6xHIIH")
_END_64 = struct.Struct("<4s28xQQQ")
_LOCATOR = struct.Struct("<4xIQI")
_DISKS, _DISKS_64 = struct.Struct("<HHHH"), struct.Struct("<IIQQ")
"""Disks of a directory's end and begin; numbers of entries on this disk and in all."""
_MARK = b"PK\5\6"
_MAX_TAIL = 64 << 10
"""Most bytes behind the last archive; ``zipfile`` passes over as many."""
_FULL = 0xFFFFFFFF
_WIDE = 1
"""The extra field for numbers beyond 32 bits."""


@dataclass(frozen=True, slots=True)
class StorageMember:
    """A storage: its name behind the archive's own, its bytes' place, and its CRC-32; 0: none was
    taken."""

    name: str
    begin: int
    size_bytes: int
    crc: int


def storages(data: memoryview) -> Iterator[StorageMember]:
    """Yield the storages of all archives in a file, the last archive first.

    Passes over a copy's remains behind the last one. Ends at a file of another format, or at a
    damaged directory; the reader of its tensors refuses that.
    """
    end = _last_end(data)
    while end:
        try:
            begin, members = _directory(data, end)
        except (struct.error, ValueError):
            return
        yield from members
        end = begin


def is_archive(data: memoryview) -> bool:
    """Whether these bytes are one archive, with an entry for each of its members, on one disk:
    torch's reader takes no other."""
    try:
        begin, _ = _directory(data, len(data))
    except (struct.error, ValueError):
        return False
    end = len(data) - _END.size
    disks = [_DISKS.unpack_from(data, end + len(_MARK))]
    wide = end - _LOCATOR.size - _END_64.size
    if _is_wide(data, wide):
        disks.append(_DISKS_64.unpack_from(data, wide + 16))
        if _LOCATOR.unpack_from(data, wide + _END_64.size) != (0, wide, 1):
            return False
    return not begin and all(not a and not b and here == count for a, b, here, count in disks)


def _last_end(data: memoryview) -> int:
    tail = bytes(data[-(_END.size + _MAX_TAIL) :])
    if tail[-_END.size :].startswith(_MARK):
        return len(data)
    at = tail.rfind(_MARK)
    return len(data) - len(tail) + at + _END.size if at >= 0 else len(data)


def _directory(data: memoryview, end: int) -> tuple[int, list[StorageMember]]:
    """Return the begin of an archive that ends at a byte, and its storages. Raises ``ValueError``
    or ``struct.error`` if there is none."""
    if end < _END.size:
        raise ValueError("too short")
    at = end - _END.size
    mark, count, size, offset, comment = _END.unpack_from(data, at)
    _expect(mark == _MARK and not comment)
    wide = at - _LOCATOR.size - _END_64.size
    if _is_wide(data, wide):
        mark, count, size, offset = _END_64.unpack_from(data, wide)
        _expect(mark == b"PK\6\6")
        at = wide
    place = at - size
    begin = place - offset  # offsets do not count archives before this one
    _expect(0 <= begin <= place)
    members = []
    for _ in range(count):
        _expect(place + _ENTRY.size <= at)
        mark, crc, packed, size, name_bytes, extra_bytes, note_bytes, disk, header = (
            _ENTRY.unpack_from(data, place)
        )
        _expect(mark == b"PK\1\2" and packed == size and not disk)
        place += _ENTRY.size
        name = bytes(data[place : place + name_bytes]).decode(errors="replace").partition("/")[2]
        place += name_bytes
        if _FULL in (packed, size, header):
            size, header = _wide(bytes(data[place : place + extra_bytes]), packed, size, header)
        place += extra_bytes + note_bytes
        if name.startswith("data/") and size:
            members.append(
                StorageMember(name, _content(data, begin + header, size, end), size, crc)
            )
    _expect(place == at)
    return begin, members


def _is_wide(data: memoryview, wide: int) -> bool:
    """Whether a directory's 64-bit end lies at a byte: a locator is behind it."""
    locator = wide + _END_64.size
    return wide >= 0 and bytes(data[locator : locator + 4]) == b"PK\6\7"


def _content(data: memoryview, at: int, size: int, end: int) -> int:
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
