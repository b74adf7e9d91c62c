"""Which boxes of the training state each rank of a layout holds, and which it wants.

Boxes are gathered in *cells*: what one group of ranks holds alike. The cells of one kind of state
cut it without overlap, so that whatever ranks are put together, on a host or in a job, what they
hold is the sum over their cells.
"""

from dataclasses import dataclass

import numpy as np

from scalai.core.degrees.degrees import Degrees
from scalai.core.planner.buffers import EXPERT, TIED, Model, check, matrices, segments, ways
from scalai.core.planner.model import ModelShape
from scalai.core.tensors.boxes import expand
from scalai.core.tensors.collection import Columns


@dataclass(frozen=True, eq=False, slots=True)
class Cells:
    """Boxes of one kind of state by cell, and the ranks of each cell.

    Attributes:
        tensor, row, column: Of which matrix a box is, and where it begins, [boxes].
        rows, columns: Its sizes, [boxes].
        cell: Which cell it is of, [boxes].
        count: How many cells there are.
        holder_cell, holder_rank: Pairs of a cell and one of its ranks, [holders].
        length: Elements of each matrix, [matrices].
        width: Columns of each matrix, [matrices].
    """

    tensor: Columns
    row: Columns
    column: Columns
    rows: Columns
    columns: Columns
    cell: Columns
    count: int
    holder_cell: Columns
    holder_rank: Columns
    length: Columns
    width: Columns


def cells_of(model: Model, degrees: Degrees, *, is_sharded: bool) -> Cells:
    """Return the cells of one kind of state: parts of the buffers where it is sharded over
    replicas, else what a TP rank has of each chunk."""
    check(model.shape, degrees)
    table = np.array(list(segments(model, degrees, is_sharded)), dtype=np.int64)
    length, width = matrices(model)
    (
        tensor, begin, rows, columns, row_base, row_step, column_step, spread, chunk, share,
        next_expert,
    ) = table.T  # fmt: skip
    parted = np.array([ways(kind, model.shape, degrees) for kind in range(6)])[spread]
    experts = np.where(spread >= EXPERT, degrees.ep, 1)

    first, last = begin // share, (begin + rows * columns - 1) // share
    if not is_sharded:
        first, last = first * 0, last * 0
    row, place = expand(last - first + 1)
    shard = first[row] + place
    low = np.maximum(shard * share[row] - begin[row], 0)
    high = (rows * columns)[row]
    if is_sharded:
        high = np.minimum(high, (shard + 1) * share[row] - begin[row])
    source, top, left, height, breadth = _rectangles(low, high, columns[row])
    row, shard = row[source], shard[source]

    # Each index of the ranks that it is spread over has such a box elsewhere in the matrix.
    copy, number = expand((parted * experts)[row])
    row, shard = row[copy], shard[copy]
    expert, index = np.divmod(number, parted[row])
    key = (chunk[row], spread[row], index, expert, shard)
    sizes = tuple(int(part.max()) + 1 for part in key)
    codes, cell = np.unique(np.ravel_multi_index(key, sizes), return_inverse=True)
    keys: Columns = np.stack(np.unravel_index(codes, sizes), axis=1)
    holder_cell, holder_rank = _holders(keys, model.shape, degrees, is_sharded)
    return Cells(
        tensor=tensor[row] + expert * next_expert[row],
        row=top[copy] + row_base[row] + index * row_step[row],
        column=left[copy] + index * column_step[row],
        rows=height[copy],
        columns=breadth[copy],
        cell=np.ravel(cell),
        count=len(codes),
        holder_cell=holder_cell,
        holder_rank=holder_rank,
        length=length,
        width=width,
    )


def _holders(
    keys: Columns, shape: ModelShape, degrees: Degrees, is_sharded: bool
) -> tuple[Columns, Columns]:
    """Return the pairs of a cell and a rank, in Megatron's order tp-cp-ep-dp-pp."""
    tp, replicas = degrees.tp, degrees.dp * degrees.cp
    pairs: list[tuple[int, int]] = []
    for cell, (chunk, spread, index, expert, shard) in enumerate(keys.tolist()):
        if spread >= EXPERT:
            own = range(expert, replicas, degrees.ep)
        else:
            own = range(replicas)
        places = [own[shard]] if is_sharded else own
        stages = {0, degrees.pp - 1} if spread == TIED else {chunk % degrees.pp}
        # One of so many equal parts is on as many neighbouring TP ranks.
        each = tp // ways(spread, shape, degrees)
        pairs += [
            (cell, (stage * replicas + place) * tp + tp_rank)
            for stage in sorted(stages)
            for place in places
            for tp_rank in range(index * each, (index + 1) * each)
        ]
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _rectangles(low: Columns, high: Columns, width: Columns) -> tuple[Columns, ...]:
    """Cut flat ranges of row-major matrices into the rest of a row, whole rows, the start of one.

    Returns:
        The range that each is of, its first row and column, its rows and columns.
    """
    first, head = np.divmod(low, width)
    last, tail = np.divmod(high, width)
    is_one = first == last
    number = np.arange(len(low))
    ends_at = np.where(is_one, tail, width)
    starts = is_one | (head > 0)
    top = first + (head > 0)
    one = np.ones_like(low)
    parts = (
        (starts, first, head, one, ends_at - head),
        (~is_one & (last > top), top, 0 * head, last - top, width),
        (~is_one & (tail > 0), last, 0 * head, one, tail),
    )
    columns = [[column[keep] for column in (number, *rest)] for keep, *rest in parts]
    return tuple(np.concatenate(each) for each in zip(*columns, strict=True))
