"""Slabs of an array in a file: HDF5, .npy or safetensors, here or behind an fsspec URL.

Ranges of bytes are read, not mapped: the truncation of a mapped file kills its reader (SIGBUS), and
the bytes that a map reads ahead are unknown. ``bytes_read`` counts the bytes asked for; the kernel
reads whole pages, and ahead. HDF5 itself chooses its ranges: the slab's bytes of a contiguous data
set, whole chunks of a chunked or compressed one, and the file's own tables.
"""

import io
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from scalai.core.errors import RefusedError, UsageError
from scalai.core.tensors.dtypes import NUMPY_DTYPES
from scalai.core.tensors.region import Box
from scalai.core.tensors.slabs import runs
from scalai.store.files import LENGTH_BYTES, HeaderEntry, entries_of, header_bytes, read_at

NPY_MAGIC = b"\x93NUMPY"
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
MAX_NPY_HEADER_BYTES = 1 << 16
FIRST_USER_BLOCK_BYTES = 512
RANGES_AT_ONCE = 1024
BYTES_AT_ONCE = 1 << 24
"""Most ranges, and most bytes, of one request to a URL, each within one deadline."""
PIECE_BYTES = 1 << 22
"""Most bytes of a range of a URL; longer ones come in pieces."""
LISTED = 8
"""Names in an error."""
_NUMBERS = "biufc"
"""Kinds of numpy's dtypes that are numbers or booleans."""
_NUMPY_DTYPES = {**NUMPY_DTYPES, "C64": np.complex64}
"""By their names in safetensors; complex numbers are samples and never a training's state."""
_ANOTHER = "Bytes read before are of another file. Open it again, or put back the first one."


class SlabRead(NamedTuple):
    """A slab, and the bytes read from the file for it, its tables included."""

    values: npt.NDArray[Any]
    bytes_read: int


Index = slice | tuple[slice, ...]
"""Begin and end of a slab on each axis, such as ``numpy.s_[0:1, :, 32:64]``; for an array of one
axis also ``numpy.s_[32:64]``."""


def read_slab(path_or_url: str | Path, key: str | None, index: Index) -> SlabRead:
    """Read one slab of an array, and no more of the file than it takes. For many slabs keep the
    file open (``SlabFile``).

    Args:
        path_or_url: Path, or fsspec URL.
        key: Name of the data set or tensor; None for .npy.
        index: Begin and end of the slab on each axis.

    Raises:
        RefusedError: As ``SlabFile`` and its ``read``.
    """
    with SlabFile(path_or_url, key) as file:
        values = file.read(index)
        return SlabRead(values, file.bytes_read)


class SlabFile:
    """An array of a file, open for reading slabs; a context. The file must not change meanwhile.

    The first bytes tell the format; safetensors, without a magic of its own, is the default. A read
    from a URL fails within 60 s for each 16 MiB; the next read asks again.

    Args:
        path_or_url: Path, or fsspec URL.
        key: Name of the data set or tensor; None for .npy.

    Attributes:
        shape: Shape of the whole array.
        dtype: Type of its elements, in the machine's byte order.

    Raises:
        RefusedError: The file is not there, damaged or truncated, has no such array, or its
            elements are no numbers, or none of numpy's.
        UsageError: A library that reads it is not installed.
    """

    def __init__(self, path_or_url: str | Path, key: str | None) -> None:
        name = os.fspath(path_or_url)
        self._source: ByteRanges = UrlRanges(name) if "://" in name else LocalRanges(name)
        self._array: _Array | None = None
        try:
            self._array = _open_array(self._source, key)
            self.shape, self.dtype = _checked(name, self._array)
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Bytes read from the file so far, headers and tables included."""
        return self._source.bytes_read

    def read(self, index: Index) -> npt.NDArray[Any]:
        """Read a slab [sizes of the index], in the machine's byte order. Blocks.

        Raises:
            UsageError: The index has other axes than the array, or steps.
            RefusedError: The slab reaches beyond the array; or the file has changed since its
                opening, is gone, or cannot be read.
        """
        if self._array is None:
            raise UsageError(f"{self._source.name} is closed. Open it again.")
        axes = (index,) if isinstance(index, slice) else index
        values = self._array.read(_inside(self._source.name, axes, self.shape))
        self._source.check_unchanged()
        return values.astype(self.dtype, copy=False)

    def close(self) -> None:
        """Close the file."""
        if self._array is not None:
            self._array.close()
        self._array = None
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ByteRanges(ABC):
    """A file open for reading ranges of bytes.

    Attributes:
        name: Path or URL, as given.
        size: Size at the opening, in bytes.
        bytes_read: Bytes read so far.
    """

    def __init__(self, name: str) -> None:
        self.name, self.size, self.bytes_read = name, 0, 0

    @abstractmethod
    def fill(self, begins: Sequence[int], length: int, into: memoryview) -> None:
        """Fill ``into`` [ranges * length] with the bytes from each of ``begins`` on. Blocks.

        Raises:
            RefusedError: The file has changed, is gone, or ends before.
        """

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise ``RefusedError`` where the file differs from the one at the opening."""

    @abstractmethod
    def close(self) -> None:
        """Release the file."""

    def read(self, begin: int, length: int) -> bytes:
        """One range. Raises as ``fill``."""
        data = bytearray(length)
        self.fill([begin], length, memoryview(data))
        return bytes(data)


