"""A checkpoint's files while it is read: mapped and opened once; rounding of masters to weights;
single values among the tensors.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import STEP, Checkpoint, Overlay, PlacedTensors
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import MAX_NDIM
from scalai.core.tensors.dtypes import BITS, ITEM_BYTES, NUMPY_DTYPES, Bits, bits_dtype
from scalai.core.tensors.region import Box
from scalai.store.files import decode, map_file, number_of


def rounds_to(masters: bytes, master_dtype: str, weights: bytes, dtype: str) -> bool:
    """Whether each master, rounded to the weights' dtype, is the weight beside it.

    Both are elements in the same order, with dtypes by the names of the safetensors format.
    """
    return round_bytes(masters, master_dtype, dtype) == weights


def round_bytes(masters: bytes, master_dtype: str, dtype: str) -> bytes:
    """Return masters rounded to another dtype, as bytes."""
    if master_dtype == dtype:
        return masters
    values: npt.NDArray[Any] = np.frombuffer(masters, dtype=NUMPY_DTYPES[master_dtype])
    return rounded(values.astype(np.float32), dtype).tobytes()


def rounded(values: npt.NDArray[np.float32], dtype: str) -> Bits:
    """Return fp32 numbers [...] as bits [...] of a 16-bit dtype, by its safetensors name."""
    if dtype == "BF16":
        return to_bf16(values)
    with np.errstate(over="ignore"):
        halves: Bits = values.astype(NUMPY_DTYPES[dtype]).view(BITS[ITEM_BYTES[dtype]])
    return halves


def to_bf16(values: npt.NDArray[np.float32]) -> Bits:
    """Return fp32 numbers as bf16 bits, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.asarray(rounded >> np.uint32(16), dtype=np.uint16)


OPEN_FILES = 64
"""Most open files, and most mapped ones."""


class SourceFiles:
    """The files below one directory, for one reader.

    The last ones stay open and mapped until ``close``, or until the last reference to this object
    goes; results of ``view`` stay valid. A forked process continues with its own. Replaced files
    are not seen: make one for each look at a checkpoint, and no longer than that.
    """

    def __init__(self, directory: Path, *, is_sampled: bool = False) -> None:
        """``is_sampled``: a few bytes of each tensor are wanted (``map_file``)."""
        self.directory = directory
        self._maps = lru_cache(OPEN_FILES)(
            lambda path: map_file(directory / path, is_sampled=is_sampled)
        )
        self._opened = lru_cache(OPEN_FILES)(lambda path: Opened(directory / path))

    def __enter__(self) -> "SourceFiles":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, as soon as their readers let go. More may be read later."""
        self._maps.cache_clear()
        self._opened.cache_clear()

    def bytes_of(self, path: str) -> memoryview:
        """Return the bytes of a file, mapped. Raises ``OSError``."""
        return self._maps(path)

    def opened(self, path: str) -> "Opened":
        """Return a file, open for reading. Raises ``OSError``."""
        return self._opened(path)

    def view(self, placed: PlacedTensors, row: int, part: Box) -> Bits:
        """Return the part of a row in the box ``part``, [part.shape], as bits; a copy only if it
        has to be rounded or changed. Raises ``OSError``."""
        tensor, _ = placed.collection.box(row)
        begin, stride = place_of_part(placed, row, part)
        file = placed.files[placed.file[row]]
        data = memoryview(file.content) if file.content is not None else self.bytes_of(file.path)
        if placed.is_rounded_at(row):
            masters = np.ndarray(part.shape, np.dtype(np.float32), data, begin, stride)
            return rounded(masters, tensor.dtype)
        dtype = np.dtype(bits_dtype(tensor.dtype))
        view: Bits = np.ndarray(part.shape, dtype, data, begin, stride)
        for overlay in file.overlays:
            if overlay.begin <= begin < overlay.end:
                return overlaid(view, tensor.dtype, overlay, begin)
        return view


OVERLAID = 1 << 20
"""Elements that an overlay changes at a time."""


def overlaid(view: Bits, dtype: str, overlay: Overlay, begin: int) -> Bits:
    """Return bits of a box as an overlay makes them.

    Args:
        begin: Byte in the file of the box's first element.
    """
    made: Bits = np.empty(view.shape, view.dtype)
    high = max(OVERLAID // max(view[:1].size, 1), 1) if view.ndim else 1
    for low in range(0, view.shape[0] if view.ndim else 1, high):
        part = view[low : low + high] if view.ndim else view
        at = begin + (low * view.strides[0] if view.ndim else 0)
        values = _change(part, overlay, (at - overlay.begin) // view.itemsize)
        if overlay.is_sum:
            values += decode(part, dtype)
        bits = values.view(np.uint32) if dtype == "F32" else rounded(values, dtype)
        np.copyto(made[low : low + high] if view.ndim else made, bits)
    return made


def _change(view: Bits, overlay: Overlay, first: int) -> npt.NDArray[np.float32]:
    """Return ``scale * left @ right`` at the places of a view; its first element has the number
    ``first`` in the matrix. Each axis of the view goes along rows, or along columns."""
    columns, ndim = overlay.right.shape[1], view.ndim
    steps = [step // view.itemsize for step in view.strides]
    along_rows = [n for n in range(ndim) if view.shape[n] == 1 or steps[n] % columns == 0]
    along_columns = [n for n in range(ndim) if n not in along_rows]
    row, column = np.array(first // columns), np.array(first % columns)
    for n in along_rows:
        row = row[..., None] + np.arange(view.shape[n]) * (steps[n] // columns)
    for n in along_columns:
        column = column[..., None] + np.arange(view.shape[n]) * steps[n]
    assert column.max(initial=0) < columns, "a piece goes on in the next row of its matrix"
    product = overlay.left[row.ravel()] @ overlay.right[:, column.ravel()]
    product *= np.float32(overlay.scale)
    order = np.argsort([*along_rows, *along_columns])
    change: npt.NDArray[np.float32] = product.reshape((*row.shape, *column.shape)).transpose(order)
    return np.ascontiguousarray(change).reshape(view.shape)


class Opened:
    """A source file, open for reading until its last reference goes: a reader keeps it open. A
    forked process closes its own descriptor alone."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, self.descriptor)


