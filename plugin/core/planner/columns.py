"""Many layouts of a training step as columns of numbers, computed by one formula."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import OFFLOADS, RECOMPUTES, Offload, Recompute
from scalai.core.errors import UsageError
from scalai.core.planner.devices import PRECISIONS, Device
from scalai.core.planner.shape import LARGEST, ModelShape

Floats = npt.NDArray[np.float64]
NO_SHARDING, OPTIMIZER, GRADIENTS, WEIGHTS = range(4)
"""State sharded over data-parallel ranks: none; the optimizer's (ZeRO 1, Megatron-LM's distributed
optimizer); the gradients too (ZeRO 2); the weights too (ZeRO 3)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Computation of a step, whatever its layout.

    Attributes:
        is_attention_fused: Attention's scores stay on the chip (FlashAttention).
        has_dropout: Dropouts keep their masks for the backward pass.
        gradient_bytes: Bytes of one gradient in transfer; None: 4 with bf16 and 2 with fp16, as in
            Megatron-LM (``accumulate_allreduce_grads_in_fp32``).
        has_flat_masters: Masters, and their updates in their precision, are kept beside 16-bit
            weights, and with ZeRO also beside fp32 weights, as in DeepSpeed.
        bucket_bytes: Bytes of ZeRO's buckets for the reduction of gradients, always allocated.
        gathers_per_layer: Collectives for the sharded weights of a layer: 1 for a whole layer
            (FSDP), 4 for its matrices (ZeRO 3).
        expert_tp: Tensor parallelism of the experts; None: the model's.
        expert_capacity: Rows computed by experts over copies of tokens sent to them: 1 without
            drops and padding, the capacity factor with padding.
    """

    shape: ModelShape
    global_batch: int
    precision: str = "bf16"
    is_attention_fused: bool = True
    has_dropout: bool = True
    gradient_bytes: int | None = None
    gathers_per_layer: int = 1
    expert_tp: int | None = None
    expert_capacity: float = 1.0
    has_flat_masters: bool = False
    bucket_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision {self.precision!r} is none of {', '.join(PRECISIONS)}.")
        if not 1 <= self.global_batch <= LARGEST:
            raise UsageError(f"a global batch of {self.global_batch} samples is no batch.")
        if self.expert_tp is not None and self.expert_tp < 1:
            raise UsageError(f"expert_tp={self.expert_tp} is not a degree; use 1 or more.")
        if not 0 < self.expert_capacity <= LARGEST:
            raise UsageError(
                f"expert_capacity={self.expert_capacity} is no share; use a number above 0."
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """Spread of the step over devices."""

    degrees: Degrees
    micro_batch: int
    recompute: Recompute = "none"
    sharding: int = OPTIMIZER
    is_sequence_parallel: bool = False
    offload: Offload = "none"

    def __str__(self) -> str:
        words = [f"{self.degrees}·MBS{self.micro_batch}"]
        words += [f"recompute {self.recompute}"] * (self.recompute != "none")
        words += [f"offload {self.offload}"] * (self.offload != "none")
        words += [["no sharding", "", "ZeRO 2", "ZeRO 3"][self.sharding]]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class ModelColumns:
    """Sizes of the models, as of ``ModelShape``."""

    layers: Floats
    hidden: Floats
    heads: Floats
    ffn: Floats
    vocab: Floats
    seq: Floats
    kv_groups: Floats
    head_dim: Floats
    positions: Floats
    is_gated: Floats
    is_tied: Floats
    experts: Floats
    moe_layers: Floats
    top_k: Floats
    expert_ffn: Floats
    shared_ffn: Floats


@dataclass(frozen=True, slots=True)
class PartColumns:
    """Numbers of parameters by part."""

    dense_cut: Floats
    """Parameters of a layer without experts, cut by tensor parallelism."""
    dense_whole: Floats
    """Parameters of a layer without experts, whole on each TP rank."""
    moe_cut: Floats
    """Cut parameters of a layer with experts, except the routed ones."""
    moe_whole: Floats
    expert_cut: Floats
    """Cut parameters of one routed expert."""
    expert_whole: Floats
    final_norm: Floats


@dataclass(frozen=True, slots=True)
class WorkColumns:
    """The computation, as of ``Workload``; sizes in bytes."""

    global_batch: Floats
    expert_tp: Floats
    """0: the model's."""
    expert_capacity: Floats
    is_attention_fused: Floats
    has_dropout: Floats
    weight_bytes: Floats
    gradient_bytes: Floats
    gathers_per_layer: Floats
    has_flat_masters: Floats
    bucket_bytes: Floats


