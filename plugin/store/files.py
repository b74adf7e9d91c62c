"""Bytes of stored pieces: one safetensors file a writing rank, and views of its content.

A file holds boxes of tensors, each row-major and contiguous, so the safetensors library can read
all of it; an entry is named ``<tensor>[<low>:<high>,...]``.

``prefault`` touches pages before they are needed: the first touch of memory is slow, not the copy.
"""

import ctypes
import errno
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scalai.core.errors import LayoutError
from scalai.core.jsonable import MAX_JSON_BYTES, parse_json
from scalai.core.tensors.collection import MAX_NDIM, Collection, Columns, Tensor
from scalai.core.tensors.dtypes import BITS, ITEM_BYTES, NUMPY_DTYPES, Bits
from scalai.core.tensors.region import Box, box_text

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; Python's mmap does not name them."""

SYNC_FILE_RANGE_WRITE = 2
"""Neither does it name the flags of sync_file_range(2)."""

_STEP_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

CHUNK_BYTES = 4 << 20
"""Bytes copied, sent or checksummed at once: fits a core's cache, amortises a system call."""
HEADER_ALIGNMENT = 64
LENGTH_BYTES = 8
"""First bytes of a safetensors file: the length of the header behind them."""
_ITEM_BYTES = {**ITEM_BYTES, "C64": 8}
"""With a dtype outside of training."""


