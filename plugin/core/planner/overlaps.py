"""Counts the bytes wanted by the ranks of one layout and held by those of another, by host and
device.

A pair of a held and a wanted cell has common bytes; no byte is in two pairs of one kind. So a
host's held, missing and sent bytes are sums over pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Literal

import numpy as np

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import NO_SHARDING, WEIGHTS, Layout, Workload
from scalai.core.planner.shape import ModelShape
from scalai.core.tensors.boxes import Boxes, Index, expand, intersection
from scalai.core.tensors.collection import MAX_NDIM, Columns

BUCKET_ALIGNMENT, PARAMETER_ALIGNMENT = 128, 64
TIED, TENSOR, GROUPS, WHOLE, EXPERT, EXPERT_WHOLE = range(6)
"""Spread of a block: over the TP ranks of the first and the last stage; over TP ranks; over at most
one TP rank a query group; not at all; and for experts, over TP ranks and not at all."""
Segment = tuple[int, int, int, int, int, int, int, int, int, int, int]
"""Number of the matrix; offset in the buffer; local rows and columns; first row in the matrix;
steps in rows and in columns to the next rank's; spread; chunk; elements of a shard of the buffer;
step in matrices to the next rank's experts."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A matrix of one layer, or of the model's ends; a parameter has one or several in a row."""

    rows: int
    columns: int
    axis: Literal["rows", "columns", "none"]
    """Axis cut by tensor parallelism."""
    spread: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model as blocks, in sizes divisible by the TP degrees of several layouts.

    Attributes:
        tp: Common multiple of the degrees; the vocabulary is padded to it.
        has_parted_queries: Some TP rank has less than a query group; queries are then a matrix of
            their own.
    """

    shape: ModelShape
    tp: int
    has_parted_queries: bool

    @classmethod
    def of(cls, shape: ModelShape, *degrees: Degrees) -> "Model":
        """Return the model for layouts of these degrees."""
        most = max(each.tp for each in degrees)
        return cls(shape, lcm(*(each.tp for each in degrees)), most > shape.kv_groups)

    @property
    def vocab(self) -> int:
        return -(-self.shape.vocab // self.tp) * self.tp

    def layer(self, *, is_moe: bool) -> list[list[_Block]]:
        """Return a layer's parameters without its routed experts, in Megatron's order."""
        shape, norm = self.shape, self._norm()
        queries, keys = shape.heads * shape.head_dim, shape.kv_groups * shape.head_dim
        mlp = self._feed_forward(shape.shared_ffn if is_moe else shape.ffn, TENSOR, WHOLE)
        widths = [shape.hidden, 1] if shape.has_bias else [shape.hidden]
        router = [[_Block(shape.experts, width, "none", WHOLE)] for width in widths if is_moe]
        projection = [[_Block(shape.hidden, queries, "columns", TENSOR)]]
        bias = [[_Block(shape.hidden, 1, "none", WHOLE)]] if shape.has_bias else []
        both = [self._queries(queries, keys, shape.hidden)]
        if shape.has_bias or shape.has_qkv_bias:
            both.append(self._queries(queries, keys, 1))
        return [*norm, *projection, *bias, *both, *norm, *router, *mlp]

    def expert(self) -> list[list[_Block]]:
        """Return the parameters of one routed expert."""
        return self._feed_forward(self.shape.expert_ffn, EXPERT, EXPERT_WHOLE)

    def ends(self) -> tuple[list[list[_Block]], list[list[_Block]]]:
        """Return the parameters before the first layer and behind the last; a tied embedding is in
        the former alone."""
        shape = self.shape
        spread = TIED if shape.is_tied else TENSOR
        first = [[_Block(self.vocab, shape.hidden, "rows", spread)]]
        if shape.positions:
            first.append([_Block(shape.positions, shape.hidden, "none", WHOLE)])
        last = self._norm()
        if not shape.is_tied:
            last.append([_Block(self.vocab, shape.hidden, "rows", TENSOR)])
        return first, last

    def _norm(self) -> list[list[_Block]]:
        return [[_Block(self.shape.hidden, 1, "none", WHOLE)]] * (1 + self.shape.has_norm_bias)

    def _queries(self, queries: int, keys: int, width: int) -> list[_Block]:
        if not self.has_parted_queries:
            return [_Block(queries + 2 * keys, width, "rows", TENSOR)]
        return [
            _Block(queries, width, "rows", TENSOR),
            _Block(2 * keys, width, "rows", GROUPS),
        ]

    def _feed_forward(self, width: int, spread: int, whole: int) -> list[list[_Block]]:
        if not width:
            return []
        hidden, bias = self.shape.hidden, self.shape.has_bias
        parameters = []
        for columns in (hidden, 1) if bias else (hidden,):
            one = _Block(width, columns, "rows", spread)
            gate = [_Block(width, columns, "rows", spread)]
            parameters.append([one, *gate] if self.shape.is_gated else [one])
        parameters.append([_Block(hidden, width, "columns", spread)])
        return parameters + ([[_Block(hidden, 1, "none", whole)]] if bias else [])


def check(shape: ModelShape, degrees: Degrees) -> None:
    """Refuse degrees that do not cut the model.

    Raises:
        RefusedError: An undivided size; the message names valid degrees.
    """
    tp, ep, chunks = degrees.tp, degrees.ep, degrees.pp * degrees.vpp
    names = ("heads", "ffn", "expert_ffn", "shared_ffn")
    sizes = {name: int(getattr(shape, name)) for name in names}
    for name, size in sizes.items():
        if size % tp:
            ways = ", ".join(str(n) for n in range(1, 129) if size % n == 0)
            raise RefusedError(f"tp={tp} of {degrees} does not divide {name}={size}; use {ways}.")
    if shape.kv_groups % tp and tp % shape.kv_groups:
        raise RefusedError(
            f"tp={tp} of {degrees} neither divides kv_groups={shape.kv_groups} nor is a multiple "
            "of them; use one that does or is."
        )
    if chunks > shape.layers:
        raise RefusedError(
            f"pp*vpp={chunks} of {degrees} is more than the {shape.layers} layers; use "
            f"{shape.layers} or fewer."
        )
    if ep > 1 and (not shape.experts or shape.experts % ep or degrees.dp * degrees.cp % ep):
        raise RefusedError(
            f"ep={ep} of {degrees} does not divide {shape.experts} experts and the "
            f"{degrees.dp * degrees.cp} ranks of dp*cp; use a divisor of both."
        )


def ways(spread: int, shape: ModelShape, degrees: Degrees) -> int:
    tp = degrees.tp
    return (tp, tp, min(tp, shape.kv_groups), 1, tp, 1)[spread]


def matrices(model: Model) -> tuple[Columns, Columns]:
    """Return elements and columns of every matrix, in the order of their numbers."""
    shape = model.shape
    first, last = model.ends()
    sizes = [
        (block.rows * block.columns, block.columns)
        for parameter in first + last
        for block in parameter
    ]
    for layer in range(shape.layers):
        is_moe = _is_moe(shape, layer)
        for parameter in model.layer(is_moe=is_moe):
            sizes += [(block.rows * block.columns, block.columns) for block in parameter]
        if is_moe:
            expert = [block for parameter in model.expert() for block in parameter]
            sizes += [(b.rows * b.columns, b.columns) for b in expert] * shape.experts
    both = np.array(sizes, dtype=np.int64)
    return both[:, 0], both[:, 1]


def _is_moe(shape: ModelShape, layer: int) -> bool:
    """Whether a layer has experts; such layers are spread evenly."""
    moe, layers = shape.moe_layers, shape.layers
    return (layer + 1) * moe // layers > layer * moe // layers


def segments(model: Model, degrees: Degrees, is_sharded: bool) -> Iterator[Segment]:
    """Yield each matrix's part on the first TP rank and the first expert rank."""
    shape = model.shape
    first, last = model.ends()
    chunks = degrees.pp * degrees.vpp
    bounds = [chunk * shape.layers // chunks for chunk in range(chunks + 1)]
    number = sum(len(parameter) for parameter in first + last)
    for chunk, (low, high) in enumerate(pairwise(bounds)):
        dense: list[tuple[int, list[_Block]]] = []
        experts: list[tuple[int, list[_Block]]] = []
        if chunk == 0:
            dense += _numbered(first, 0)
        for layer in range(low, high):
            is_moe = _is_moe(shape, layer)
            blocks = _numbered(model.layer(is_moe=is_moe), number)
            dense += blocks
            number += sum(len(parameter) for _, parameter in blocks)
            if is_moe:
                size = sum(len(parameter) for parameter in model.expert())
                # The first matrices of all experts lie before the second ones.
                for place, parameter in _numbered(model.expert(), number):
                    own = range(shape.experts // degrees.ep)
                    experts += [(place + each * size, parameter) for each in own]
                number += shape.experts * size
        if chunk == chunks - 1:
            dense += _numbered(last, sum(len(parameter) for parameter in first))
        replicas = degrees.dp * degrees.cp
        for parameters, ranks in ((dense, replicas), (experts, replicas // degrees.ep)):
            yield from _buffer(model, degrees, parameters, chunk, ranks if is_sharded else 1)


def _numbered(parameters: list[list[_Block]], number: int) -> list[tuple[int, list[_Block]]]:
    numbered = []
    for parameter in parameters:
        numbered.append((number, parameter))
        number += len(parameter)
    return numbered


def _buffer(
    model: Model,
    degrees: Degrees,
    parameters: list[tuple[int, list[_Block]]],
    chunk: int,
    shards: int,
) -> Iterator[Segment]:
    """Lay parameters out in the buffer of a chunk; a tied embedding has a bucket of its own."""
    step = model.shape.experts // degrees.ep * sum(len(each) for each in model.expert())
    tied = [one for one in parameters if one[1][0].spread == TIED]
    others = [one for one in parameters if one[1][0].spread != TIED]
    for bucket in (tied, others):
        placed: list[tuple[int, int, int, int, int, int, int, int]] = []
        end = 0
        for number, blocks in reversed(bucket):
            end = -(-end // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
            for place, block, rows, columns, base, row_step, column_step in _local(
                blocks, model, degrees
            ):
                steps = (base, row_step, column_step)
                placed.append((number + place, end, rows, columns, *steps, block.spread))
                end += rows * columns
        padding = lcm(shards, BUCKET_ALIGNMENT)
        share = max(-(-end // padding) * padding // shards, 1)
        for one in placed:
            yield (*one, chunk, share, step if one[-1] >= EXPERT else 0)


def _local(
    blocks: list[_Block], model: Model, degrees: Degrees
) -> Iterator[tuple[int, _Block, int, int, int, int, int]]:
    """Yield the first TP rank's part of a parameter, in the order of the buffer.

    Each entry: number, block, rows, columns, first row, and steps in rows and columns to the next
    rank. Queries in a matrix of their own alternate with keys and values, group by group.
    """
    kv_groups = model.shape.kv_groups
    is_grouped = blocks[-1].spread == GROUPS
    groups = max(kv_groups // degrees.tp, 1) if is_grouped else 1
    for group in range(groups):
        for place, block in enumerate(blocks):
            parts = ways(block.spread, model.shape, degrees)
            rows = block.rows // (parts if block.axis == "rows" else 1)
            columns = block.columns // (parts if block.axis == "columns" else 1)
            row_step = rows if block.axis == "rows" else 0
            column_step = columns if block.axis == "columns" else 0
            part = rows // groups
            yield place, block, part, columns, group * part, row_step, column_step


@dataclass(frozen=True, eq=False, slots=True)
class Cells:
    """Boxes of one kind of state by cell, and the ranks of each cell.

    Attributes:
        tensor, row, column: Matrix of a box, and its first row and column, [boxes].
        rows, columns: Sizes of a box, [boxes].
        cell: Cell of a box, [boxes].
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
    """Return the cells of one kind of state: parts of the buffers if sharded over replicas, else a
    TP rank's part of each chunk."""
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

    # Each index of its spread has such a box elsewhere in the matrix.
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
        # With fewer parts than TP ranks, neighbouring ranks hold equal copies.
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
        The range's number, first row and column, rows and columns of each rectangle.
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


@dataclass(frozen=True, eq=False, slots=True)
class Overlap:
    """Common bytes of cells, for all kinds of state with the same cut.

    Attributes:
        held, wanted: The cells.
        first, second: The held and the wanted cell of each pair, [pairs].
        size_bytes: Common bytes of each pair, [pairs].
    """

    held: Cells
    wanted: Cells
    first: Columns
    second: Columns
    size_bytes: Columns


def state_bytes(work: Workload) -> tuple[int, int]:
    """Return the bytes of a parameter's weight, and of its master and moments."""
    return (4, 8) if work.precision == "fp32" else (2, 12)


def overlaps_of(work: Workload, before: Layout, after: Layout) -> tuple[Overlap, ...]:
    """Return the bytes held by the ranks of ``before`` and wanted by those of ``after``.

    With optimizer state over replicas a rank wants whole weights but holds its part alone: the rest
    may be one step old.

    Raises:
        RefusedError: A layout does not cut the model, or cuts experts differently from the rest.
    """
    for tp in {before.degrees.tp, after.degrees.tp}:
        if work.shape.experts and work.expert_tp not in (None, tp):
            raise RefusedError(
                f"experts have a tensor parallelism of {work.expert_tp}, not tp={tp}: where their "
                "parts lie is not modelled. Use the model's tensor parallelism for them."
            )
    model = Model.of(work.shape, before.degrees, after.degrees)
    weights, optimizer = state_bytes(work)
    old = cells_of(model, before.degrees, is_sharded=before.sharding != NO_SHARDING)
    new = cells_of(model, after.degrees, is_sharded=after.sharding != NO_SHARDING)
    if after.sharding in (NO_SHARDING, WEIGHTS):
        return (_overlap(old, new, weights + optimizer),)
    full = cells_of(model, after.degrees, is_sharded=False)
    return _overlap(old, full, weights), _overlap(old, new, optimizer)


def _overlap(held: Cells, wanted: Cells, item_bytes: int) -> Overlap:
    index = Index.of(_boxes(held))
    boxes = _boxes(wanted)
    two, one = index.overlapping(boxes)
    _, shape = intersection(index.boxes.select(one), boxes.select(two))
    code = held.cell[one] * wanted.count + wanted.cell[two]
    pairs, number = np.unique(code, return_inverse=True)
    size = summed(np.ravel(number), shape.prod(axis=1), len(pairs)) * item_bytes
    first, second = np.divmod(pairs, wanted.count)
    return Overlap(held, wanted, first, second, size)


def summed(number: Columns, size: Columns, count: int) -> Columns:
    """Return the sums of sizes by number, [count]; exact below 2^53."""
    sums: Columns = np.bincount(number, weights=size, minlength=count).astype(np.int64)
    return sums


def _boxes(cells: Cells) -> Boxes:
    start = (np.cumsum(cells.length) - cells.length)[cells.tensor]
    width = cells.width[cells.tensor]
    low = start + cells.row * width + cells.column
    reach = (cells.rows - 1) * width + cells.columns
    offset = np.zeros((len(low), MAX_NDIM), dtype=np.int64)
    shape = np.ones((len(low), MAX_NDIM), dtype=np.int64)
    offset[:, -2], offset[:, -1] = cells.row, cells.column
    shape[:, -2], shape[:, -1] = cells.rows, cells.columns
    return Boxes(cells.tensor, low, low + reach, offset, shape)


def joined(cell: Columns, place: Columns, count: int) -> tuple[Columns, Columns]:
    """Return the distinct places of each cell: the first entry of each cell [cells + 1], and the
    places."""
    most = int(place.max(initial=-1)) + 1
    both = np.unique(cell * most + place)
    owner, found = np.divmod(both, max(most, 1))
    return np.searchsorted(owner, np.arange(count + 1)), found


def by_place(
    overlap: Overlap, before: Columns, after: Columns
) -> tuple[Columns, Columns, Columns, Columns]:
    """Return each pair at each place that wants it.

    Args:
        before, after: The place (host or device) of each rank, [ranks]; below 0: gone.

    Returns:
        Pair and place of each entry, distinct; and the sources of the held cells: first entry
        [cells + 1] and places.
    """
    held, wanted = overlap.held, overlap.wanted
    where = before[held.holder_rank]
    here = where >= 0
    begin, source = joined(held.holder_cell[here], where[here], held.count)
    wanted_begin, place = joined(wanted.holder_cell, after[wanted.holder_rank], wanted.count)
    pair, entry = expand((wanted_begin[1:] - wanted_begin[:-1])[overlap.second])
    return pair, place[wanted_begin[:-1][overlap.second[pair]] + entry], begin, source


def needed_and_held(
    overlaps: Sequence[Overlap], before: Columns, after: Columns, places: int, others: int
) -> tuple[Columns, Columns]:
    """Return the bytes needed by each new place, [places], and each old place's share of them,
    [places, others]."""
    needed = np.zeros(places, dtype=np.int64)
    common = np.zeros(places * others, dtype=np.int64)
    for overlap in overlaps:
        pair, place, begin, source = by_place(overlap, before, after)
        needed += summed(place, overlap.size_bytes[pair], places)
        cell = overlap.first[pair]
        entry, number = expand((begin[1:] - begin[:-1])[cell])
        holder = source[begin[:-1][cell[entry]] + number]
        size = overlap.size_bytes[pair[entry]]
        common += summed(place[entry] * others + holder, size, places * others)
    return needed, common.reshape(places, others)