@dataclass(frozen=True, slots=True)
class LayoutColumns:
    """The layouts."""

    tp: Floats
    pp: Floats
    dp: Floats
    vpp: Floats
    cp: Floats
    ep: Floats
    micro_batch: Floats
    recompute: Floats
    """0, 1, 2: none, selective, full."""
    sharding: Floats
    is_sequence_parallel: Floats
    offload: Floats
    """0 to 3: none, optimizer-half, optimizer, parameters."""


@dataclass(frozen=True, slots=True)
class DeviceColumns:
    """Rates in FLOP/s and bytes/s, memory in bytes; ``host_memory`` is the device's share."""

    peak: Floats
    half_peak: Floats
    """FLOP/s of attention and the head, in 16 bit even beside 8-bit layers."""
    matrix_efficiency: Floats
    memory: Floats
    memory_bandwidth: Floats
    link: Floats
    network: Floats
    per_host: Floats
    host_memory: Floats


@dataclass(frozen=True, slots=True)
class Cases:
    """Model, layout and device of every case: columns [cases], or [] if common to all."""

    model: ModelColumns
    parts: PartColumns
    work: WorkColumns
    layout: LayoutColumns
    device: DeviceColumns

    def select(self, numbers: Sequence[int]) -> "Cases":
        """Return some of the cases."""
        chosen = list(numbers)
        tables = {}
        for of in fields(self):
            table = getattr(self, of.name)
            columns = {f.name: getattr(table, f.name) for f in fields(table)}
            picked = {name: c[chosen] if np.ndim(c) else c for name, c in columns.items()}
            tables[of.name] = type(table)(**picked)
        return Cases(**tables)

    @property
    def micro_batches(self) -> Floats:
        """Micro-batches of one replica and step; where shares are uneven, of the longest."""
        return np.ceil(self.work.global_batch / (self.layout.micro_batch * self.layout.dp))

    @property
    def tokens(self) -> Floats:
        """Tokens of one micro-batch, on one context-parallel rank."""
        return self.model.seq * self.layout.micro_batch / self.layout.cp

    @property
    def etp(self) -> Floats:
        """Tensor parallelism of the experts."""
        return np.where(self.work.expert_tp > 0, self.work.expert_tp, self.layout.tp)

    @property
    def replicas(self) -> Floats:
        """Ranks with equal parameters, experts aside."""
        return self.layout.dp * self.layout.cp

    @property
    def expert_replicas(self) -> Floats:
        """Ranks that share the experts' state, fewer than ``replicas``.

        Without expert parallelism megatron-core spreads it like other state (``allreduce`` of a
        parameter, tensor_parallel/layers.py).
        """
        apart = np.maximum(self.layout.tp * self.replicas / (self.etp * self.layout.ep), 1)
        return np.where(self.layout.ep > 1, apart, self.replicas)

    @property
    def spilled(self) -> Floats:
        """Share of masters and moments in host memory."""
        return np.minimum(self.layout.offload / 2, 1.0)

    @property
    def world_size(self) -> Floats:
        return self.layout.tp * self.layout.pp * self.layout.dp * self.layout.cp


