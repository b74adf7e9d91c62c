"""The files of a checkpoint while it is read: mapped and opened once, not for every piece."""

import os
from functools import lru_cache
from pathlib import Path
from weakref import finalize

import numpy as np

from scalai.converters.checkpoint import Placed
from scalai.converters.rounding import rounded
from scalai.core.tensors.collection import MAX_NDIM
from scalai.core.tensors.dtypes import Bits, bits_dtype
from scalai.core.tensors.region import Box
from scalai.store.files import map_file

OPEN_FILES = 64
"""Files that stay open, and as many that stay mapped."""


class SourceFiles:
    """The files below one directory, for one reader.

    The last ones stay open and mapped until ``close``, or until nobody refers to this object; what
    ``view`` returned stays valid. A forked process goes on with its own. Files that are replaced
    meanwhile are not seen: make one for each look at a checkpoint, and no longer than that.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps = lru_cache(OPEN_FILES)(lambda path: map_file(directory / path))
        self._opened = lru_cache(OPEN_FILES)(lambda path: Opened(directory / path))

    def __enter__(self) -> "SourceFiles":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open, as soon as whoever reads it lets go. More may be read later."""
        self._maps.cache_clear()
        self._opened.cache_clear()

    def bytes_of(self, path: str) -> memoryview:
        """Return the bytes of a file, mapped. Raises ``OSError``."""
        return self._maps(path)

    def opened(self, path: str) -> "Opened":
        """Return a file, open for reading. Raises ``OSError``."""
        return self._opened(path)

    def view(self, placed: Placed, row: int, part: Box) -> Bits:
        """Return the part of a row that covers the box ``part``, [part.shape], as bits; a copy only
        where it has to be rounded. Raises ``OSError``."""
        tensor, _ = placed.collection.box(row)
        begin, stride = place_of_part(placed, row, part)
        file = placed.files[placed.file[row]]
        data = memoryview(file.content) if file.content is not None else self.bytes_of(file.path)
        if placed.is_rounded_at(row):
            masters = np.ndarray(part.shape, np.dtype(np.float32), data, begin, stride)
            return rounded(masters, tensor.dtype)
        dtype = np.dtype(bits_dtype(tensor.dtype))
        view: Bits = np.ndarray(part.shape, dtype, data, begin, stride)
        return view


class Opened:
    """A source file, open for reading while anybody refers to it.

    So whoever reads keeps it open, whatever is closed meanwhile; and it is closed at once when the
    last one lets go. A forked process closes its own descriptor alone.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, self.descriptor)


def place_of_part(placed: Placed, row: int, part: Box) -> tuple[int, list[int]]:
    """Return where a part of a row begins in its file, and its strides, in bytes."""
    _, box = placed.collection.box(row)
    item = placed.item_bytes(row)
    stride = [item * step for step in placed.stride[row, MAX_NDIM - len(box.shape) :].tolist()]
    inside = zip(part.offset, box.offset, stride, strict=True)
    return int(placed.begin[row]) + sum((low - at) * step for low, at, step in inside), stride
