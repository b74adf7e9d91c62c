"""Megatron's ``.idx``: the places of the sequences of tokens in its ``.bin``.

Source: _IndexWriter and _IndexReader, megatron/core/datasets/indexed_dataset.py (0.16): a magic of
9 bytes, version (u64), code of the dtype (u8), counts of sequences and of document boundaries (u64
each); then the sequences' lengths (i32), their first bytes (i64), and the documents' boundaries
(i64); modes (i8) of multimodal data sets come last and are not read.
"""

import errno
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.vfs.sample_sources import SourceFile

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32,
    8: np.uint16,
}  # fmt: skip
"""By their codes in the format."""
_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False, slots=True)
class TokenIndex:
    """Dtype of the tokens; ``lengths`` [sequences] in tokens, ``pointers`` [sequences] in bytes."""

    dtype: "np.dtype[Any]"
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]


def read_index(source: SourceFile) -> TokenIndex:
    """Read an ``.idx``. Raises ``OSError``: it is none, or cut."""
    dtype, count, documents = _read_header(source)
    needed = _HEADER.size + count * 12 + documents * 8
    if source.size_bytes < needed:
        raise OSError(
            errno.EIO,
            f"the .idx says that it has {count} sequences, for which it needs {needed} bytes, and "
            f"has {source.size_bytes}: it was cut.",
        )
    lengths = np.frombuffer(source.read(_HEADER.size, count * 4), "<i4")
    pointers = np.frombuffer(source.read(_HEADER.size + count * 4, count * 8), "<i8")
    return TokenIndex(dtype, lengths, pointers)


def read_dtype(source: SourceFile) -> "np.dtype[Any]":
    """Read the type of a token from an ``.idx``. Raises ``OSError``: it is none."""
    return _read_header(source)[0]


def _read_header(source: SourceFile) -> "tuple[np.dtype[Any], int, int]":
    head = source.read(0, _HEADER.size)
    if len(head) == _HEADER.size:
        magic, version, code, count, documents = _HEADER.unpack(head)
        if magic == MAGIC and version == 1 and code in DTYPES:
            return np.dtype(DTYPES[code]), count, documents
    raise OSError(errno.EIO, "the .idx does not begin as one of Megatron's does")


Column = Callable[[int, int], npt.NDArray[Any]]
"""Entries ``[low, high)`` of a column."""


@dataclass(frozen=True, slots=True)
class IndexContent:
    """An ``.idx`` computed at each read.

    Attributes:
        header: Its first bytes.
        columns: Lengths, pointers and documents: bytes of an entry, number of entries, entries.
    """

    header: bytes
    columns: tuple[tuple[int, int, Column], ...]

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(item * count for item, count, _ in self.columns)

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size_bytes)
        out = self.header[offset : max(end, 0)]
        begin = len(self.header)
        for item, count, column in self.columns:
            low, high = max(offset - begin, 0), min(end - begin, item * count)
            if low < high:
                first, last = low // item, -(-high // item)
                data = column(first, last).tobytes()
                out += data[low - first * item : high - first * item]
            begin += item * count
        return out

    def close(self) -> None:
        pass


def index_content(
    dtype: "np.dtype[Any]", count: int, lengths: Column, pointers: Column
) -> IndexContent:
    """The ``.idx`` of ``count`` sequences, each of them a document.

    Args:
        lengths: Lengths in tokens.
        pointers: First bytes.
    """
    header = _HEADER.pack(MAGIC, 1, _CODES[dtype], count, count + 1)
    return IndexContent(
        header,
        (
            (4, count, lambda low, high: lengths(low, high).astype("<i4")),
            (8, count, lambda low, high: pointers(low, high).astype("<i8")),
            (8, count + 1, lambda low, high: np.arange(low, high, dtype="<i8")),
        ),
    )
