"""Slabs of a data set of an HDF5 file, by h5py.

HDF5 itself chooses what to read: the slab's bytes where the data set is contiguous, whole chunks
where it is chunked or compressed, and the file's own tables. All of it is counted.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.errors import RefusedError, UsageError
from scalai.slabs.byte_ranges import ByteRanges, read_range

MAGIC = b"\x89HDF\r\n\x1a\n"
FIRST_USER_BLOCK_BYTES = 512
LISTED = 8
"""Names in an error."""


def has_user_block(source: ByteRanges) -> bool:
    """Tell whether HDF5 begins behind a block of another program's, as in MATLAB's files.

    Source:
        HDF5 File Format Specification 3.0, II.A "Disk Format: Level 0A": the signature is at 0,
        512, 1024, 2048, and so on.
    """
    at = FIRST_USER_BLOCK_BYTES
    while at + len(MAGIC) <= source.size:
        if read_range(source, at, len(MAGIC)) == MAGIC:
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
        into[:count] = read_range(self._source, self._at, count)
        self._at += count
        return count
