"""Slabs of an array in a file: HDF5, .npy or safetensors, here or behind an fsspec URL."""

from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from scalai.core.errors import RefusedError, UsageError
from scalai.remote.patience import WITHIN_S
from scalai.slabs.byte_ranges import ByteRanges, open_ranges, read_range
from scalai.slabs.hdf5 import MAGIC, Hdf5Array, has_user_block
from scalai.slabs.plain_arrays import NPY_MAGIC, npy_array, safetensors_array
from scalai.store.safetensors_header import header_bytes

_NUMBERS = "biufc"
"""Kinds of numpy's dtypes that are numbers or booleans."""


class _Array(Protocol):
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def shape(self) -> tuple[int, ...] | None: ...
    def read(self, index: tuple[slice, ...]) -> npt.NDArray[Any]: ...
    def close(self) -> None: ...


class SlabRead(NamedTuple):
    """A slab, and how many bytes of the file were read for it, its tables included."""

    values: npt.NDArray[Any]
    bytes_read: int


Index = slice | tuple[slice, ...]
"""Where a slab begins and ends on each axis, such as ``numpy.s_[0:1, :, 32:64]``; of an array of
one axis also ``numpy.s_[32:64]``."""


def read_slab(
    path_or_url: str | Path, key: str | None, index: Index, *, remote_timeout_s: float = WITHIN_S
) -> SlabRead:
    """Read one slab of an array, and no more of the file than it takes.

    For one of many slabs keep the file open (``SlabFile``).

    Args:
        path_or_url: A file, or a URL of fsspec.
        key: Name of the data set or tensor; None for .npy.
        index: Where the slab begins and ends on each axis.
        remote_timeout_s: As of ``SlabFile``.

    Raises:
        RefusedError: As ``SlabFile`` and its ``read``.
    """
    with SlabFile(path_or_url, key, remote_timeout_s=remote_timeout_s) as file:
        values = file.read(index)
        return SlabRead(values, file.bytes_read)


class SlabFile:
    """An array of a file that is open for reading slabs, and must not change meanwhile.

    It may be used as a context. What kind of file it is is told by its first bytes; safetensors,
    which has none of its own, is what is none of the others.

    Args:
        path_or_url: A file, or a URL of fsspec.
        key: Name of the data set or tensor; None for .npy.
        remote_timeout_s: How long a URL is asked for up to 16 MiB, all tries together.

    Attributes:
        shape: Of the whole array.
        dtype: Of its elements.

    Raises:
        RefusedError: The file is not there, damaged or truncated, has no such array, or one of
            elements that are no numbers, or none that numpy has.
        UsageError: What reads it is not installed.
    """

    def __init__(
        self, path_or_url: str | Path, key: str | None, *, remote_timeout_s: float = WITHIN_S
    ) -> None:
        self._source = open_ranges(path_or_url, remote_timeout_s)
        self._array: _Array | None = None
        try:
            self._array = _open_array(self._source, key)
            self.shape, self.dtype = _checked(self._source.name, self._array)
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from the file so far, headers and tables included."""
        return self._source.bytes_read

    def read(self, index: Index) -> npt.NDArray[Any]:
        """Read a slab [sizes of the index], in the machine's byte order. Blocks.

        Raises:
            UsageError: The index has other axes than the array, or steps.
            RefusedError: The slab reaches beyond the array; or the file has changed since it was
                opened, is gone, or cannot be read.
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


def _open_array(source: ByteRanges, key: str | None) -> _Array:
    start = read_range(source, 0, min(len(MAGIC), source.size))
    if start.startswith(NPY_MAGIC):
        return npy_array(source, key)
    if start == MAGIC or (not _is_safetensors(start, source.size) and has_user_block(source)):
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
