"""Parallel degrees: sizes of the axes, ranks' coordinates, and a model's limits."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import gcd
from typing import Any, NamedTuple

from scalai.core.degrees.passes import OFFLOADS, RECOMPUTES, Offload, Recompute
from scalai.core.errors import RefusedError, UsageError

AXES = ("tp", "pp", "dp", "vpp", "cp", "ep")
"""Names of the axes, in the order in which they are printed."""


class Coordinate(NamedTuple):
    """Position of one rank on the axes. ``ep_rank`` is its position among the experts' ranks."""

    tp_rank: int
    pp_rank: int
    dp_rank: int
    cp_rank: int = 0
    ep_rank: int = 0


@dataclass(frozen=True, slots=True)
class Degrees:
    """Sizes of the parallel axes.

    ``vpp`` counts the model chunks a pipeline stage runs; ``ep`` divides ``cp * dp``. Neither adds
    ranks.

    Raises:
        UsageError: A size is below 1.
    """

    tp: int
    pp: int
    dp: int
    vpp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise UsageError(f"{axis}={getattr(self, axis)} is not a degree; use 1 or more.")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def model_parallel(self) -> int:
        """TP times PP: number of parts of the model."""
        return self.tp * self.pp

    def __str__(self) -> str:
        sizes = asdict(self)
        shown = [a for a in AXES if a in ("tp", "pp", "dp") or sizes[a] > 1]
        return "·".join(f"{axis.upper()}{sizes[axis]}" for axis in shown)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of ``rank``, in Megatron's order tp-cp-ep-dp-pp: TP varies fastest.

        Experts count with the model's tensor parallelism.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank} is not in {self} (0 to {self.world_size - 1}).")
        rest, tp_rank = divmod(rank, self.tp)
        ep_rank = rest % self.ep
        rest, cp_rank = divmod(rest, self.cp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return Coordinate(tp_rank, pp_rank, dp_rank, cp_rank, ep_rank)

    def rank(self, coordinate: Coordinate) -> int:
        """Return the rank at ``coordinate``; its ``ep_rank`` follows from the rest."""
        where, sizes = coordinate, (self.tp, self.pp, self.dp, self.cp)
        if not all(0 <= place < size for place, size in zip(where[:4], sizes, strict=True)):
            raise UsageError(f"{coordinate} is outside {self}.")
        outer = where.pp_rank * self.dp + where.dp_rank
        return (outer * self.cp + where.cp_rank) * self.tp + where.tp_rank

    def to_json(self) -> dict[str, int]:
        """Return the sizes by axis."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, int]) -> "Degrees":
        """Read the output of ``to_json``; missing axes have size 1."""
        unknown = sorted(set(data) - set(AXES))
        if unknown:
            raise RefusedError(f"{unknown[0]!r} is not an axis; known are {', '.join(AXES)}.")
        return cls(**{"tp": 1, "pp": 1, "dp": 1, **data})


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding over data-parallel ranks as stages of ZeRO (arXiv 1910.02054), by world size, else
    ``usual``."""

    usual: int = 0
    by_world: tuple[tuple[int, int], ...] = ()

    def on(self, world_size: int) -> int:
        """Return the stage on so many ranks."""
        return dict(self.by_world).get(world_size, self.usual)

    def __str__(self) -> str:
        others = (f"{stage} on {world}" for world, stage in self.by_world)
        return "; ".join((f"ZeRO {self.usual}", *others))


MOST_SHARDED_WITH_STAGES = 1
"""ZeRO stage of jobs in pipeline stages: a later one would reduce gradients once a micro-batch."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a model and its batches. None: unknown, no reason for a refusal.

    ``padded_vocab_size`` counts rows of the embedding with padding, constant for the life of a job.
    ``ramp_batch_sizes`` are other global batch sizes ahead of the job. ``extra_layers`` counts
    embedding and loss if the pipeline split treats them as layers. ``min_tp`` 2: a feature of the
    job needs tensor parallelism (``min_tp_reason``).
    """

    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    num_layers: int | None = None
    padded_vocab_size: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    seq_length: int | None = None
    num_experts: int | None = None
    qkv_rows: int | None = None
    """Rows of the projection to queries, keys and values."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward part of dense layers."""
    expert_ffn_hidden_size: int | None = None
    shared_ffn_hidden_size: int | None = None
    """Width of what all tokens go through beside the routed experts."""
    expert_tp: int | None = None
    """Tensor parallelism of the experts; None: that of the model."""
    ramp_batch_sizes: tuple[int, ...] = ()
    eval_batch_size: int | None = None
    """Samples of one step of an evaluation; None: unknown, or those of a training step."""
    evaluates_one_micro_batch: bool = False
    """Whether an evaluation has one micro-batch a replica where ``eval_batch_size`` is None."""
    eval_micro_batch_stays: bool = False
    """Whether an evaluation's micro-batch may not be a part of the training's."""
    optimizer_instances: int = 1
    """Copies of the optimizer's state, each split over a part of the data-parallel ranks."""
    has_uneven_shares: bool = False
    """Whether DP need not divide the micro-batches of a step: fillers take the missing places."""
    has_uneven_stages: bool = False
    """Whether PP and virtual stages need not divide the layers."""
    own_stages: tuple[int, int] | None = None
    """(PP, VPP) whose stages the script states itself, where others are computed; VPP 0: of any."""
    extra_layers: int = 0
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, where they are not as many as those of others."""
    last_stage_layers: int | None = None
    is_sequence_parallel: bool = False
    is_query_group_shared: bool = True
    """Whether several TP ranks may hold copies of one query group."""
    min_pp_with_vpp: int = 2
    """Without overlapped point-to-point communication virtual stages need 3 pipeline stages."""
    min_tp: int = 1
    min_tp_reason: str = ""
    sharding: Sharding | None = None
    """None: unknown, or the same at all degrees."""
    is_in_stages: bool = False
    """Whether the job runs as a pipeline also where it has one stage."""
    most_pp: int | None = None
    """Layers that stages are made of, where these need not be equal."""
    no_tp_in_stages: str = ""
    """Why tensor parallelism does not go with a pipeline; empty: it does."""
    chunk_group: int | None = None
    """Micro-batches that a virtual stage takes at once, where it is stated."""
    needs_chunks: str = ""
    """Why there must be virtual stages; empty: there need not."""
    refused: tuple[tuple[int, int, int, str], ...] = ()
    """(TP, PP, VPP, why): what the framework's own classes refuse."""
    fixed: tuple[tuple[str, int, str], ...] = ()
    """(axis, size, why): axes that may have this one size only, ``etp`` of the experts among them;
    0: that of the job's first round, which is not known yet."""

    def filled_from(self, other: "ModelLimits") -> "ModelLimits":
        """Return these limits, with defaults replaced from ``other``."""
        unset = {f.name for f in fields(self) if getattr(self, f.name) == f.default}
        return replace(self, **{name: getattr(other, name) for name in unset})

    def with_first_dp(self, dp: int) -> "ModelLimits":
        """Return these limits with the data parallelism of the job's first round."""
        fixed = tuple((axis, size or dp, why) for axis, size, why in self.fixed)
        return replace(self, fixed=fixed)


def refusal(
    degrees: Degrees, limits: ModelLimits, micro_batch_size: int | None = None
) -> str | None:
    """Return the reason against ``degrees`` for the model, or None if none is known.

    Args:
        micro_batch_size: Samples a forward pass and replica; None: from ``limits``.

    Source:
        Checks of Megatron-LM 0.14 to 0.20 (``transformer_config.py``, ``arguments.py``,
        ``schedules.py``). Stricter for virtual stages: micro-batches must be a multiple of PP,
        accepted by every release, or suit the stated group.
    """
    micro = micro_batch_size if micro_batch_size is not None else limits.micro_batch_size
    checks = (
        _fixed_axes,
        _refused,
        _tensor_parallel,
        _pipeline,
        _sharded,
        lambda d, lim: _batch(d, lim, micro),
        _context_and_experts,
        _optimizer_copies,
    )
    return next((why for check in checks for why in check(degrees, limits)), None)


def _fixed_axes(degrees: Degrees, limits: ModelLimits) -> Iterator[str]:
    for axis, size, why in limits.fixed:
        found = limits.expert_tp or degrees.tp if axis == "etp" else getattr(degrees, axis)
        if size and found != size:
            yield f"{axis}={found} must stay {size}: {why}"


def _refused(degrees: Degrees, limits: ModelLimits) -> Iterator[str]:
    if limits.needs_chunks and degrees.vpp == 1:
        yield f"pp={degrees.pp} without virtual stages: {limits.needs_chunks}"
    for tp, pp, vpp, why in limits.refused:
        if (tp, pp, vpp) == (degrees.tp, degrees.pp, degrees.vpp):
            yield f"the framework refuses {degrees}: {why}"


def _tensor_parallel(degrees: Degrees, limits: ModelLimits) -> Iterator[str]:
    tp, heads, groups = degrees.tp, limits.num_attention_heads, limits.num_query_groups
    if tp < limits.min_tp:
        yield f"tp={tp} is below {limits.min_tp}: {limits.min_tp_reason}"
    if heads is not None and heads % tp:
        yield f"tp={tp} does not divide num_attention_heads={heads}"
    if (
        groups is not None
        and groups % tp
        and not (limits.is_query_group_shared and not tp % groups)
    ):
        relation = "divide or be a multiple of" if limits.is_query_group_shared else "divide"
        yield f"tp={tp} does not {relation} num_query_groups={groups}"
    elif limits.qkv_rows is not None and limits.qkv_rows % tp:
        yield f"tp={tp} does not divide the {limits.qkv_rows} rows of queries, keys and values"
    for name in ("ffn_hidden_size", "shared_ffn_hidden_size"):
        width = getattr(limits, name)
        if width is not None and width % tp:
            yield f"tp={tp} does not divide {name}={width}"
    expert_tp, width = limits.expert_tp or tp, limits.expert_ffn_hidden_size
    if width is not None and width % expert_tp:
        yield f"expert tp={expert_tp} does not divide expert_ffn_hidden_size={width}"
    if limits.padded_vocab_size is not None and limits.padded_vocab_size % tp:
        yield (
            f"tp={tp} does not divide the padded vocabulary of {limits.padded_vocab_size} rows, "
            "which may not change in a running job"
        )
    if limits.is_sequence_parallel and limits.seq_length is not None and tp > 1:
        # Context parallelism leaves each rank a part, of which sequence parallelism takes parts.
        if limits.seq_length % (tp * degrees.cp):
            parts = f"tp={tp}" if degrees.cp == 1 else f"tp*cp={tp}*{degrees.cp}"
            yield (f"{parts} does not divide seq_length={limits.seq_length} (sequence parallelism)")


def _pipeline(degrees: Degrees, limits: ModelLimits) -> Iterator[str]:
    pp, vpp = degrees.pp, degrees.vpp
    if vpp > 1 and pp < limits.min_pp_with_vpp:
        yield f"vpp={vpp} needs pp of {limits.min_pp_with_vpp} or more"
    if limits.num_layers is None:
        return
    pp_of, vpp_of = limits.own_stages or (0, 0)
    if vpp_of and pp == pp_of:
        if vpp != vpp_of:
            yield f"pp={pp} has vpp={vpp_of} by the script's own layout of stages, not vpp={vpp}"
        return
    is_ended = limits.first_stage_layers is not None or limits.last_stage_layers is not None
    if is_ended and pp_of in (0, pp):
        yield from _uneven_stages(degrees, limits, limits.num_layers)
        return
    layers = limits.num_layers + limits.extra_layers
    counted = f"num_layers={limits.num_layers}" + (
        f" plus {limits.extra_layers} (embedding and loss count)" if limits.extra_layers else ""
    )
    stages = f"pp={pp}" if vpp == 1 else f"pp*vpp={pp}*{vpp}"
    if layers % (pp * vpp) == 0 and not is_ended:
        return
    if not limits.has_uneven_stages:
        yield f"{stages} does not divide {counted}"
    elif limits.num_layers < pp * vpp:
        yield f"{stages} is more than num_layers={limits.num_layers}"


def divisors(number: int) -> list[int]:
    """Return the divisors, ascending."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def stage_counts(layers: int, limits: ModelLimits) -> list[int]:
    """Return the numbers of pipeline stages to try, ascending: divisors of all that counts as a
    layer, where stages may be uneven also the fewest for each number of layers of the largest one,
    and the script's own."""
    counted = layers + limits.extra_layers
    found = {n for n in range(1, counted + 1) if counted % n == 0}
    if limits.has_uneven_stages:
        found |= {-(-layers // largest) for largest in range(1, layers + 1)}
        found |= {limits.own_stages[0]} if limits.own_stages else set()
    return sorted(found)


def stage_sizes(layers: int, pp: int, vpp: int = 1, predicted: int = 0) -> tuple[int, ...]:
    """Return the layers of each of ``pp * vpp`` virtual stages, in the order of the layers.

    Ranks are as even as can be where embedding, head and each of ``predicted`` layers for further
    tokens, which the last one has, count as a layer too; but none has more layers than the even
    share, rounded up. Later ranks have more of the rest: they keep fewer activations.
    """
    most = -(-(layers + predicted) // pp)
    ranks = [vpp] * pp
    weights = [vpp + (rank == 0) + (rank == pp - 1) * (1 + predicted) for rank in range(pp)]
    turns = [*range(pp - 2, 0, -1), *dict.fromkeys((pp - 1, 0))]
    for _ in range(layers - pp * vpp):
        rank = min((r for r in turns if ranks[r] < most), key=lambda r: weights[r])
        ranks[rank] += 1
        weights[rank] += 1
    chunks = []
    for rank, size in enumerate(ranks):
        each, rest = divmod(size, vpp)
        # Away from the embedding and from the head.
        begin = 0 if rank == pp - 1 else vpp - rest
        chunks.append([each + (begin <= chunk < begin + rest) for chunk in range(vpp)])
    return tuple(chunk[turn] for turn in range(vpp) for chunk in chunks)


def _sharded(degrees: Degrees, limits: ModelLimits) -> Iterator[str]:
    """Yield conflicts of a pipeline with ZeRO, or with its division of layers.

    Source: ``PipelineEngine.__init__`` of deepspeed/runtime/pipe/engine.py, and
    ``PipelineModule._partition_layers``: stages without layers have nothing to optimize.
    """
    pp, is_in_stages = degrees.pp, degrees.pp > 1 or limits.is_in_stages
    if limits.most_pp is not None and pp > limits.most_pp:
        yield f"pp={pp} is more than the {limits.most_pp} layers that stages are made of"
    if is_in_stages and degrees.tp > 1 and limits.no_tp_in_stages:
        yield f"tp={degrees.tp} with a pipeline (pp={pp}): {limits.no_tp_in_stages}"
    stage = limits.sharding.on(degrees.world_size) if limits.sharding is not None else 0
    if is_in_stages and stage > MOST_SHARDED_WITH_STAGES:
        yield (
            f"ZeRO stage {stage} on {degrees.world_size} ranks, where a pipeline (pp={pp}) goes "
            "with stages 0 and 1"
        )


def spill_refusal(degrees: Degrees, limits: ModelLimits, offload: Offload | None) -> str | None:
    """Return the reason against this state in host memory at these degrees, or None.

    Source: ``_configure_zero_optimizer`` of deepspeed/runtime/engine.py: ZeRO alone offloads, and
    stage 3 alone the weights.
    """
    if offload in (None, "none") or limits.sharding is None:
        return None
    stage, needed = limits.sharding.on(degrees.world_size), 3 if offload == "parameters" else 1
    if stage < needed:
        return (
            f"offload={offload} needs ZeRO stage {needed}, and {degrees.world_size} ranks have "
            f"stage {stage}"
        )
    return None


def _uneven_stages(degrees: Degrees, limits: ModelLimits, layers: int) -> Iterator[str]:
    """Yield reasons against a first or last stage with another number of layers."""
    ends = [n for n in (limits.first_stage_layers, limits.last_stage_layers) if n is not None]
    if degrees.pp == 1:
        # One stage is the first and the last: Megatron-LM takes what it says of the last.
        ends = ends[-1:]
    stages, rest = degrees.pp - len(ends), layers - sum(ends)
    if min(ends) < 1:
        yield f"{min(ends)} layers of the first or last pipeline stage; it needs 1 or more"
    elif stages < 0 or rest < 0 or bool(stages) != bool(rest):
        yield f"{max(rest, 0)} of {layers} layers are left for {max(stages, 0)} middle stages"
    elif stages and rest % stages:
        yield f"the {stages} middle stages do not divide the {rest} layers that are left for them"
    else:
        parts = [*ends, *([rest // stages] if stages else [])]
        for part in parts:
            if part % degrees.vpp:
                yield f"vpp={degrees.vpp} does not divide the {part} layers of a pipeline stage"


def chunk_group(degrees: Degrees, limits: ModelLimits, micro: int) -> int:
    """Return the micro-batches of a virtual stage at once: the stated number if it suits all
    batches, else PP.

    Source: ``forward_backward_pipelining_with_interleaving`` of Megatron-LM's schedules.py.
    """
    stated = limits.chunk_group
    sizes = (limits.global_batch_size, *limits.ramp_batch_sizes)
    counts = [-(-size // (micro * degrees.dp)) for size in sizes if size]
    if limits.eval_batch_size:
        passes = _evaluation_passes(limits.eval_batch_size, degrees, limits, micro)
        counts += [] if passes is None else [passes]
    fits = (
        stated is not None
        and bool(counts)
        and all(_interleaves(n, degrees.pp, stated) for n in counts)
    )
    return stated if stated is not None and fits else degrees.pp


def _interleaves(micro_batches: int, pp: int, group: int) -> bool:
    return pp <= group <= micro_batches and not 0 < micro_batches % group < pp


def _batch(degrees: Degrees, limits: ModelLimits, micro: int | None) -> Iterator[str]:
    group = chunk_group(degrees, limits, micro or 1)
    yield from _evaluation(degrees, limits, micro or 1)
    if limits.evaluates_one_micro_batch and limits.eval_batch_size is None and degrees.vpp > 1:
        yield (
            f"an evaluation has one micro-batch a replica, which is no multiple of pp={degrees.pp} "
            f"that vpp={degrees.vpp} needs (--eval-global-batch-size states more)"
        )
    if limits.global_batch_size is None:
        return
    for batch in (limits.global_batch_size, *limits.ramp_batch_sizes):
        once = (micro or 1) * degrees.dp
        name = "global_batch_size" if batch == limits.global_batch_size else "ramp-up batch size"
        if batch % once and not _is_dealt(batch, degrees, limits, micro):
            factor = f"micro_batch_size*dp={micro}*{degrees.dp}" if micro else f"dp={degrees.dp}"
            is_many = limits.has_uneven_shares and micro and batch % micro == 0
            yield f"{factor} {'is more than' if is_many else 'does not divide'} {name}={batch}"
        elif micro and degrees.vpp > 1 and not _interleaves(-(-batch // once), degrees.pp, group):
            yield (
                f"{-(-batch // once)} micro-batches a replica are not a multiple of "
                f"pp={degrees.pp}, which vpp={degrees.vpp} needs"
            )


def _is_dealt(batch: int, degrees: Degrees, limits: ModelLimits, micro: int | None) -> bool:
    """Whether each replica has a micro-batch of a batch, where DP need not divide it."""
    if not limits.has_uneven_shares or micro is None:
        return limits.has_uneven_shares and batch >= degrees.dp  # the micro-batch follows from DP
    return batch % micro == 0 and batch >= micro * degrees.dp


def _evaluation_passes(batch: int, degrees: Degrees, limits: ModelLimits, micro: int) -> int | None:
    """Return the passes of an evaluation's step, whose micro-batch may be a part of the training's;
    None: DP does not divide its batch."""
    each, rest = divmod(batch, degrees.dp)
    if not rest:
        return each // gcd(each, micro)
    is_dealt = _is_dealt(batch, degrees, limits, micro)
    return -(-batch // (micro * degrees.dp)) if is_dealt else None


def _evaluation(degrees: Degrees, limits: ModelLimits, micro: int) -> Iterator[str]:
    """Yield reasons against the samples of an evaluation's step."""
    batch = limits.eval_batch_size
    if batch is None:
        return
    passes = _evaluation_passes(batch, degrees, limits, micro)
    each, rest = divmod(batch, degrees.dp)
    if not rest and each % micro and limits.eval_micro_batch_stays:
        yield (
            f"micro_batch_size*dp={micro}*{degrees.dp} does not divide the evaluation's batch of "
            f"{batch} samples, whose loss is a mean over micro-batches"
        )
    if passes is None:
        yield (
            f"dp={degrees.dp} does not divide the evaluation's batch of {batch} samples, which "
            "stays what it is (--eval-global-batch-size states it from the start)"
        )
    elif degrees.vpp > 1 and not _interleaves(
        passes, degrees.pp, chunk_group(degrees, limits, micro)
    ):
        yield (
            f"{passes} micro-batches a replica of the evaluation are not a multiple of "
            f"pp={degrees.pp}, which vpp={degrees.vpp} needs"
        )


def _context_and_experts(degrees: Degrees, limits: ModelLimits) -> Iterator[str]:
    cp, ep, experts = degrees.cp, degrees.ep, limits.num_experts
    if cp > 1 and limits.seq_length is not None and limits.seq_length % (2 * cp):
        yield f"2*cp={2 * cp} does not divide seq_length={limits.seq_length}"
    if ep == 1 and (limits.expert_tp is None or experts is None):
        return  # a dense model's experts are cut as the rest
    expert_tp = limits.expert_tp or degrees.tp
    if experts is not None and experts % ep:
        yield f"ep={ep} does not divide num_experts={experts}"
    if degrees.world_size % (expert_tp * ep * degrees.pp):
        yield (
            f"experts take TP*EP*PP = {expert_tp}*{ep}*{degrees.pp} ranks, "
            f"which does not divide {degrees.world_size}"
        )


def _optimizer_copies(degrees: Degrees, limits: ModelLimits) -> Iterator[str]:
    copies, replicas = limits.optimizer_instances, degrees.dp * degrees.cp
    if replicas % copies:
        yield f"{copies} instances of the distributed optimizer do not divide dp*cp={replicas}"
    elif limits.num_experts is not None:
        expert_tp = limits.expert_tp or degrees.tp
        replicas = degrees.world_size // (expert_tp * degrees.ep * degrees.pp)
        if replicas % copies:
            yield (
                f"{copies} instances of the distributed optimizer do not divide the {replicas} "
                "data-parallel replicas of the experts"
            )


@dataclass(frozen=True, slots=True)
class DegreeRequest:
    """Requested degrees.

    ``dp`` None: as many replicas as fit; ``cp``, ``ep``, ``micro_batch_size``, ``recompute``,
    ``offload`` None: the job's own.
    """

    tp: int = 1
    pp: int = 1
    dp: int | None = None
    vpp: int = 1
    cp: int | None = None
    ep: int | None = None
    micro_batch_size: int | None = None
    recompute: Recompute | None = None
    offload: Offload | None = None

    def __post_init__(self) -> None:
        for part, kinds in (("recompute", RECOMPUTES), ("offload", OFFLOADS)):
            kind = getattr(self, part)
            if kind is not None and kind not in kinds:
                raise UsageError(f"{part}={kind!r} is none of {', '.join(kinds)}.")
        for axis in (*AXES, "micro_batch_size"):
            size = getattr(self, axis)
            if size is not None and (
                isinstance(size, bool) or not isinstance(size, int) or size < 1
            ):
                raise UsageError(f"{axis}={size!r} is not a whole number of 1 or more.")

    def __str__(self) -> str:
        sizes = {**asdict(self), "vpp": self.vpp if self.vpp > 1 else None}
        text = "·".join(f"{a.upper()}{sizes[a]}" for a in AXES if sizes[a] is not None)
        text += f"·MBS{self.micro_batch_size}" if self.micro_batch_size else ""
        text += f"·recompute={self.recompute}" if self.recompute else ""
        return text + (f"·offload={self.offload}" if self.offload else "")


_WORD = re.compile(
    r"(tp|pp|dp|vpp|cp|ep|mbs|micro_batch_size)=?(\d+)|(recompute|offload)=([a-z-]+)"
)
_NAMES = (*AXES, "micro_batch_size", "recompute", "offload")


def parse_request(value: object) -> DegreeRequest:
    """Read ``"tp2 pp1"``, ``"tp=2,pp=1"``, ``"TP2·PP1·MBS4"``, ``"tp2 recompute=full"`` or ``{"tp":
    2, "micro_batch_size": 4}``.

    Missing TP and PP are 1.

    Raises:
        UsageError: Anything else, by name.
    """
    if isinstance(value, DegreeRequest):
        return value
    stated: dict[str, Any] = {}
    if isinstance(value, Mapping):
        stated = {str(key): size for key, size in value.items()}
    elif isinstance(value, str) and value.strip():
        for word in re.split(r"[\s,;·]+", value.strip().lower()):
            match = _WORD.fullmatch(word)
            name = "" if match is None else (match[1] or match[3])
            name = name.replace("mbs", "micro_batch_size")
            if match is None or name in stated:
                fault = "is not a degree" if match is None else "stands there twice"
                raise UsageError(f"{word!r} in {value!r} {fault}; write for example 'tp2 pp1'.")
            stated[name] = match[4] or int(match[2])
    else:
        raise UsageError(f"{value!r} are not degrees; write for example 'tp2 pp1'.")
    unknown = sorted(set(stated) - set(_NAMES))
    if unknown:
        known = ", ".join(_NAMES)
        raise UsageError(f"{unknown[0]!r} in {value!r} is not an axis; known are {known}.")
    return DegreeRequest(**stated)
