"""Places of a parameter's elements in DeepSpeed's flat buffers.

They are read from addresses: DeepSpeed's parameters are views of the flat buffers, so its order
(``round_robin_gradients``, alignment) need not be known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from scalai.core.errors import LayoutError
from scalai.core.tensors.region import Piece, clip


@dataclass(frozen=True, eq=False, slots=True)
class Fragment:
    """Elements ``[low, high)`` of a flattened parameter, at ``start`` of a flat buffer.

    ``low == high``: this rank has none of them. ``cuts``: borders between ranks in the flattened
    parameter, ascending, without its ends. Pieces end there on all ranks alike, so equal elements
    lie in equal boxes.
    """

    parameter: torch.Tensor
    low: int
    high: int
    start: int
    cuts: tuple[int, ...] = ()


def offset_in(flat: torch.Tensor, part: torch.Tensor, name: str) -> int:
    """Return the begin of ``part``, a contiguous view of ``flat``, in elements.

    Raises:
        LayoutError: It is not such a view.
    """
    size = flat.element_size()
    offset, rest = divmod(part.data_ptr() - flat.data_ptr(), size)
    inside = rest == 0 <= offset and offset + part.numel() <= flat.numel()
    if part.dtype != flat.dtype or not part.is_contiguous() or not inside:
        raise LayoutError(
            f"{name} ({part.numel()} elements of {part.dtype}) does not lie in DeepSpeed's flat "
            f"buffer ({flat.numel()} of {flat.dtype}), as this version of Scalai expects it. Use a "
            "known version of DeepSpeed, and do not replace the memory of parameters."
        )
    return offset


def partitioned(
    parameter: torch.Tensor, numel: int, offset: int, partition_numel: int, rank: int
) -> Fragment:
    """Return this rank's fragment of a parameter at ``offset`` of a flat buffer of equal
    partitions; the rank owns partition ``rank``."""
    begin = rank * partition_numel
    low = min(max(begin - offset, 0), numel)
    high = min(max(begin + partition_numel - offset, 0), numel)
    first = (offset // partition_numel + 1) * partition_numel - offset
    cuts = tuple(range(first, numel, partition_numel))
    return Fragment(parameter, low, high, offset + low - begin, cuts)


def cut_pieces(
    pieces: Sequence[Piece], low: int, high: int, start: int, cuts: Sequence[int]
) -> Iterator[Piece]:
    """Yield the boxes of elements ``[low, high)`` of a flattened parameter, none across a cut.

    Args:
        pieces: The whole parameter's boxes of the global tensor, and their places in it.
        start: Place of element ``low`` in the buffer of the result.
    """
    ends = [cut for cut in cuts if low < cut < high]
    for begin, end in zip((low, *ends), (*ends, high), strict=True):
        for piece in pieces:
            for part in clip(piece, begin, end):
                yield replace(part, start=part.start + begin - low + start)
