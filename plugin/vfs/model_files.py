"""The model of a generation as folders: a parameter's path, and in it a file for each tensor.

``decoder.layers.0.mlp.weight`` is ``decoder/layers/0/mlp/weight.npy``, its fp32 master
``weight.main.npy``, its moments ``weight.exp_avg.npy``; a slice is ``weight[0:128,:].npy``, which
no listing shows. The same with ``.safetensors``. A file is a header and the elements, row by row,
put together from the pieces in the store.
"""

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import PurePosixPath
from urllib.parse import quote

import numpy as np

from scalai.core.tensors.boxes import uncovered
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES, NUMPY_DTYPES
from scalai.core.tensors.region import Box, box_text, flat_range, row_major, whole
from scalai.store.files import header_of, slices
from scalai.store.generation import UnitedGeneration
from scalai.vfs.nodes import Content, File, Node, missing
from scalai.vfs.pins import Pin

ALIGNMENT = 8
"""Alignment of a safetensors header in bytes, as the library writes it."""

RUN_BYTES = 1 << 20
"""Most bytes of one read for a box with only a part of each row."""
WEIGHTS = "param"
"""Kind of tensor without a kind in its file's name."""
_NUMBER = re.compile(r"[0-9]{1,19}")


def npy_header(tensor: Tensor, box: Box) -> bytes:
    """Header of a ``.npy`` file of this box.

    A dtype unknown to numpy (BF16, 8-bit floats) becomes opaque bytes, as ``ml_dtypes`` writes it:
    a reader of numbers fails, and gets no wrong ones.

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
    """Header of a safetensors file of this box. Its one entry has the tensor's name, and for a part
    of the tensor its ranges behind it."""
    name = tensor.name if box == whole(tensor.shape) else tensor.name + box_text(box)
    size = box.numel * ITEM_BYTES[tensor.dtype]
    entry = {"dtype": tensor.dtype, "shape": list(box.shape), "data_offsets": [0, size]}
    return header_of({"__metadata__": {"format": "pt"}, name: entry}, ALIGNMENT)


HEADERS = {".npy": npy_header, ".safetensors": safetensors_header}
"""Makers of headers by the end of a file's name."""


def parse_slice(text: str, shape: tuple[int, ...]) -> Box:
    """Box of a slice such as ``0:128,:`` of a tensor; missing axes are whole.

    Raises:
        FileNotFoundError: It is no slice, or reaches outside of the tensor: ``numpy`` would clip
            it, and a shorter file would be a wrong one.
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


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece: its box, and the file of a part and its first byte there, row-major."""

    box: Box
    part: int
    file: int
    begin: int


def pieces_of(generation: UnitedGeneration, name: str) -> list[StoredPiece]:
    """Pieces of a tensor in the parts at hand, each box once."""
    found: dict[Box, StoredPiece] = {}
    for number, part in enumerate(generation.hosts):
        held = part.collection
        known = [n for n, tensor in enumerate(held.tensors) if tensor.name == name]
        for row in np.flatnonzero(np.isin(held.tensor, known)).tolist():
            box = held.box(row)[1]
            place = StoredPiece(box, number, int(part.file[row]), int(part.begin[row]))
            if box.numel:
                found.setdefault(box, place)
    return list(found.values())


