"""Arrays that lie in a file as one row-major or column-major range of bytes: .npy, safetensors."""

import io
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.errors import RefusedError
from scalai.core.tensors.dtypes import NUMPY_DTYPES
from scalai.core.tensors.region import Box
from scalai.core.tensors.slabs import runs
from scalai.slabs.byte_ranges import ByteRanges, read_range
from scalai.store.files import LENGTH_BYTES
from scalai.store.safetensors_header import HeaderEntry, entries_of, header_bytes

NPY_MAGIC = b"\x93NUMPY"
MAX_NPY_HEADER_BYTES = 1 << 16
_NUMPY_DTYPES = {**NUMPY_DTYPES, "C64": np.complex64}
"""By their names in safetensors; complex numbers are samples and no training's state."""
LISTED = 8
"""Names in an error."""


@dataclass(frozen=True, slots=True)
class PlainArray:
    """An array of an open file, of which a slab is read in runs of contiguous elements.

    Attributes:
        begin: Byte of the file at which its first element lies.
        is_column_major: Its first axis varies fastest, as in Fortran.
    """

    source: ByteRanges
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    is_column_major: bool = False

    def read(self, index: tuple[slice, ...]) -> npt.NDArray[Any]:
        """Read a slab that lies inside; exactly its bytes."""
        offset = tuple(axis.start for axis in index)
        extent = tuple(axis.stop - axis.start for axis in index)
        if not self.is_column_major:
            return self._read(Box(offset, extent), self.shape)
        return self._read(Box(offset[::-1], extent[::-1]), self.shape[::-1]).T

    def _read(self, box: Box, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        values = np.empty(box.shape, self.dtype)
        if values.size:
            starts, length = runs(shape, box)
            item = self.dtype.itemsize
            into = memoryview(values.reshape(-1).view(np.uint8).data)
            self.source.fill((starts * item + self.begin).tolist(), length * item, into)
        return values

    def close(self) -> None:
        """The file is closed by who has opened it."""


def npy_array(source: ByteRanges, key: str | None) -> PlainArray:
    """Return the array of a .npy file.

    Raises:
        RefusedError: A key is given, the file is damaged or truncated, or holds objects.

    Source:
        ``numpy.lib.format``, "Format Version 1.0" to 3.0.
    """
    if key is not None:
        raise RefusedError(f"{source.name} holds one array, without a name: {key!r} is none of it.")
    try:
        version = tuple(read_range(source, len(NPY_MAGIC), 2))
        width = 2 if version == (1, 0) else 4
        at = len(NPY_MAGIC) + 2
        length = int.from_bytes(read_range(source, at, width), "little")
        if length > min(MAX_NPY_HEADER_BYTES, source.size):
            raise ValueError(f"a header of {length} bytes in a file of {source.size}")
        text = read_range(source, at, width + length)
        # Version 3 is version 2 in UTF-8, and only names of fields, which are refused, need that.
        read = (
            np.lib.format.read_array_header_1_0
            if width == 2
            else np.lib.format.read_array_header_2_0
        )
        shape, is_column_major, dtype = read(io.BytesIO(text))
    except (ValueError, SyntaxError, TokenError) as error:
        if isinstance(error, RefusedError):
            raise
        raise RefusedError(f"{source.name} is damaged ({error}). Copy it again.") from error
    array = PlainArray(source, dtype, shape, at + width + length, is_column_major)
    needed = array.begin + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if not dtype.hasobject and needed > source.size:
        raise RefusedError(
            f"{source.name} is truncated: {source.size} bytes, {needed} by its header. Copy it "
            "again."
        )
    return array


def safetensors_array(source: ByteRanges, key: str | None) -> PlainArray:
    """Return a tensor of a safetensors file.

    Raises:
        RefusedError: There is no such tensor, numpy has no such dtype, or the file is damaged or
            truncated.
    """
    try:
        length = header_bytes(read_range(source, 0, LENGTH_BYTES), source.size)
        text = read_range(source, LENGTH_BYTES, length)
        entries = {entry.name: entry for entry in entries_of(text, source.size)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, RefusedError):
            raise
        raise RefusedError(
            f"{source.name} is damaged or truncated ({error}). Copy it again."
        ) from error
    entry = entries.get(key or "")
    if entry is None:
        names = ", ".join(map(repr, list(entries)[:LISTED])) or "none"
        raise RefusedError(
            f"{source.name} has no tensor {key!r}; it has {len(entries)}, as {names}."
        )
    return PlainArray(source, _dtype(source.name, entry), entry.shape, entry.begin)


def _dtype(name: str, entry: HeaderEntry) -> np.dtype[Any]:
    if entry.dtype not in _NUMPY_DTYPES:
        raise RefusedError(
            f"{entry.name!r} of {name} is of dtype {entry.dtype}, which numpy does not have. Keep "
            "samples as F16 or F32, or their bits as U8 or U16."
        )
    dtype: np.dtype[Any] = np.dtype(_NUMPY_DTYPES[entry.dtype])
    return dtype.newbyteorder("<")
