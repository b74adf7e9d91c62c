"""How long it takes to plan the resize of a GPT-3 175B, and how much memory.

The state: 96 layers, hidden 12,288, vocabulary 51,200, bf16 parameters, fp32 masters, two moments,
Megatron's distributed optimizer. Two resizes, hosts of 8 ranks:

* TP8 PP16 DP8 to DP6: 1,024 to 768 ranks;
* TP8 PP16 DP128 to TP8 PP12 DP128: 16,384 to 12,288 ranks.

Figures (the smaller resize has them too, with ``_1024``):

* ``rank_s_16384``: the copies of one new rank, from the pieces of all hosts as they are read from
  their manifests: indexing them is part of it;
* ``all_s_16384``: the copies of every new rank, each produced once, host by host;
* ``peak_rss_gb``: of the whole process, the layouts themselves included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from statistics import median

import numpy as np
from report import Report, median_s, peak_rss_gb, timed

from scalai.core.tensors.collection import Collection, Tensor, concatenate
from scalai.core.tensors.plan import Holder, Planner, plan
from scalai.core.tensors.region import Box, Piece, clip, row_major

HIDDEN, LAYERS, VOCABULARY, POSITIONS = 12_288, 96, 51_200, 2_048
RANKS_PER_HOST = 8
BUCKET_ALIGNMENT, PARAMETER_ALIGNMENT = 128, 64
OPTIMIZER_KINDS = ("main", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees; ranks are numbered as Megatron does: TP fastest, then DP, then PP."""

    tp: int
    pp: int
    dp: int

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"TP{self.tp} PP{self.pp} DP{self.dp}"


@dataclass(frozen=True)
class Parameter:
    """A parameter of the global model and the axis on which tensor parallelism cuts it, if any."""

    name: str
    shape: tuple[int, ...]
    tp_axis: int | None

    def local(self, tp: int, tp_rank: int) -> Box:
        """Return the slice of one tensor-parallel rank."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        if self.tp_axis is not None:
            shape[self.tp_axis] //= tp
            offset[self.tp_axis] = tp_rank * shape[self.tp_axis]
        return Box(tuple(offset), tuple(shape))


def layer(number: int) -> list[Parameter]:
    """Return the parameters of one transformer layer, in Megatron's order."""
    prefix, ffn = f"decoder.layers.{number}", 4 * HIDDEN
    return [
        Parameter(f"{prefix}.input_layernorm.weight", (HIDDEN,), None),
        Parameter(f"{prefix}.input_layernorm.bias", (HIDDEN,), None),
        Parameter(f"{prefix}.self_attention.linear_proj.weight", (HIDDEN, HIDDEN), 1),
        Parameter(f"{prefix}.self_attention.linear_proj.bias", (HIDDEN,), None),
        Parameter(f"{prefix}.self_attention.linear_qkv.weight", (3 * HIDDEN, HIDDEN), 0),
        Parameter(f"{prefix}.self_attention.linear_qkv.bias", (3 * HIDDEN,), 0),
        Parameter(f"{prefix}.pre_mlp_layernorm.weight", (HIDDEN,), None),
        Parameter(f"{prefix}.pre_mlp_layernorm.bias", (HIDDEN,), None),
        Parameter(f"{prefix}.mlp.linear_fc1.weight", (ffn, HIDDEN), 0),
        Parameter(f"{prefix}.mlp.linear_fc1.bias", (ffn,), 0),
        Parameter(f"{prefix}.mlp.linear_fc2.weight", (HIDDEN, ffn), 1),
        Parameter(f"{prefix}.mlp.linear_fc2.bias", (HIDDEN,), None),
    ]


def stage(pp: int, pp_rank: int) -> list[Parameter]:
    """Return the parameters of one pipeline stage; the embedding is tied, so both ends have it."""
    embedding = Parameter("embedding.word_embeddings.weight", (VOCABULARY, HIDDEN), 0)
    position = Parameter("embedding.position_embeddings.weight", (POSITIONS, HIDDEN), None)
    count = LAYERS // pp
    parameters = [embedding, position] if pp_rank == 0 else []
    for number in range(pp_rank * count, (pp_rank + 1) * count):
        parameters += layer(number)
    if pp_rank == pp - 1:
        parameters += [
            Parameter("decoder.final_layernorm.weight", (HIDDEN,), None),
            Parameter("decoder.final_layernorm.bias", (HIDDEN,), None),
        ]
        parameters += [embedding] if pp > 1 else []
    return parameters


@dataclass(frozen=True)
class Placed:
    """A parameter's slice and where it lies in the gradient buffer of its bucket."""

    parameter: Parameter
    local: Box
    begin: int