class TensorElements:
    """The elements of a box of a tensor as bytes, row-major, from the files of a pin.

    Raises:
        OSError: Some are in no part at hand.
    """

    def __init__(self, tensor: Tensor, box: Box, pieces: list[StoredPiece], pin: Pin) -> None:
        self._tensor, self._box, self._pieces, self._pin = tensor, box, pieces, pin
        self._is_open = True
        gaps = uncovered(box, (piece.box for piece in pieces)) if box.numel else []
        if gaps:
            raise OSError(
                errno.EIO,
                f"{tensor.name!r} is not whole here: {box_text(gaps[0])} is on no host whose part "
                "is at hand. Name a durable directory, which has all of them.",
            )

    def read(self, begin: int, end: int) -> bytes:
        """Bytes ``[begin, end)`` of the box. Raises ``OSError``."""
        item = ITEM_BYTES[self._tensor.dtype]
        low, high = begin // item, -(-end // item)
        out = bytearray()
        for inner in flat_range(self._box.shape, low, high):
            offset = tuple(a + b for a, b in zip(self._box.offset, inner.offset, strict=True))
            out += self._gather(Box(offset, inner.shape), item)
        return bytes(memoryview(out)[begin - low * item : end - low * item])

    def _gather(self, wanted: Box, item: int) -> bytes:
        """Bytes of a box, row-major, from all pieces."""
        values = np.empty(wanted.shape, dtype=f"V{item}")
        left = [wanted]
        for piece in self._pieces:
            if not left:
                break
            rest: list[Box] = []
            for box in left:
                common = box.intersect(piece.box)
                if common is None:
                    rest.append(box)
                    continue
                self._copy(values, wanted, piece, common, item)
                rest += uncovered(box, [common])
            left = rest
        assert not left, "every element is in some piece"
        return values.tobytes()

    def _copy(
        self, values: "np.ndarray[tuple[int, ...], np.dtype[np.void]]", wanted: Box,
        piece: StoredPiece, common: Box, item: int,
    ) -> None:  # fmt: skip
        """Read the common part of a box and a piece into ``values`` [wanted.shape]."""
        for part in _runs(piece.box, common, RUN_BYTES // item):
            first = _place(piece.box, part.offset)
            last = _place(piece.box, tuple(a + n - 1 for a, n in zip(part.offset, part.shape,
                                                                     strict=True)))  # fmt: skip
            data = self._pin.read(
                piece.part, piece.file, piece.begin + first * item, (last - first + 1) * item
            )
            strides = tuple(step * item for step in row_major(piece.box.shape))
            found = np.ndarray(part.shape, f"V{item}", data, strides=strides)
            inside = (a - b for a, b in zip(part.offset, wanted.offset, strict=True))
            values[slices(Box(tuple(inside), part.shape))] = found

    def close(self) -> None:
        """Release the pin; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._pin.release()


def _place(box: Box, index: tuple[int, ...]) -> int:
    """Place of an element in a row-major box."""
    inside = (at - low for at, low in zip(index, box.offset, strict=True))
    return sum(at * step for at, step in zip(inside, row_major(box.shape), strict=True))


def _runs(held: Box, wanted: Box, limit: int) -> Iterator[Box]:
    """Yield a part of a piece as boxes, each with at most ``limit`` elements of the piece between
    its first and its last one; a longer row is taken whole."""
    strides = row_major(held.shape)
    reach = sum((size - 1) * step for size, step in zip(wanted.shape, strides, strict=True)) + 1
    axis = next((n for n, size in enumerate(wanted.shape) if size > 1), None)
    if reach <= limit or axis is None or reach == wanted.numel:
        yield wanted
        return
    middle = wanted.shape[axis] // 2
    for low, size in ((0, middle), (middle, wanted.shape[axis] - middle)):
        offset, shape = list(wanted.offset), list(wanted.shape)
        offset[axis], shape[axis] = offset[axis] + low, size
        yield from _runs(held, Box(tuple(offset), tuple(shape)), limit)


@dataclass(frozen=True, slots=True)
class ArrayContent:
    """A header, and the elements behind it."""

    header: bytes
    elements: TensorElements
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


OpenBox = Callable[[Tensor, Box], TensorElements]
"""Opens the elements of a box of a tensor. Raises ``OSError``."""


def place_of(name: str) -> PurePosixPath:
    """Path of a tensor below the model, without the end of a file's name.

    Characters with a meaning in these names, and those without one in a path, are percent-encoded.
    """
    kind, parameter = split_name(name)
    parts = [_component(part) for part in parameter.split(".")]
    last = parts[-1] if kind == WEIGHTS else f"{parts[-1]}.{_component(kind)}"
    return PurePosixPath(*parts[:-1], last)


def _component(text: str) -> str:
    # ``quote`` cannot make the component of an empty name, as between two dots in a row.
    return quote(text, safe="").replace(".", "%2E") or "%2E"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One level of the model: folders below it, and tensors by file name, without its end."""

    folders: Mapping[str, "ModelFolder"]
    tensors: Mapping[str, Tensor]
    mtime: float
    open_box: OpenBox

    def names(self) -> Iterable[str]:
        files = [name + end for name in sorted(self.tensors) for end in HEADERS]
        return [*sorted(self.folders), *files]

    def child(self, name: str) -> Node:
        if name in self.folders:
            return self.folders[name]
        for end, header in HEADERS.items():
            base, ended, rest = name.rpartition(end)
            if not ended or rest:
                continue
            base, bracket, ranges = base.partition("[")
            tensor = self.tensors.get(base)
            if tensor is None or (bracket and not ranges.endswith("]")):
                raise missing(name)
            box = parse_slice(ranges[:-1], tensor.shape) if bracket else whole(tensor.shape)
            return self._file(tensor, box, header(tensor, box))
        raise missing(name)

    def _file(self, tensor: Tensor, box: Box, header: bytes) -> File:
        size = len(header) + box.numel * ITEM_BYTES[tensor.dtype]

        def opened() -> Content:
            return ArrayContent(header, self.open_box(tensor, box), size)

        return File(size, self.mtime, opened)


def model_folder(tensors: Iterable[Tensor], mtime: float, open_box: OpenBox) -> ModelFolder:
    """Folders of these tensors."""
    root = ModelFolder({}, {}, mtime, open_box)
    for tensor in tensors:
        path = place_of(tensor.name)
        folder = root
        for name in path.parts[:-1]:
            below = folder.folders
            assert isinstance(below, dict)
            folder = below.setdefault(name, ModelFolder({}, {}, mtime, open_box))
        assert isinstance(folder.tensors, dict)
        folder.tensors[path.name] = tensor
    return root