def columns_of(cases: Sequence[tuple[Workload, Device, Layout]]) -> Cases:
    """Return the columns of cases of any models and devices."""
    rows = [
        {**_work_values(work), **_device_values(device, work.precision), **_layout_values(layout)}
        for work, device, layout in cases
    ]
    return _cases({name: np.array([row[name] for row in rows]) for name in rows[0]})


def grid(work: Workload, device: Device, layouts: Mapping[str, Floats]) -> Cases:
    """Return the columns of one model on one device in many layouts, given by column."""
    same = {**_work_values(work), **_device_values(device, work.precision)}
    return _cases({**{name: np.asarray(value) for name, value in same.items()}, **layouts})


Table = TypeVar("Table", ModelColumns, PartColumns, WorkColumns, LayoutColumns, DeviceColumns)


def _cases(columns: Mapping[str, Floats]) -> Cases:
    def of(table: type[Table]) -> Table:
        return table(**{f.name: columns[f.name] for f in fields(table)})

    return Cases(
        of(ModelColumns), of(PartColumns), of(WorkColumns), of(LayoutColumns), of(DeviceColumns)
    )


def _work_values(work: Workload) -> dict[str, float]:
    shape = work.shape
    parts = {"dense": shape.dense_layer, "moe": shape.expert_layer, "expert": shape.expert}
    gradient = 4 if work.precision in ("bf16", "fp8", "fp32") else 2
    return {
        **{f.name: float(getattr(shape, f.name)) for f in fields(ModelColumns)},
        **{f"{name}_cut": float(part.cut) for name, part in parts.items()},
        **{f"{name}_whole": float(part.whole) for name, part in parts.items()},
        "expert_tp": float(work.expert_tp or 0),
        "expert_capacity": work.expert_capacity,
        "final_norm": float(shape.parameters.final_norm),
        "global_batch": float(work.global_batch),
        "is_attention_fused": float(work.is_attention_fused),
        "has_dropout": float(work.has_dropout),
        "weight_bytes": 4.0 if work.precision == "fp32" else 2.0,
        "gradient_bytes": float(work.gradient_bytes or gradient),
        "gathers_per_layer": float(work.gathers_per_layer),
        "has_flat_masters": float(work.has_flat_masters),
        "bucket_bytes": float(work.bucket_bytes),
    }


def _device_values(device: Device, precision: str) -> dict[str, float]:
    return {
        "peak": device.peak(precision),
        "half_peak": device.peak("bf16" if precision == "fp8" else precision),
        "matrix_efficiency": device.matrix_efficiency,
        "memory": device.memory,
        "memory_bandwidth": device.memory_bandwidth,
        "link": device.link,
        "network": device.network,
        "per_host": float(device.per_host),
        "host_memory": device.host_share,
    }


def _layout_values(layout: Layout) -> dict[str, float]:
    degrees = layout.degrees.to_json()
    return {
        **{axis: float(degrees.get(axis, 1)) for axis in ("tp", "pp", "dp", "vpp", "cp", "ep")},
        "micro_batch": float(layout.micro_batch),
        "recompute": float(RECOMPUTES.index(layout.recompute)),
        "sharding": float(layout.sharding),
        "is_sequence_parallel": float(layout.is_sequence_parallel and layout.degrees.tp > 1),
        "offload": float(OFFLOADS.index(layout.offload)),
    }


def first(x: Cases) -> Floats:
    """Return the number of the first stage."""
    return np.zeros_like(x.layout.pp)


def second(x: Cases) -> Floats:
    """Return the number of the second stage, or of the only one."""
    return np.minimum(x.layout.pp - 1, 1)


def last(x: Cases) -> Floats:
    """Return the number of the last stage."""
    return x.layout.pp - 1


def fuller(x: Cases) -> Floats:
    """Return the number of the first stage in the middle with as many layers as the longest."""
    return np.minimum(_short_stages(x) + 1, np.maximum(x.layout.pp - 2, 0))


def has_short_stages(x: Cases) -> bool:
    """Whether a stage in the middle of some case has fewer layers than the longest."""
    return bool(np.any(_short_stages(x) > 0))