def buckets(
    parameters: Sequence[Parameter], tp: int, tp_rank: int
) -> list[tuple[list[Placed], int]]:
    """Lay parameters out as Megatron's distributed optimizer does.

    They lie in reverse order, the tied embedding in a bucket of its own. Returns the buckets and
    their unpadded lengths.

    Source: megatron-core 0.16, distributed/param_and_grad_buffer.py, one bucket size for all.
    """
    result: list[tuple[list[Placed], int]] = []
    placed: list[Placed] = []
    end = 0
    for parameter in reversed(parameters):
        is_shared = parameter.name.startswith("embedding.word")
        if is_shared and placed:
            result.append((placed, end))
            placed, end = [], 0
        local = parameter.local(tp, tp_rank)
        begin = -(-end // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        end = begin + prod(local.shape)
        placed.append(Placed(parameter, local, begin))
        if is_shared:
            result.append((placed, end))
            placed, end = [], 0
    return [*result, (placed, end)] if placed else result


def owned(
    layout: Sequence[tuple[list[Placed], int]], dp: int, dp_rank: int
) -> Iterator[tuple[Parameter, Box]]:
    """Yield the boxes of the flat ranges that one data-parallel rank owns."""
    for placed, end in layout:
        padding = lcm(dp, BUCKET_ALIGNMENT)
        share = -(-end // padding) * padding // dp
        low, high = dp_rank * share, (dp_rank + 1) * share
        for one in placed:
            count = one.local.numel
            if one.begin < high and low < one.begin + count:
                piece = Piece(one.local, 0, row_major(one.local.shape))
                start, stop = max(low - one.begin, 0), min(high - one.begin, count)
                yield from ((one.parameter, part.box) for part in clip(piece, start, stop))


def tensor(kind: str, parameter: Parameter) -> Tensor:
    return Tensor(f"{kind}/{parameter.name}", parameter.shape, "BF16" if kind == "param" else "F32")


def model_parallel_ranks(degrees: Degrees) -> Iterator[tuple[int, int, list[Parameter]]]:
    """Yield, by stage and TP rank: its first global rank, the TP rank, the parameters."""
    for pp_rank in range(degrees.pp):
        parameters = stage(degrees.pp, pp_rank)
        for tp_rank in range(degrees.tp):
            yield tp_rank + degrees.tp * degrees.dp * pp_rank, tp_rank, parameters


def held(degrees: Degrees) -> list[Holder]:
    """Return what every host has stored: its ranks' own ranges of all kinds, each once."""
    ranks: list[list[tuple[Tensor, Box]]] = [[] for _ in range(degrees.world_size)]
    for first, tp_rank, parameters in model_parallel_ranks(degrees):
        layout = buckets(parameters, degrees.tp, tp_rank)
        for dp_rank in range(degrees.dp):
            boxes = list(owned(layout, degrees.dp, dp_rank))
            ranks[first + dp_rank * degrees.tp] = [
                (tensor(kind, parameter), box)
                for kind in ("param", *OPTIMIZER_KINDS)
                for parameter, box in boxes
            ]
    hosts = []
    for begin in range(0, degrees.world_size, RANKS_PER_HOST):
        # Replicas on one host, such as the layer norms of its TP ranks, are stored once.
        rows = [row for rank in ranks[begin : begin + RANKS_PER_HOST] for row in rank]
        host = f"host-{begin // RANKS_PER_HOST:05d}"
        hosts.append(Holder(host, Collection.of(dict.fromkeys(rows))))
    return hosts


def wanted(degrees: Degrees) -> list[Holder]:
    """Return what every rank wants: its parameters whole, its own ranges of masters and moments."""
    ranks: list[Holder | None] = [None] * degrees.world_size
    for first, tp_rank, parameters in model_parallel_ranks(degrees):
        layout = buckets(parameters, degrees.tp, tp_rank)
        model = Collection.of(
            (tensor("param", parameter), parameter.local(degrees.tp, tp_rank))
            for parameter in parameters
        )
        for dp_rank in range(degrees.dp):
            boxes = list(owned(layout, degrees.dp, dp_rank))
            optimizer = Collection.of(
                (tensor(kind, parameter), box)
                for kind in OPTIMIZER_KINDS
                for parameter, box in boxes
            )
            rank = first + dp_rank * degrees.tp
            host = f"host-{rank // RANKS_PER_HOST:05d}"
            ranks[rank] = Holder(host, concatenate([model, optimizer]), rank)
    return [holder for holder in ranks if holder is not None]


def plan_all(source: Sequence[Holder], target: Sequence[Holder]) -> dict[str, int]:
    """Produce every rank's copies once, host by host, and count them."""
    planner = Planner(source)
    totals = {"copies": 0, "fetches": 0, "bytes_local": 0, "bytes_remote": 0}
    for position, begin in enumerate(range(0, len(target), RANKS_PER_HOST)):
        ranks = target[begin : begin + RANKS_PER_HOST]
        made = planner.plan_host(ranks[0].host, ranks, position)
        totals["copies"] += len(made.copies)
        totals["fetches"] += len(made.fetches)
        totals["bytes_local"] += made.bytes_local
        totals["bytes_remote"] += made.bytes_remote
    return totals


def measure(report: Report, before: Degrees, after: Degrees) -> None:
    """Plan one resize and add its figures."""
    size = before.world_size
    report.say(f"{before} ({size} ranks) to {after} ({after.world_size} ranks): layouts")
    layout_s, (source, target) = timed(lambda: (held(before), wanted(after)))
    pieces = sum(len(holder.collection) for holder in source)
    report.say(f"{pieces} pieces on {len(source)} hosts, made in {layout_s:.1f} s")
    hosts = sorted({holder.host for holder in target})
    some = [target[number] for number in np.linspace(0, len(target) - 1, 5).astype(int).tolist()]
    times = [median_s(partial(plan, source, [rank], hosts)) for rank in some]
    report.add(f"rank_s_{size}", median(times), "s")
    runs = [timed(lambda: plan_all(source, target)) for _ in range(3)]
    report.add(f"all_s_{size}", median(seconds for seconds, _ in runs), "s")
    totals = runs[0][1]
    for name, value in totals.items():
        report.add(f"{name}_{size}", value)
    report.add(f"peak_rss_gb_{size}", peak_rss_gb(), "GB")


def main() -> None:
    report = Report("plan")
    measure(report, Degrees(8, 16, 8), Degrees(8, 16, 6))
    measure(report, Degrees(8, 16, 128), Degrees(8, 12, 128))
    report.add("peak_rss_gb", peak_rss_gb(), "GB")
    report.finish()


if __name__ == "__main__":
    main()