class LocalRanges(ByteRanges):
    """A file of this machine.

    Raises:
        RefusedError: It is not there, no file, or cannot be read.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._descriptor = -1
        try:
            self._descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(self._descriptor)
        except OSError as error:
            self.close()
            raise RefusedError(f"{name} cannot be read ({error.strerror}).") from error
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise RefusedError(f"{name} is no file.")
        self.size, self._was = found.st_size, _state(found)

    def fill(self, begins: Sequence[int], length: int, into: memoryview) -> None:
        try:
            for number, begin in enumerate(begins):
                read_at(self._descriptor, into[number * length : (number + 1) * length], begin)
        except OSError as error:
            self.check_unchanged()
            raise RefusedError(f"{self.name} cannot be read ({error.strerror}).") from error
        self.bytes_read += len(begins) * length

    def check_unchanged(self) -> None:
        try:
            now = _state(os.stat(self.name))
        except OSError as error:
            raise RefusedError(f"{self.name} is gone ({error.strerror}).") from error
        if now != self._was:
            raise RefusedError(
                f"{self.name} has changed since it was opened: size and time were "
                f"{self._was[2:]}, and are {now[2:]}. {_ANOTHER}"
            )

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _state(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class UrlRanges(ByteRanges):
    """A file behind an fsspec URL. A range crosses the network as it is, without read-ahead.

    Raises:
        RefusedError: It is not there, no file, or its server fails or has no ranges.
        UsageError: fsspec, or its library for this protocol, is not installed.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        try:
            from scalai.vfs.remote import FileChangedError, RemoteFiles, RemoteSource

            remote = RemoteFiles(name)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{name}: {error} (scalai[slabs] brings fsspec).") from error
        self._changed_error = FileChangedError
        with self._refusing():
            self._source = RemoteSource(remote, remote.path)
            self._source.check_ranges()
        self.size = self._source.size_bytes

    def fill(self, begins: Sequence[int], length: int, into: memoryview) -> None:
        for some in _batches(begins, length):
            with self._refusing():
                found = self._source.read_ranges([(begin, end) for begin, end, _ in some])
            for (begin, end, at), data in zip(some, found, strict=True):
                into[at : at + end - begin] = data
            self.bytes_read += sum(map(len, found))

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except self._changed_error as error:
            raise RefusedError(
                f"{self.name} has changed since it was opened: {error.difference}. {_ANOTHER}"
            ) from error
        except OSError as error:
            raise RefusedError(f"{self.name} cannot be read: {error.strerror or error}.") from error

    def check_unchanged(self) -> None:
        with self._refusing():
            self._source.check()

    def close(self) -> None:
        self._source.close()


