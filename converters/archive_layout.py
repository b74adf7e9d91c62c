"""Torch's file format, laid out without torch: which bytes of a file are known, and where those of
its tensors go.

Source: caffe2/serialize/inline_container.cc of torch 2.13. Differs in: checksums of storages are
written as 0, as torch does under ``set_crc32_options(False)``; its reader does not look at them.
"""

import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from scalai.converters import pickles
from scalai.converters.pickles import foreign
from scalai.converters.torch_archive import NewTensor
from scalai.core.tensors.dtypes import STORAGES
from scalai.core.tensors.region import row_major

ALIGNMENT = 64


@dataclass(frozen=True, eq=False, slots=True)
class Archive:
    """A file that is laid out: what is known of its bytes, and where the rest goes.

    ``fixed`` are (offset, bytes) in order, ``begin`` [tensors] the offset of each tensor without
    content, in the order of the pickle.
    """

    fixed: tuple[tuple[int, bytes], ...]
    tensors: tuple[NewTensor, ...]
    begin: tuple[int, ...]
    size_bytes: int


def lay_out_archive(value: Any, name: str = "archive") -> Archive:
    """Lay out a file that torch reads as ``value``, in which a ``NewTensor`` is a tensor."""
    tensors: list[NewTensor] = []

    def reduce(obj: Any) -> Any:
        if not isinstance(obj, NewTensor):
            return None
        tensors.append(obj)
        key = _Key(len(tensors) - 1, obj.dtype, prod(obj.shape))
        shape = tuple(obj.shape), row_major(obj.shape)
        return foreign("torch._utils", "_rebuild_tensor_v2"), (
            key, 0, *shape, False, OrderedDict(),
        )  # fmt: skip

    def persistent(obj: Any) -> Any:
        if not isinstance(obj, _Key):
            return None
        storage = foreign("torch", STORAGES[obj.dtype])
        return "storage", storage, str(obj.number), "cpu", obj.numel

    data = pickles.dumps(value, reduce=reduce, persistent=persistent)
    writer = _Zip(name)
    writer.add("data.pkl", data)
    writer.add("byteorder", sys.byteorder.encode())
    begin = [writer.reserve(f"data/{n}", tensor) for n, tensor in enumerate(tensors)]
    writer.add("version", b"3\n")
    size_bytes = writer.close()
    open_ = [number for number, tensor in enumerate(tensors) if tensor.content is None]
    return Archive(
        tuple(_joined(writer.fixed)),
        tuple(tensors[number] for number in open_),
        tuple(begin[number] for number in open_),
        size_bytes,
    )


def _joined(fixed: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield bytes that lie behind each other as one: a target may have very many small files."""
    begin, parts, end = 0, [b""], 0
    for at, data in fixed:
        if at != end:
            yield begin, b"".join(parts)
            begin, parts = at, []
        parts.append(data)
        end = at + len(data)
    yield begin, b"".join(parts)


@dataclass(frozen=True, slots=True)
class _Key:
    """A storage that is to be written."""

    number: int
    dtype: str
    numel: int


class _Zip:
    """Lays out a ZIP file with ZIP64 fields where they are needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._at = 0
        self._members: list[tuple[bytes, int, int, int]] = []
        self.fixed: list[tuple[int, bytes]] = []

    def add(self, name: str, data: bytes) -> None:
        """Add a member whose bytes are known."""
        begin = self._begin(name, len(data), zlib.crc32(data))
        self.fixed.append((begin, data))

    def reserve(self, name: str, tensor: NewTensor) -> int:
        """Add a tensor's member; returns where its bytes begin."""
        if tensor.content is not None:
            self.add(name, tensor.content)
            return self._at - len(tensor.content)
        return self._begin(name, tensor.size_bytes, 0)

    def _begin(self, name: str, size: int, crc: int) -> int:
        path = f"{self._name}/{name}".encode()
        # As torch does: padded in an extra field "FB", so that the data are aligned.
        fields = b"" if size < 0xFFFFFFFF else struct.pack("<HHQQ", 1, 16, size, size)
        bare = self._at + 30 + len(path) + len(fields) + 4
        padding = -bare % ALIGNMENT
        extra = fields + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        short = min(size, 0xFFFFFFFF)
        header = struct.pack(
            "<4sHHHHHIIIHH", b"PK\x03\x04", 45 if fields else 20, 0, 0, 0, 0, crc, short, short,
            len(path), len(extra),
        )  # fmt: skip
        self._members.append((path, self._at, size, crc))
        self.fixed.append((self._at, header + path + extra))
        begin = self._at + len(header) + len(path) + len(extra)
        self._at = begin + size
        return begin

    def close(self) -> int:
        """Add the directory at the end; returns the size of the file."""
        directory = b"".join(self._entry(*member) for member in self._members)
        count, at, size = len(self._members), self._at, len(directory)
        end = struct.pack(
            "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at
        ) + struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
        short = struct.pack(
            "<4sHHHHIIH", b"PK\x05\x06", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF),
            min(size, 0xFFFFFFFF), min(at, 0xFFFFFFFF), 0,
        )  # fmt: skip
        is_large = count >= 0xFFFF or at + size >= 0xFFFFFFFF
        tail = directory + (end if is_large else b"") + short
        self.fixed.append((at, tail))
        return at + len(tail)

    def _entry(self, path: bytes, offset: int, size: int, crc: int) -> bytes:
        values = [size, size] * (size >= 0xFFFFFFFF) + [offset] * (offset >= 0xFFFFFFFF)
        extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
        short = min(size, 0xFFFFFFFF)
        version = 45 if values else 20
        return struct.pack(
            "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", version, version, 0, 0, 0, 0, crc, short, short,
            len(path), len(extra), 0, 0, 0, 0, min(offset, 0xFFFFFFFF),
        ) + path + extra  # fmt: skip
