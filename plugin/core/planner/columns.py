"""Many layouts of a training step as columns of numbers, so that one formula computes them all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from scalai.core.degrees import Degrees
from scalai.core.errors import UsageError
from scalai.core.passes import RECOMPUTES, Recompute
from scalai.core.planner.devices import PRECISIONS, Device
from scalai.core.planner.model import LARGEST, ModelShape

Floats = npt.NDArray[np.float64]
NO_SHARDING, OPTIMIZER, GRADIENTS, WEIGHTS = range(4)
"""What data-parallel ranks keep a part of: nothing; as ZeRO 1 (Megatron-LM's distributed optimizer)
the optimizer's state; as ZeRO 2 the gradients too; as ZeRO 3 the weights too."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step computes, whatever its layout.

    Attributes:
        is_attention_fused: Whether attention's scores stay on the chip (FlashAttention).
        has_dropout: Whether dropouts keep their masks for the backward pass.
        gradient_bytes: Of one gradient when it crosses; None: 4 with bf16 and 2 with fp16, as
            Megatron-LM has it (``accumulate_allreduce_grads_in_fp32``).
        gathers_per_layer: Into how many collectives the sharded weights of a layer are cut: 1 where
            it is gathered as a whole (FSDP), 4 where each matrix is (ZeRO 3).
    """

    shape: ModelShape
    global_batch: int
    precision: str = "bf16"
    is_attention_fused: bool = True
    has_dropout: bool = True
    gradient_bytes: int | None = None
    gathers_per_layer: int = 1

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision {self.precision!r} is none of {', '.join(PRECISIONS)}.")
        if not 1 <= self.global_batch <= LARGEST:
            raise UsageError(f"a global batch of {self.global_batch} samples is no batch.")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the step is spread over devices."""

    degrees: Degrees
    micro_batch: int
    recompute: Recompute = "none"
    sharding: int = OPTIMIZER
    is_sequence_parallel: bool = False

    def __str__(self) -> str:
        words = [f"{self.degrees}·MBS{self.micro_batch}"]
        words += [f"recompute {self.recompute}"] * (self.recompute != "none")
        words += [["no sharding", "", "ZeRO 2", "ZeRO 3"][self.sharding]]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class Columns:
    """Model, layout and device of every case, [cases] or [] where all have the same.

    Rates are in FLOP/s and bytes/s, sizes in bytes; ``recompute`` is 0, 1, 2 for none, selective,
    full.
    """

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
    layer_parameters: Floats
    """Of one layer without its routed experts, averaged over the layers."""
    expert_parameters: Floats
    """Of all routed experts of one layer, averaged over the layers."""
    final_norm: Floats
    global_batch: Floats
    is_attention_fused: Floats
    has_dropout: Floats
    weight_bytes: Floats
    gradient_bytes: Floats
    gathers_per_layer: Floats
    tp: Floats
    pp: Floats
    dp: Floats
    vpp: Floats
    cp: Floats
    ep: Floats
    micro_batch: Floats
    recompute: Floats
    sharding: Floats
    is_sequence_parallel: Floats
    peak: Floats
    half_peak: Floats
    """Of attention and the head, which stay in 16 bit where layers are computed in 8."""
    matrix_efficiency: Floats
    memory: Floats
    memory_bandwidth: Floats
    link: Floats
    network: Floats
    per_host: Floats

    @property
    def micro_batches(self) -> Floats:
        """Of one replica and step."""
        return self.global_batch / (self.micro_batch * self.dp)

    @property
    def tokens(self) -> Floats:
        """Of one micro-batch, on one context-parallel rank."""
        return self.seq * self.micro_batch / self.cp

    @property
    def world_size(self) -> Floats:
        return self.tp * self.pp * self.dp * self.cp


def columns_of(cases: Sequence[tuple[Workload, Device, Layout]]) -> Columns:
    """Return the columns of cases of any models and devices."""
    rows = [
        {**_work_values(work), **_device_values(device, work.precision), **_layout_values(layout)}
        for work, device, layout in cases
    ]
    return Columns(**{f.name: np.array([row[f.name] for row in rows]) for f in fields(Columns)})


def grid(work: Workload, device: Device, layouts: Mapping[str, Floats]) -> Columns:
    """Return the columns of one model on one device in many layouts, given by column."""
    same = {**_work_values(work), **_device_values(device, work.precision)}
    return Columns(**{name: np.asarray(value) for name, value in same.items()}, **layouts)


def _work_values(work: Workload) -> dict[str, float]:
    shape, part = work.shape, work.shape.parameters
    names = {f.name for f in fields(ModelShape)} & {f.name for f in fields(Columns)}
    moe = shape.moe_layers / shape.layers
    both = (1 - moe) * part.mlp + moe * (part.router + part.shared_expert)
    gradient = 4 if work.precision in ("bf16", "fp8", "fp32") else 2
    return {
        **{name: float(getattr(shape, name)) for name in names},
        "layer_parameters": part.attention + part.norms + both,
        "expert_parameters": moe * shape.experts * part.expert,
        "final_norm": float(part.final_norm),
        "global_batch": float(work.global_batch),
        "is_attention_fused": float(work.is_attention_fused),
        "has_dropout": float(work.has_dropout),
        "weight_bytes": 4.0 if work.precision == "fp32" else 2.0,
        "gradient_bytes": float(work.gradient_bytes or gradient),
        "gathers_per_layer": float(work.gathers_per_layer),
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
    }


def _layout_values(layout: Layout) -> dict[str, float]:
    degrees = layout.degrees.to_json()
    return {
        **{axis: float(degrees.get(axis, 1)) for axis in ("tp", "pp", "dp", "vpp", "cp", "ep")},
        "micro_batch": float(layout.micro_batch),
        "recompute": float(RECOMPUTES.index(layout.recompute)),
        "sharding": float(layout.sharding),
        "is_sequence_parallel": float(layout.is_sequence_parallel and layout.degrees.tp > 1),
    }