def _short_stages(x: Cases) -> Floats:
    """Return how many stages behind the first have a layer less than the longest."""
    lacking, is_twice = _lacking(x)
    return np.maximum(lacking - 2 - 2 * is_twice, 0)


def _lacking(x: Cases) -> tuple[Floats, Floats]:
    """Return how many layers even stages of the longest one's size would have more, and whether
    the ends can give two of them each."""
    longest = np.ceil(x.model.layers / x.layout.pp)
    return x.layout.pp * longest - x.model.layers, np.where(longest - 2 >= x.layout.vpp, 1.0, 0.0)


def layers_of(x: Cases, stage: Floats) -> tuple[Floats, Floats]:
    """Return how many layers of a stage have no experts, and how many do: these are spread evenly,
    those without them first. The stages are those of ``degrees.stage_sizes``."""
    longest, (lacking, is_twice) = np.ceil(x.model.layers / x.layout.pp), _lacking(x)
    short = _short_stages(x)
    begin = longest - (lacking >= 1) - is_twice * (lacking >= 3)
    end = longest - (lacking >= 2) - is_twice * (lacking >= 4)
    middle = longest - (stage <= short)
    layers = np.where(stage == 0, begin, np.where(stage == x.layout.pp - 1, end, middle))
    before = begin + (stage - 1) * longest - np.minimum(stage - 1, short)
    return _kinds(x, np.where(stage == 0, 0.0, before), layers)


def _kinds(x: Cases, before: Floats, layers: Floats) -> tuple[Floats, Floats]:
    """Return how many of the layers behind these have no experts, and how many do."""
    end = np.floor((before + layers) * x.model.moe_layers / x.model.layers)
    moe = end - np.floor(before * x.model.moe_layers / x.model.layers)
    return layers - moe, moe


def parameters_of(x: Cases, stage: Floats) -> tuple[Floats, Floats]:
    """Return the parameters of one rank of a stage: all but the routed experts', and these."""
    return _parameters(x, stage, layers_of(x, stage))


def _parameters(x: Cases, stage: Floats, layers: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    dense, moe = layers
    own = dense * dense_layer(x) + moe * expert_layer(x) + _ends(x, stage)
    return own, moe * experts(x)


def most_parameters(x: Cases) -> tuple[Floats, Floats]:
    """Return the same of the stage that has most of either: the first or, of layers with experts,
    the second, each with as many layers as the longest."""
    layers = np.ceil(x.model.layers / x.layout.pp)

    def of(stage: Floats) -> tuple[Floats, Floats]:
        before = np.minimum(stage * layers, x.model.layers - layers)
        return _parameters(x, stage, _kinds(x, before, layers))

    begin, others = of(first(x)), of(second(x))
    return np.maximum(begin[0], others[0]), np.maximum(begin[1], others[1])


def dense_layer(x: Cases) -> Floats:
    """Return what one rank has of a layer without experts."""
    return x.parts.dense_cut / x.layout.tp + x.parts.dense_whole


def expert_layer(x: Cases) -> Floats:
    """Return what one rank has of a layer with experts, but for the routed ones."""
    return x.parts.moe_cut / x.layout.tp + x.parts.moe_whole


def experts(x: Cases) -> Floats:
    """Return what one rank has of the routed experts of a layer."""
    return x.model.experts / x.layout.ep * (x.parts.expert_cut / x.etp + x.parts.expert_whole)


def _ends(x: Cases, stage: Floats) -> Floats:
    """Embedding and positions of the first stage, head and last norm of the last one; a tied head
    is a second embedding unless one stage has both."""
    embedding = x.model.vocab * x.model.hidden / x.layout.tp
    head = np.where((x.layout.pp == 1) & (x.model.is_tied > 0), 0.0, embedding) + x.parts.final_norm
    start = embedding + x.model.positions * x.model.hidden
    return np.where(stage == 0, start, 0.0) + np.where(stage == x.layout.pp - 1, head, 0.0)
