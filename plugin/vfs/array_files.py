"""A tensor, or a slice of one, as the bytes of a ``.npy`` or a ``.safetensors`` file: a header, and
behind it the elements, row by row."""

import re
from dataclasses import dataclass
from io import BytesIO
from typing import Protocol

import numpy as np

from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES, NUMPY_DTYPES
from scalai.core.tensors.region import Box, box_text, whole
from scalai.store.files import header_of
from scalai.vfs.nodes import missing

ALIGNMENT = 8
"""Of the header of a safetensors file, as the library writes it."""

_NUMBER = re.compile(r"[0-9]{1,19}")


class Elements(Protocol):
    """The elements of a box of a tensor as bytes, row-major."""

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes ``[begin, end)``. Raises ``OSError``."""

    def close(self) -> None:
        """End reading."""


@dataclass(frozen=True, slots=True)
class ArrayContent:
    """A header, and the elements behind it."""

    header: bytes
    elements: Elements
    size_bytes: int

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size_bytes)
        if offset >= end:
            return b""
        skip = len(self.header)
        head = self.header[offset:end]
        if end <= skip:
            return head
        return head + self.elements.read(max(offset - skip, 0), end - skip)

    def close(self) -> None:
        self.elements.close()


def npy_header(tensor: Tensor, box: Box) -> bytes:
    """Return what a ``.npy`` file of this box starts with.

    A dtype that numpy has not (BF16, 8-bit floats) is one of so many opaque bytes, as ``ml_dtypes``
    writes it: reading it as numbers fails rather than giving others.

    Source: numpy.lib.format, version 1.0 of the format.
    """
    numpy_type = NUMPY_DTYPES.get(tensor.dtype)
    dtype = np.dtype(numpy_type if numpy_type is not None else f"V{ITEM_BYTES[tensor.dtype]}")
    out = BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False,
              "shape": box.shape}  # fmt: skip
    np.lib.format.write_array_header_1_0(out, fields)
    return out.getvalue()


def safetensors_header(tensor: Tensor, box: Box) -> bytes:
    """Return what a safetensors file of this box starts with. The one entry has the tensor's name,
    and behind it the ranges of a box that is not the whole tensor."""
    name = tensor.name if box == whole(tensor.shape) else tensor.name + box_text(box)
    size = box.numel * ITEM_BYTES[tensor.dtype]
    entry = {"dtype": tensor.dtype, "shape": list(box.shape), "data_offsets": [0, size]}
    return header_of({"__metadata__": {"format": "pt"}, name: entry}, ALIGNMENT)


HEADERS = {".npy": npy_header, ".safetensors": safetensors_header}
"""By how the name of a file ends."""


def parse_slice(text: str, shape: tuple[int, ...]) -> Box:
    """Return the box that ``0:128,:`` means of a tensor; axes that are left out are whole.

    Raises:
        FileNotFoundError: It is no slice, or reaches outside of the tensor: ``numpy`` would clip
            it, and a shorter file than was asked for would be a wrong one.
    """
    offset, extent = [0] * len(shape), list(shape)
    ranges = text.split(",") if text else []
    if len(ranges) > len(shape):
        raise missing(f"[{text}]", f"the tensor has {len(shape)} axes: {list(shape)}")
    for axis, each in enumerate(ranges):
        low_text, colon, high_text = each.partition(":")
        numbers = [low_text or "0", high_text or str(shape[axis])]
        if not colon or not all(map(_NUMBER.fullmatch, numbers)):
            raise missing(f"[{text}]", "expected ranges such as [0:128,:]")
        low, high = map(int, numbers)
        if not low <= high <= shape[axis]:
            raise missing(f"[{text}]", f"{each} does not lie in axis {axis} of {list(shape)}")
        offset[axis], extent[axis] = low, high - low
    return Box(tuple(offset), tuple(extent))
