"""The parallelizable tensor collection (PTC): tensors, their cuts, and their holders.

Source: Tenplex/Scalai, arXiv 2312.05181, section 3: slicing σ, partition φ, allocation α. Differs
in: columns instead of sets of objects: a million boxes as Python objects cost seconds and hundreds
of megabytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.errors import LayoutError
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box

MAX_NDIM = 6
Columns = npt.NDArray[np.int64]


def split_name(name: str) -> tuple[str, str]:
    """Return kind and parameter of ``<kind>/<parameter's name>``; without a slash, no kind."""
    kind, slash, parameter = name.partition("/")
    return (kind, parameter) if slash else ("", name)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical global tensor, named independently of the layout: ``<kind>/<parameter's global
    name>``.

    Kinds: ``param``, ``main`` (fp32 master weights), ``exp_avg``, ``exp_avg_sq``, ``step``, or the
    optimizer's own names. ``dtype`` is a safetensors name (see ``ITEM_BYTES``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def is_possible(self) -> bool:
        """True if tensors of this dtype and shape exist: files may say anything."""
        is_shape = len(self.shape) <= MAX_NDIM and min(self.shape, default=0) >= 0
        return self.dtype in ITEM_BYTES and is_shape


@dataclass(frozen=True, eq=False, slots=True)
class Collection:
    """The sub-tensors of one holder (a rank, a host, a file set), as columns: row ``i`` is a box of
    one tensor.

    ``tensor`` [rows] indexes ``tensors``; ``offset`` and ``shape`` [rows, MAX_NDIM] are the box in
    elements, right-aligned: a tensor of fewer dims has leading offsets 0 and sizes 1.
    """

    tensors: tuple[Tensor, ...]
    tensor: Columns
    offset: Columns
    shape: Columns

    def __len__(self) -> int:
        return len(self.tensor)

    def box(self, row: int) -> tuple[Tensor, Box]:
        """Return row ``row`` as a tensor and its box, with the tensor's own number of dims."""
        tensor = self.tensors[self.tensor[row]]
        skip = MAX_NDIM - len(tensor.shape)
        return tensor, Box(
            tuple(self.offset[row, skip:].tolist()), tuple(self.shape[row, skip:].tolist())
        )

    def numel(self) -> Columns:
        """Elements of each row, [rows]."""
        return np.asarray(self.shape.prod(axis=1), dtype=np.int64)

    def size_bytes(self) -> Columns:
        """Bytes of each row, [rows]."""
        item = np.array([ITEM_BYTES[t.dtype] for t in self.tensors], dtype=np.int64)
        return self.numel() * item[self.tensor] if len(self) else np.zeros(0, np.int64)

    def select(self, rows: npt.NDArray[Any]) -> "Collection":
        """Return the chosen rows (indices or mask), with the same table of tensors."""
        return Collection(self.tensors, self.tensor[rows], self.offset[rows], self.shape[rows])

    @classmethod
    def of(cls, rows: Iterable[tuple[Tensor, Box]]) -> "Collection":
        """Build a collection from pairs. Equal names must be equal tensors, else
        ``LayoutError``.
        """
        table: dict[str, tuple[int, Tensor]] = {}
        index, offsets, shapes = [], [], []
        for tensor, box in rows:
            number, known = table.setdefault(tensor.name, (len(table), tensor))
            if known != tensor:
                raise LayoutError(
                    f"{tensor.name!r} is {known.dtype}{list(known.shape)} in one place and "
                    f"{tensor.dtype}{list(tensor.shape)} in another."
                )
            skip = MAX_NDIM - len(tensor.shape)
            if skip < 0:
                raise LayoutError(
                    f"{tensor.name!r} has {len(tensor.shape)} dims; at most {MAX_NDIM} are "
                    f"supported."
                )
            index.append(number)
            offsets.append((0,) * skip + box.offset)
            shapes.append((1,) * skip + box.shape)
        return cls(
            tuple(tensor for _, tensor in table.values()),
            np.array(index, dtype=np.int64),
            np.array(offsets, dtype=np.int64).reshape(-1, MAX_NDIM),
            np.array(shapes, dtype=np.int64).reshape(-1, MAX_NDIM),
        )

    def keys(self) -> list[bytes]:
        """Return the key of each box among those of its tensor, [rows]."""
        # Not by numpy's joins: there a thread lets others run, even while it holds locks.
        offset, shape, width = self.offset.tobytes(), self.shape.tobytes(), 8 * MAX_NDIM
        begins = range(0, len(offset), width)
        return [offset[at : at + width] + shape[at : at + width] for at in begins]

    def to_json(self) -> dict[str, Any]:
        """Return plain lists for ``json``; ``from_json`` reads them back."""
        return {
            "tensors": [[t.name, list(t.shape), t.dtype] for t in self.tensors],
            "tensor": self.tensor.tolist(),
            "offset": self.offset.tolist(),
            "shape": self.shape.tolist(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Collection":
        """Read the values of ``to_json``. Raises ``LayoutError`` for columns that do not fit
        together.
        """
        tensors = tuple(Tensor(n, tuple(s), d) for n, s, d in data["tensors"])
        tensor = np.array(data["tensor"], dtype=np.int64)
        offset = np.array(data["offset"], dtype=np.int64).reshape(-1, MAX_NDIM)
        shape = np.array(data["shape"], dtype=np.int64).reshape(-1, MAX_NDIM)
        read = cls(tensors, tensor, offset, shape)
        read.check()
        return read

    def check(self) -> None:
        """Check columns from elsewhere. Raises ``LayoutError`` if they do not fit together."""
        rows = len(self.tensor)
        if self.tensor.ndim != 1 or {self.offset.shape, self.shape.shape} != {(rows, MAX_NDIM)}:
            found = [list(column.shape) for column in (self.tensor, self.offset, self.shape)]
            raise LayoutError(
                f"columns of unequal length: {found} are their shapes, not [rows], [rows, "
                f"{MAX_NDIM}] and the same again."
            )
        unknown = self.tensor[(self.tensor < 0) | (self.tensor >= len(self.tensors))]
        if len(unknown):
            raise LayoutError(
                f"a row names tensor {unknown[0]}, but there are {len(self.tensors)}."
            )


def concatenate(parts: Sequence[Collection]) -> Collection:
    """Return the rows of all parts in order, over one merged table of tensors.

    Raises ``LayoutError`` if parts disagree about a tensor.
    """
    table: dict[str, int] = {}
    tensors: list[Tensor] = []
    columns: list[Columns] = []
    for part in parts:
        for tensor in part.tensors:
            number = table.setdefault(tensor.name, len(tensors))
            if number == len(tensors):
                tensors.append(tensor)
            elif tensors[number] != tensor:
                known = tensors[number]
                raise LayoutError(
                    f"{tensor.name!r} is {known.dtype}{list(known.shape)} in one place and "
                    f"{tensor.dtype}{list(tensor.shape)} in another."
                )
        renumber = np.array([table[t.name] for t in part.tensors], dtype=np.int64)
        columns.append(renumber[part.tensor] if len(part) else part.tensor)
    empty = np.zeros((0, MAX_NDIM), np.int64)
    return Collection(
        tuple(tensors),
        np.concatenate([np.zeros(0, np.int64), *columns]),
        np.concatenate([empty, *(p.offset for p in parts)]),
        np.concatenate([empty, *(p.shape for p in parts)]),
    )
