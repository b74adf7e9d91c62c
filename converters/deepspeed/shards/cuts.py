"""Tensor-parallel cuts of a parameter, and the place of a rank's part in the whole.

A rank's shard consists of runs along one dimension: one run, or one per part of a fused parameter
(gate and up projection; query, key and value).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from scalai.converters.checkpoint import STEP, FilePiece
from scalai.converters.deepspeed.shards.flat import Shape
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Box, row_major


@dataclass(frozen=True, slots=True)
class Run:
    """``size`` elements along the cut dimension, from ``local`` of a shard and ``start`` of the
    whole."""

    local: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of a parameter.

    Attributes:
        dim: Dimension of the cut; None: every rank has all of it.
        widths: [parts][ranks] Elements of each part on each rank along ``dim``.
        unit: Elements; shards are multiples of it, such as the size of a head.
        is_vocabulary: Whether ``dim`` is a vocabulary's, padded by Megatron.
    """

    dim: int | None = None
    widths: tuple[tuple[int, ...], ...] = ()
    unit: int = 1
    is_vocabulary: bool = False

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of the parts in the whole."""
        return tuple(map(sum, self.widths))

    def whole(self, shape: Shape) -> Shape:
        """Return the whole shape from a rank's."""
        return self._with(shape, sum(self.parts))

    def shard(self, shape: Shape, rank: int) -> Shape:
        """Return a rank's shape from the whole one."""
        return self._with(shape, sum(widths[rank] for widths in self.widths))

    def _with(self, shape: Shape, size: int) -> Shape:
        if self.dim is None:
            return shape
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def runs(self, rank: int) -> Iterator[Run]:
        """Yield a rank's runs, in the order of its shard."""
        local = start = 0
        for widths in self.widths:
            yield Run(local, start + sum(widths[:rank]), widths[rank])
            local, start = local + widths[rank], start + sum(widths)

    def recut(self, name: str, tp: int) -> "Cut":
        """Return the cut of the same parameter over another number of ranks.

        Deals each part out in units as evenly as possible, one more to the first ranks, as
        DeepSpeed's AutoTP does (``get_shard_size`` of module_inject/tp_shard.py, 0.19.8).

        Raises:
            RefusedError: ``tp`` does not divide a vocabulary; or the unit does not divide a part.
        """
        if self.dim is None or tp == len(self.widths[0]):
            return self
        for size in self.parts:
            if self.is_vocabulary and size % tp:
                raise RefusedError(
                    f"{name} has {size} rows, its vocabulary's padding among them, and tp={tp} "
                    "does not divide them. The padding is part of the model: choose another --tp."
                )
            if size % self.unit:
                raise RefusedError(
                    f"{name} is {size} along dimension {self.dim}, which is no multiple of the "
                    f"unit {self.unit} of its [[cut]]. Correct the file of --cuts."
                )
        return replace(self, widths=tuple(even(size, tp, self.unit) for size in self.parts))


def even(size: int, tp: int, unit: int = 1) -> tuple[int, ...]:
    """Deal ``size`` out to ranks in units, as evenly as possible, one more to the first ranks."""
    count, rest = divmod(size // unit, tp)
    return tuple((count + (rank < rest)) * unit for rank in range(tp))


WHOLE = Cut()
"""The cut of a parameter that every rank has whole."""


@dataclass(frozen=True, slots=True)
class Shards:
    """One tensor-parallel rank's part of every parameter.

    ``cuts`` are by parameter name; parameters without a cut are whole.
    """

    cuts: Mapping[str, Cut]
    rank: int

    def cut(self, tensor: Tensor) -> Cut:
        """Return the cut of a tensor of any kind: its parameter's."""
        kind, name = split_name(tensor.name)
        return WHOLE if kind == STEP else self.cuts.get(name, WHOLE)

    def is_shared(self, tensor: Tensor) -> bool:
        """Tell whether all ranks have the whole tensor."""
        return self.cut(tensor).dim is None

    def shard(self, tensor: Tensor) -> Tensor:
        """Return the rank's part of a tensor.

        Raises:
            RefusedError: An optimizer state has another shape than its parameter.
        """
        cut = self.cut(tensor)
        if cut.dim is not None and (
            len(tensor.shape) <= cut.dim or tensor.shape[cut.dim] != sum(cut.parts)
        ):
            raise RefusedError(
                f"{tensor.name} is {list(tensor.shape)}, and {sum(cut.parts)} are expected along "
                f"dimension {cut.dim} of its parameter. Use an optimizer that keeps states of "
                "the parameters' own shapes (Adam)."
            )
        return replace(tensor, shape=cut.shard(tensor.shape, self.rank))

    def of_whole(self, piece: FilePiece) -> Iterator[FilePiece]:
        """Yield a piece of the rank's shard as pieces of the whole tensor."""
        cut = self.cut(piece.tensor)
        if cut.dim is None:
            yield piece
            return
        tensor = replace(piece.tensor, shape=cut.whole(piece.tensor.shape))
        box = piece.box
        stride = row_major(box.shape) if piece.stride is None else piece.stride
        item = piece.item_bytes
        first, last = box.offset[cut.dim], box.offset[cut.dim] + box.shape[cut.dim]
        for run in cut.runs(self.rank):
            low, high = max(first, run.local), min(last, run.local + run.size)
            if low < high:
                offset, shape = list(box.offset), list(box.shape)
                offset[cut.dim], shape[cut.dim] = low - run.local + run.start, high - low
                begin = piece.begin + (low - first) * stride[cut.dim] * item
                part = Box(tuple(offset), tuple(shape))
                yield replace(piece, tensor=tensor, box=part, begin=begin, stride=stride)


EVERYTHING = Shards({}, 0)
"""The shards of an only rank."""


def contiguous(piece: FilePiece) -> Iterator[FilePiece]:
    """Yield a piece as pieces without gaps, for a target."""
    shape = piece.box.shape
    stride = row_major(shape) if piece.stride is None else piece.stride
    is_dense = all(
        size == 1 or step == plain
        for size, step, plain in zip(shape, stride, row_major(shape), strict=True)
    )
    if is_dense:
        yield replace(piece, stride=None)
        return
    axis = next(axis for axis, size in enumerate(shape) if size > 1)
    item = ITEM_BYTES[piece.tensor.dtype]
    for index in range(shape[axis]):
        offset, extent = list(piece.box.offset), list(shape)
        offset[axis], extent[axis] = offset[axis] + index, 1
        begin = piece.begin + index * stride[axis] * item
        box = Box(tuple(offset), tuple(extent))
        yield from contiguous(replace(piece, box=box, begin=begin, stride=stride))
