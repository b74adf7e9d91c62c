"""Places of parameters in ZeRO's flat buffers, by stage.

Source: DeepSpeed 0.19.8. Stages 1 and 2: ``flatten_dense_tensors_aligned`` and
``_round_robin_reorder`` of runtime/zero/stage_1_and_2.py. Stage 3:
``_create_fp16_sub_groups`` of runtime/zero/stage3.py and ``_aligned_size`` of
runtime/zero/partition_parameters.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

ALIGNMENT = 2
"""Elements; stages 1 and 2 pad each rank's part to a multiple."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``[low, high)`` of a flattened parameter, at element ``at`` of a rank's buffer."""

    name: str
    low: int
    high: int
    at: int


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat buffer over all data-parallel ranks.

    Attributes:
        rank_elements: Elements of each rank's part.
        padding: Elements of padding at the end of each rank's part.
    """

    rank_elements: int
    padding: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]


def split_whole(shapes: Mapping[str, Shape], dp: int, gaps: Sequence[int] = ()) -> Flat:
    """Lay parameters one after the other and cut the whole: stages 1 and 2.

    Args:
        shapes: Shapes of a group's parameters, in the order of the buffer.
        gaps: Elements between each parameter and the next, see ``gaps_of``; empty: none.
    """
    begins, end = {}, 0
    for number, (name, shape) in enumerate(shapes.items()):
        begins[name] = end
        end += prod(shape) + (gaps[number] if gaps else 0)
    elements = -(-end // (ALIGNMENT * dp)) * ALIGNMENT
    spans: list[list[Span]] = [[] for _ in range(dp)]
    for name, begin in begins.items():
        stop = begin + prod(shapes[name])
        for rank in range(begin // elements, -(-stop // elements)):
            low, high = max(begin, rank * elements), min(stop, (rank + 1) * elements)
            if low < high:
                spans[rank].append(Span(name, low - begin, high - begin, low - rank * elements))
    padding = tuple(min(max((rank + 1) * elements - end, 0), elements) for rank in range(dp))
    return Flat(elements, padding, tuple(map(tuple, spans)))


def gaps_of(shapes: Mapping[str, Shape], item_bytes: int, *, is_aligned: bool) -> list[int]:
    """Return the elements between each parameter and the next in stages 1 and 2.

    Args:
        shapes: Shapes in the order of the buffer.
        item_bytes: Bytes of an element of the weights.
        is_aligned: ``parameter_alignment``: parameters begin at multiples of 16 bytes.
    """
    alignment = 16 // gcd(16, item_bytes) if is_aligned else 1
    gaps, end = [], 0
    for shape in shapes.values():
        end += prod(shape)
        gaps.append(-end % alignment)
        end += gaps[-1]
    return [*gaps[:-1], 0]


def split_each(shapes: Mapping[str, Shape], dp: int) -> Flat:
    """Cut every parameter by itself, padded to equal parts: stage 3."""
    spans: list[list[Span]] = [[] for _ in range(dp)]
    at = 0
    for name, shape in shapes.items():
        numel, part = prod(shape), part_of(shape, dp)
        for rank in range(dp):
            low, high = min(rank * part, numel), min((rank + 1) * part, numel)
            if low < high:
                spans[rank].append(Span(name, low, high, at))
        at += part
    return Flat(at, (0,) * dp, tuple(map(tuple, spans)))


def part_of(shape: Shape, dp: int) -> int:
    """Return a rank's elements of a parameter in stage 3, padding included."""
    return -(-prod(shape) // dp)


def sub_groups(
    shapes: Mapping[str, Shape], dp: int, sub_group_elements: int
) -> Iterator[tuple[str, ...]]:
    """Yield the parameters of each of a group's buffers in stage 3; each ends at
    ``sub_group_elements`` or more on a rank."""
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        names.append(name)
        filled += part_of(shape, dp)
        if filled >= sub_group_elements:
            yield tuple(names)
            names, filled = [], 0
    if names:
        yield tuple(names)


def round_robin(names: Sequence[str], dp: int) -> tuple[str, ...]:
    """Return the order of the buffer under ``round_robin_gradients``."""
    return tuple(name for rank in range(dp) for name in names[rank::dp])


def undo_round_robin(names: Sequence[str], dp: int) -> tuple[str, ...]:
    """Undo ``round_robin``."""
    order = round_robin([str(number) for number in range(len(names))], dp)
    by_number = dict(zip(map(int, order), names, strict=True))
    return tuple(by_number[number] for number in range(len(names)))