def advise(buffer: mmap.mmap, low: int, high: int, advice: int) -> bool:
    """Apply ``advice`` to bytes ``[low, high)`` of a writable mapping, widened to whole pages.

    False if the kernel refuses. Through ctypes: unlike ``mmap.madvise``, it lets other threads run.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return advise_memory(address + low, address + high, advice)


def advise_memory(low: int, high: int, advice: int) -> bool:
    """Apply ``advice`` to the addresses ``[low, high)``, as ``advise``."""
    low -= low % mmap.PAGESIZE
    while low < high:
        step = min(_STEP_BYTES, high - low)
        if _libc.madvise(low, step, advice) != 0:
            return False
        low += step
    return True


def prefault(descriptor: int, low: int, high: int) -> None:
    """Touch bytes ``[low, high)`` of a file with allocated room, for writing."""
    if low >= high:
        return
    mapping = mmap.mmap(descriptor, high)
    try:
        if not advise(mapping, low, high, MADV_POPULATE_WRITE):
            zeros = bytes(1 << 20)
            for start in range(low, high, len(zeros)):
                os.pwrite(descriptor, zeros[: high - start], start)
    finally:
        mapping.close()


def entry_name(tensor: Tensor, box: Box) -> str:
    """Return the name of a box in a safetensors file, such as ``param/w[0:4,2:8]``."""
    return tensor.name + box_text(box)


@dataclass(frozen=True, eq=False, slots=True)
class FileLayout:
    """Place of a collection's rows in one safetensors file.

    ``header`` are the first bytes; ``begin`` [rows] are absolute byte offsets; ``size_bytes`` is
    the whole file.
    """

    header: bytes
    begin: Columns
    size_bytes: int


def lay_out(collection: Collection, metadata: Mapping[str, str]) -> FileLayout:
    """Lay the rows of ``collection`` out in one file, each aligned to its own element size.

    The format allows no gaps, so wide elements come first; rows of one width keep their order.
    Raises ``LayoutError`` for a piece given twice.
    """
    sizes = collection.size_bytes()
    width = np.array([ITEM_BYTES[t.dtype] for t in collection.tensors], dtype=np.int64)
    order = np.argsort(-width[collection.tensor] if len(collection) else sizes, kind="stable")
    relative = np.zeros(len(collection), dtype=np.int64)
    ends = np.cumsum(sizes[order])
    relative[order] = ends - sizes[order]
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for row in order.tolist():
        tensor, box = collection.box(row)
        name = entry_name(tensor, box)
        if name in entries:
            raise LayoutError(
                f"{name} would be stored twice in one file. Store distinct pieces only."
            )
        start = int(relative[row])
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(box.shape),
            "data_offsets": [start, start + int(sizes[row])],
        }
    header = header_of(entries, HEADER_ALIGNMENT)
    return FileLayout(header, relative + len(header), len(header) + int(sizes.sum()))


def header_of(entries: Mapping[str, Any], alignment: int) -> bytes:
    """Return the first bytes of a safetensors file with these entries: a multiple of ``alignment``.

    Source: https://github.com/huggingface/safetensors, "Format".
    """
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % alignment)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def map_file(path: str | Path, *, is_sampled: bool = False) -> memoryview:
    """Map a whole file for reading; the mapping lives as long as a view of it.

    ``is_sampled``: a few bytes here and there are wanted, so the system reads nothing around them.
    """
    with open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            return memoryview(b"")
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if is_sampled:
        mapping.madvise(mmap.MADV_RANDOM)
    return memoryview(mapping)


def read_at(descriptor: int, data: memoryview, begin: int) -> None:
    """Fill bytes from a file, from byte ``begin`` on. Raises ``OSError``, also at its end."""
    while data:
        count = os.preadv(descriptor, [data], begin)
        if not count:
            raise OSError(errno.EIO, f"the file ends at byte {begin}")
        data, begin = data[count:], begin + count


def write_at(descriptor: int, data: memoryview, begin: int) -> None:
    """Write all bytes to a file, from byte ``begin`` on. Raises ``OSError``."""
    while data:
        count = os.pwrite(descriptor, data, begin)
        data, begin = data[count:], begin + count


def start_writing(descriptor: int, begin: int, size: int) -> None:
    """Have the system bring written bytes to disk, without waiting: a later sync waits less."""
    _libc.sync_file_range(descriptor, begin, size, SYNC_FILE_RANGE_WRITE)


def box_view(data: memoryview, begin: int, shape: Sequence[int], dtype: type) -> Bits:
    """Return [shape] row-major elements at byte ``begin`` of ``data``, without a copy."""
    flat: Bits = np.frombuffer(data, dtype=dtype, count=prod(shape), offset=begin)
    return flat.reshape(tuple(shape))


def contiguous_chunks(values: Bits, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Yield the elements of ``values`` in row-major order as bytes, at most ``chunk_bytes`` at
    once.

    Contiguous values are not copied. A chunk of strided values is overwritten by the next one.
    """
    if values.size == 0:
        return
    if values.flags.c_contiguous:
        data = values.reshape(-1).view(np.uint8).data
        for low in range(0, len(data), chunk_bytes):
            yield data[low : low + chunk_bytes]
        return
    staging = np.empty(max(chunk_bytes // values.itemsize, 1), dtype=values.dtype)
    for block in blocks(values.shape, len(staging)):
        flat = staging[: block.numel]
        np.copyto(flat.reshape(block.shape), values[slices(block)])
        yield flat.view(np.uint8).data


def blocks(shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Yield an array of this shape in row-major order as boxes of at most ``limit`` elements.

    Each box is contiguous in a row-major array.
    """
    shape = tuple(shape)
    inner = prod(shape[1:])
    if not shape or prod(shape) <= limit:
        yield Box((0,) * len(shape), shape)
    elif inner > limit:
        for index in range(shape[0]):
            for box in blocks(shape[1:], limit):
                yield Box((index, *box.offset), (1, *box.shape))
    else:
        for low in range(0, shape[0], limit // inner):
            count = min(limit // inner, shape[0] - low)
            yield Box((low, *[0] * (len(shape) - 1)), (count, *shape[1:]))


def slices(box: Box) -> tuple[Any, ...]:
    """Return the index of ``box`` in an array; keeps a 0-d array an array."""
    ranges = (slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))
    return (*ranges, Ellipsis)


def decode(bits: Bits, dtype: str) -> npt.NDArray[Any]:
    """Return bits [...] as numbers [...]; 16- and 8-bit floats unknown to numpy become float32."""
    if dtype in NUMPY_DTYPES:
        return bits.view(NUMPY_DTYPES[dtype])
    if dtype == "BF16":
        # The upper half of a float32.
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F8_E5M2":
        # The upper half of a float16.
        return (bits.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    assert dtype == "F8_E4M3", dtype
    return _e4m3()[bits]


def number_of(content: bytes, dtype: str) -> float:
    """Return the first element of a tensor's bytes."""
    item = ITEM_BYTES[dtype]
    return float(decode(np.frombuffer(content[:item], BITS[item]), dtype)[0])


def _e4m3() -> npt.NDArray[np.float32]:
    """Return the values of all 256 patterns of F8_E4M3 (no infinities, one NaN a sign)."""
    pattern = np.arange(256)
    exponent, mantissa = pattern >> 3 & 15, pattern & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    values = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    values[pattern & 127 == 127] = np.nan
    return np.where(pattern & 128, -values, values).astype(np.float32)


class HeaderEntry(NamedTuple):
    """A tensor of a file: name, dtype, shape, and first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int


def header_bytes(start: bytes, size: int) -> int:
    """Return the header's length, from the first ``LENGTH_BYTES`` of a file of ``size`` bytes.

    Raises:
        ValueError: The file has no room for it.
    """
    length = int.from_bytes(start, "little")
    if not 2 <= length <= min(MAX_JSON_BYTES, size - LENGTH_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    return length


def entries_of(text: bytes, size: int) -> Iterator[HeaderEntry]:
    """Yield the tensors of a file of ``size`` bytes with this header, in the order of their bytes.

    Bytes of an unknown dtype need only lie between their neighbours.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: The header is damaged, or does not fit the
            file's length.
    """
    header = parse_json(text)
    first = LENGTH_BYTES + len(text)
    at = 0
    items = ((name, of) for name, of in header.items() if name != "__metadata__")
    for name, of in sorted(items, key=lambda item: item[1]["data_offsets"]):
        shape, (low, high) = tuple(of["shape"]), of["data_offsets"]
        is_whole = all(type(number) is int for number in (*shape, low, high))
        if not is_whole or len(shape) > MAX_NDIM or min(shape, default=0) < 0:
            raise ValueError(f"{name} has shape {list(shape)}")
        if not isinstance(of["dtype"], str):
            raise ValueError(f"{name} is of dtype {of['dtype']!r}")
        item = _ITEM_BYTES.get(of["dtype"])
        if low != at or high < low or (item is not None and high - low != prod(shape) * item):
            raise ValueError(f"{name} lies at {low}:{high}")
        yield HeaderEntry(name, of["dtype"], shape, first + low)
        at = high
    if first + at != size:
        raise ValueError(f"{size} bytes, {first + at} by its header")