def _batches(begins: Sequence[int], length: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the ranges of each request in pieces: begin, end, place in the buffer to fill."""
    some: list[tuple[int, int, int]] = []
    size = 0
    for number, begin in enumerate(map(int, begins)):
        for low in range(0, length, PIECE_BYTES):
            high = min(low + PIECE_BYTES, length)
            if len(some) == RANGES_AT_ONCE or size + high - low > BYTES_AT_ONCE:
                yield some
                some, size = [], 0
            some.append((begin + low, begin + high, number * length + low))
            size += high - low
    if some:
        yield some


class _Array(Protocol):
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...] | None: ...
    def read(self, index: tuple[slice, ...]) -> npt.NDArray[Any]: ...
    def close(self) -> None: ...


def _open_array(source: ByteRanges, key: str | None) -> _Array:
    start = source.read(0, min(len(HDF5_MAGIC), source.size))
    if start.startswith(NPY_MAGIC):
        return npy_array(source, key)
    if start == HDF5_MAGIC or (not _is_safetensors(start, source.size) and has_user_block(source)):
        return Hdf5Array(source, key)
    return safetensors_array(source, key)


def _is_safetensors(start: bytes, size: int) -> bool:
    try:
        return bool(header_bytes(start, size))
    except ValueError:
        return False


def _checked(name: str, array: _Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype, this one in the machine's byte order, or refuse the array."""
    if array.shape is None or array.dtype.kind not in _NUMBERS:
        raise RefusedError(
            f"elements of {name} are {array.dtype}: slabs are of numbers or booleans. Keep samples "
            "as an array of one of these."
        )
    return array.shape, array.dtype.newbyteorder("=")


def _inside(name: str, index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the index with all ends stated, or refuse it."""
    if len(index) != len(shape):
        raise UsageError(
            f"the slab of {name} has {len(index)} axes, and the array {list(shape)} has "
            f"{len(shape)}. Give one range an axis; `:` is the whole axis."
        )
    return tuple(
        _range(name, axis, part, size)
        for axis, (part, size) in enumerate(zip(index, shape, strict=True))
    )


def _range(name: str, axis: int, part: slice, size: int) -> slice:
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise UsageError(f"{part!r} along axis {axis} of {name} is no range `begin:end`.")
    low, high = part.start or 0, size if part.stop is None else part.stop
    if not 0 <= low <= high <= size:
        raise RefusedError(
            f"the slab {low}:{high} along axis {axis} of {name} reaches beyond its {size} "
            "elements. It was cut for another array, or is the wrong way round."
        )
    return slice(low, high)


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
        version = tuple(source.read(len(NPY_MAGIC), 2))
        width = 2 if version == (1, 0) else 4
        at = len(NPY_MAGIC) + 2
        length = int.from_bytes(source.read(at, width), "little")
        if length > min(MAX_NPY_HEADER_BYTES, source.size):
            raise ValueError(f"a header of {length} bytes in a file of {source.size}")
        text = source.read(at, width + length)
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
        length = header_bytes(source.read(0, LENGTH_BYTES), source.size)
        text = source.read(LENGTH_BYTES, length)
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


def has_user_block(source: ByteRanges) -> bool:
    """Tell whether HDF5 begins behind a block of another program's, as in MATLAB's files.

    Source:
        HDF5 File Format Specification 3.0, II.A "Disk Format: Level 0A": the signature is at 0,
        512, 1024, 2048, and so on.
    """
    at = FIRST_USER_BLOCK_BYTES
    while at + len(HDF5_MAGIC) <= source.size:
        if source.read(at, len(HDF5_MAGIC)) == HDF5_MAGIC:
            return True
        at *= 2
    return False


class Hdf5Array:
    """A data set of an open file.

    Raises:
        UsageError: h5py is not installed.
        RefusedError: The file is truncated or damaged, or the key names no data set in it.
    """

    def __init__(self, source: ByteRanges, key: str | None) -> None:
        try:
            import h5py
        except ImportError as error:
            raise UsageError(
                f"{source.name} is an HDF5 file, and h5py is missing; scalai[slabs] brings it."
            ) from error
        self._source = source
        with _told(source):
            self._file = h5py.File(_File(source), "r")
        try:
            with _told(source):
                self._data = self._find(key, lambda found: isinstance(found, h5py.Dataset))
                self.shape: tuple[int, ...] | None = self._data.shape
                self.dtype: np.dtype[Any] = self._data.dtype
        except BaseException:
            self.close()
            raise

    def _find(self, key: str | None, is_data_set: Callable[[Any], bool]) -> Any:
        """Return the data set of a key, or refuse it."""
        found: Any = None if key is None else self._file.get(key)
        if not is_data_set(found):
            raise RefusedError(
                f"{self._source.name} has no data set {key!r}; it has {_names(self._file)}."
            )
        if found.file.filename != self._file.filename or found.is_virtual or found.external:
            raise RefusedError(
                f"{key!r} of {self._source.name} lies in other files, of which nobody would see "
                "that they change. Read these, or copy the data set (h5repack)."
            )
        return found

    def read(self, index: tuple[slice, ...]) -> npt.NDArray[Any]:
        with _told(self._source):
            values: npt.NDArray[Any] = np.asarray(self._data[index])
            return values

    def close(self) -> None:
        self._file.close()


@contextmanager
def _told(source: ByteRanges) -> Iterator[None]:
    """Say what HDF5 cannot do in terms of the file."""
    try:
        yield
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, RefusedError):
            raise
        source.check_unchanged()
        raise RefusedError(
            f"{source.name} is damaged or truncated, or needs a filter that h5py lacks ({error})."
        ) from error


def _names(file: Any) -> str:
    found = list(file)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(map(repr, found[:LISTED])) + more if found else "none"


class _File(io.RawIOBase):
    """Ranges of bytes as a file that HDF5 reads from."""

    def __init__(self, source: ByteRanges) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        count = max(min(len(into), self._source.size - self._at), 0)
        into[:count] = self._source.read(self._at, count)
        self._at += count
        return count