def place_of_part(placed: PlacedTensors, row: int, part: Box) -> tuple[int, list[int]]:
    """Return the offset of a part of a row in its file, and its strides, in bytes."""
    _, box = placed.collection.box(row)
    item = placed.item_bytes(row)
    stride = [item * step for step in placed.stride[row, MAX_NDIM - len(box.shape) :].tolist()]
    inside = zip(part.offset, box.offset, stride, strict=True)
    return int(placed.begin[row]) + sum((low - at) * step for low, at, step in inside), stride


def made_steps(source: Checkpoint) -> int:
    """Return the optimizer's number of steps: the job's, less those skipped by an overflow. Raises
    as ``read_steps``."""
    steps = read_steps(source)
    return source.values.step if steps is None else int(steps)


def read_steps(source: Checkpoint) -> float | None:
    """Return the optimizer's number of steps for every parameter; None: no tensor says.

    Raises:
        RefusedError: Parameters made unequally many; most layouts keep one number for all.
    """
    placed, found = source.placed, {}
    for row in range(len(placed.collection)):
        tensor, _ = placed.collection.box(row)
        if not tensor.name.startswith(f"{STEP}/") or tensor.dtype != "F32":
            continue
        file, begin = placed.files[placed.file[row]], int(placed.begin[row])
        if file.content is not None:
            data = file.content[begin : begin + 4]
        else:
            with open(source.directory / file.path, "rb") as opened:
                opened.seek(begin)
                data = opened.read(4)
        found[number_of(data, "F32")] = tensor.name
    if len(found) > 1:
        few = ", ".join(f"{name}: {step:g}" for step, name in list(found.items())[:3])
        raise RefusedError(
            f"parameters have made unequally many optimizer steps ({few}), and this layout keeps "
            "one number for all. Convert to scalai's own layout instead."
        )
    return next(iter(found), None)
