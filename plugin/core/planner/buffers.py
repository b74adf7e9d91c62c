"""Where the parameters of a transformer lie in the buffers of a tensor-parallel rank.

Source: Megatron-LM, as ``benchmarks/plan.py`` describes it for a whole GPT: tensor parallelism cuts
rows or columns; the distributed optimizer cuts the buffer of a model chunk, parameters in reverse
order, into equal parts (megatron-core 0.16, distributed/param_and_grad_buffer.py, one bucket a
chunk and one of the tied embedding).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Literal

import numpy as np

from scalai.core.degrees.degrees import Degrees
from scalai.core.errors import RefusedError
from scalai.core.planner.model import ModelShape
from scalai.core.tensors.collection import Columns

BUCKET_ALIGNMENT, PARAMETER_ALIGNMENT = 128, 64
TIED, TENSOR, GROUPS, WHOLE, EXPERT, EXPERT_WHOLE = range(6)
"""How a block is spread: over the TP ranks of the first and the last stage; over TP ranks; over as
many of them as there are query groups; not at all; and the same of an expert."""
Segment = tuple[int, int, int, int, int, int, int, int, int, int, int]
"""Number of the matrix; where it begins in the buffer; local rows and columns; where its rows begin
in the matrix; by how many rows and columns the next rank's is further on; the spread; the chunk;
the elements of a shard of the buffer; by how many matrices the next rank's experts are further
on."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A matrix of one layer, or of the model's ends. A parameter is one, or several in a row."""

    rows: int
    columns: int
    axis: Literal["rows", "columns", "none"]
    """Which of them tensor parallelism cuts."""
    spread: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model as blocks, in sizes that the TP degrees of several layouts cut alike.

    Attributes:
        tp: Multiple of all of them; the vocabulary is padded to it.
        has_parted_queries: Some TP rank has less than a query group, so that queries are a matrix
            of their own.
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
        """Return the parameters of a layer but its routed experts, in Megatron's order."""
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
        """Return the parameters before the first layer and behind the last; a tied embedding is the
        first of the former alone."""
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
        RefusedError: A size that is not divided, with those that are.
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
    """Return elements and columns of every matrix, in the order in which they are numbered."""
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
    """Whether a layer has experts: those that do are spread evenly."""
    moe, layers = shape.moe_layers, shape.layers
    return (layer + 1) * moe // layers > layer * moe // layers


def segments(model: Model, degrees: Degrees, is_sharded: bool) -> Iterator[Segment]:
    """Yield what the first TP rank, and the first of experts, has of each matrix."""
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
    """Yield what the first TP rank has of a parameter, in the order of the buffer: the block and
    its number, rows, columns, the first row, and by how much the next rank's rows and columns are
    further on. Where queries are a matrix of their own they alternate with keys and values, group
    by group."""
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
