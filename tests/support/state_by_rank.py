"""The training state of a transformer, rank by rank as Megatron-LM places it, box by box: slow, and
written without what the planner computes it by."""

from collections.abc import Iterable, Iterator, Sequence
from math import lcm, prod

from scalai.core.degrees.degrees import Degrees
from scalai.core.planner.columns import Layout
from scalai.core.planner.shape import ModelShape
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.plan import Holder
from scalai.core.tensors.region import Box, Piece, clip, row_major

Hosts = Sequence[tuple[str, int]]
Rows = list[tuple[Tensor, Box]]
Parameter = tuple[str, tuple[int, ...], list[Box]]
"""Name, global shape, and the rank's boxes in the order of its memory."""


class Ranks:
    """What every rank of a layout holds and wants.

    Args:
        vocab: Rows of the embedding, padded for all layouts that are compared.
    """

    def __init__(self, shape: ModelShape, layout: Layout, vocab: int, precision: str) -> None:
        self.shape, self.degrees, self.vocab = shape, layout.degrees, vocab
        self.sharding = layout.sharding
        self.weight = "F32" if precision == "fp32" else "BF16"
        moments = ("exp_avg", "exp_avg_sq")
        self.optimizer = moments if precision == "fp32" else ("main", *moments)

    def held(self, rank: int) -> Rows:
        boxes = list(self._boxes(rank, is_part=self.sharding > 0))
        return self._of_kinds(boxes, ("param", *self.optimizer))

    def wanted(self, rank: int) -> Rows:
        weights = self._boxes(rank, is_part=self.sharding == 3)
        own = list(self._boxes(rank, is_part=self.sharding > 0))
        return self._of_kinds(weights, ("param",)) + self._of_kinds(own, self.optimizer)

    def _of_kinds(
        self, boxes: Iterable[tuple[str, tuple[int, ...], Box]], kinds: Sequence[str]
    ) -> Rows:
        found = list(boxes)
        return [
            (Tensor(f"{kind}/{name}", shape, self.weight if kind == "param" else "F32"), box)
            for kind in kinds
            for name, shape, box in found
        ]

    def _boxes(self, rank: int, *, is_part: bool) -> Iterator[tuple[str, tuple[int, ...], Box]]:
        degrees = self.degrees
        where = degrees.coordinate(rank)
        place = where.dp_rank * degrees.cp + where.cp_rank
        replicas = degrees.dp * degrees.cp
        chunks = degrees.pp * degrees.vpp
        for chunk in range(where.pp_rank, chunks, degrees.pp):
            dense, experts = self._chunk(chunk, chunks, where.tp_rank, where.ep_rank)
            tied = [p for p in dense if p[0] == "word" and self.shape.is_tied]
            rest = [p for p in dense if p not in tied]
            for bucket, index, count in (
                (tied, place, replicas),
                (rest, place, replicas),
                (experts, place // degrees.ep, replicas // degrees.ep),
            ):
                yield from _part(bucket, index if is_part else 0, count if is_part else 1)

    def _chunk(
        self, chunk: int, chunks: int, tp_rank: int, ep_rank: int
    ) -> tuple[list[Parameter], list[Parameter]]:
        shape = self.shape
        tp = self.degrees.tp
        word = _cut("word", (self.vocab, shape.hidden), 0, tp, tp_rank)
        dense: list[Parameter] = []
        experts: list[Parameter] = []
        if chunk == 0:
            dense.append(word)
            if shape.positions:
                dense.append(_whole("positions", (shape.positions, shape.hidden)))
        for layer in range(chunk * shape.layers // chunks, (chunk + 1) * shape.layers // chunks):
            dense += self._layer(f"{layer}", tp_rank)
            if shape.experts:
                each = shape.experts // self.degrees.ep
                own = range(ep_rank * each, (ep_rank + 1) * each)
                by_expert = [self._mlp(f"{layer}.e{e}", shape.expert_ffn, tp_rank) for e in own]
                experts += [p for alike in zip(*by_expert, strict=True) for p in alike]
        if chunk == chunks - 1:
            dense += self._norm("final")
            if not shape.is_tied:
                dense.append(_cut("head", (self.vocab, shape.hidden), 0, tp, tp_rank))
            elif chunks > 1:
                dense.append(word)
        return dense, experts

    def _layer(self, name: str, tp_rank: int) -> list[Parameter]:
        shape, tp = self.shape, self.degrees.tp
        width = shape.heads * shape.head_dim
        found = self._norm(f"{name}.input")
        found.append(_cut(f"{name}.proj", (shape.hidden, width), 1, tp, tp_rank))
        if shape.has_bias:
            found.append(_whole(f"{name}.proj.bias", (shape.hidden,)))
        found.append(self._queries(f"{name}.qkv", (shape.hidden,), tp_rank))
        if shape.has_bias or shape.has_qkv_bias:
            found.append(self._queries(f"{name}.qkv.bias", (), tp_rank))
        found += self._norm(f"{name}.mlp")
        if shape.experts:
            found.append(_whole(f"{name}.router", (shape.experts, shape.hidden)))
            if shape.shared_ffn:
                found += self._mlp(f"{name}.shared", shape.shared_ffn, tp_rank)
            return found
        return found + self._mlp(name, shape.ffn, tp_rank)

    def _norm(self, name: str) -> list[Parameter]:
        words = ("weight", "bias") if self.shape.has_norm_bias else ("weight",)
        return [_whole(f"{name}.norm.{word}", (self.shape.hidden,)) for word in words]

    def _queries(self, name: str, behind: tuple[int, ...], tp_rank: int) -> Parameter:
        """Rows lie by group: its queries, its keys, its values. Ranks that share a group have a
        part of its queries each, and all of its keys and values."""
        shape, tp, size = self.shape, self.degrees.tp, self.shape.head_dim
        each = shape.heads // shape.kv_groups
        group_rows = (each + 2) * size
        whole = (shape.kv_groups * group_rows, *behind)
        if tp <= shape.kv_groups:
            return _cut(name, whole, 0, tp, tp_rank)
        sharing = tp // shape.kv_groups
        group, part = divmod(tp_rank, sharing)
        rows = shape.heads // tp * size
        zeros = (0,) * len(behind)
        queries = Box((group * group_rows + part * rows, *zeros), (rows, *behind))
        keys = Box((group * group_rows + each * size, *zeros), (2 * size, *behind))
        return name, whole, [queries, keys]

    def _mlp(self, name: str, width: int, tp_rank: int) -> list[Parameter]:
        shape, tp = self.shape, self.degrees.tp
        found = []
        for word, behind in (("weight", (shape.hidden,)), ("bias", ())):
            if word == "bias" and not shape.has_bias:
                continue
            gate = width if shape.is_gated else 0
            rows = width // tp
            starts = [tp_rank * rows] + ([gate + tp_rank * rows] if gate else [])
            boxes = [Box((start, *(0 for _ in behind)), (rows, *behind)) for start in starts]
            found.append((f"{name}.fc1.{word}", (width + gate, *behind), boxes))
        found.append(_cut(f"{name}.fc2", (shape.hidden, width), 1, tp, tp_rank))
        if shape.has_bias:
            found.append(_whole(f"{name}.fc2.bias", (shape.hidden,)))
        return found


def _whole(name: str, shape: tuple[int, ...]) -> Parameter:
    return name, shape, [Box((0,) * len(shape), shape)]


def _cut(name: str, shape: tuple[int, ...], axis: int, parts: int, index: int) -> Parameter:
    offset, extent = [0] * len(shape), list(shape)
    extent[axis] //= parts
    offset[axis] = index * extent[axis]
    return name, shape, [Box(tuple(offset), tuple(extent))]


def _part(
    parameters: Sequence[Parameter], index: int, count: int
) -> Iterator[tuple[str, tuple[int, ...], Box]]:
    """Yield the boxes in one of ``count`` equal parts of the buffer of these parameters."""
    placed, end = [], 0
    for name, shape, boxes in reversed(parameters):
        end = -(-end // 64) * 64
        for box in boxes:
            placed.append((name, shape, box, end))
            end += prod(box.shape)
    padding = lcm(count, 128)
    share = -(-end // padding) * padding // count
    for name, shape, box, begin in placed:
        low, high = index * share - begin, (index + 1) * share - begin
        piece = Piece(box, 0, row_major(box.shape))
        for part in clip(piece, max(low, 0), max(min(high, box.numel), 0)):
            if part.box.numel:
                yield name, shape, part.box


def holders(ranks: Ranks, hosts: Hosts) -> list[Holder]:
    """Return what each host holds, each piece once."""
    found, first = [], 0
    for name, count in hosts:
        rows = [row for rank in range(first, first + count) for row in ranks.held(rank)]
        found.append(Holder(name, Collection.of(dict.fromkeys(rows))))
        first += count
    return found


def wanters(ranks: Ranks, hosts: Hosts) -> list[Holder]:
    """Return what each rank wants."""
    found, first = [], 0
    for name, count in hosts:
        for rank in range(first, first + count):
            found.append(Holder(name, Collection.of(ranks.wanted(rank)), rank))
        first += count
    return found


def common_bytes(held: Rows, wanted: Rows) -> int:
    """Return the bytes that two lists of disjoint boxes have in common."""
    sizes = {"F32": 4, "BF16": 2}
    total = 0
    for tensor, box in held:
        for other, wanted_box in wanted:
            if tensor.name == other.name:
                both = box.intersect(wanted_box)
                total += both.numel * sizes[tensor.dtype] if both else 0
    return total


def worlds(shape: ModelShape, most: int) -> list[Degrees]:
    """Return degrees of at most ``most`` ranks that cut the model."""
    found = []
    for tp in range(1, most + 1):
        heads = shape.heads % tp or shape.ffn % tp or shape.expert_ffn % tp
        if heads or (shape.kv_groups % tp and tp % shape.kv_groups):
            continue
        for pp in range(1, min(shape.layers, most // tp) + 1):
            for replicas in range(1, most // (tp * pp) + 1):
                for cp in (c for c in (1, 2) if replicas % c == 0):
                    for vpp in (v for v in (1, 2) if v == 1 or (pp > 1 and pp * v <= shape.layers)):
                        for ep in (e for e in (1, 2) if e == 1 or shape.experts):
                            if replicas % ep == 0:
                                found.append(Degrees(tp, pp, replicas // cp, vpp, cp, ep))
    return found
