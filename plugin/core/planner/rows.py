"""Measured training steps, as a table states them, and what it leaves open."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from scalai.core.degrees.degrees import Degrees, ModelLimits, refusal
from scalai.core.degrees.passes import RECOMPUTES
from scalai.core.errors import RefusedError, ScalaiError
from scalai.core.planner.columns import Layout, Workload, columns_of
from scalai.core.planner.devices import Device, device_named
from scalai.core.planner.memory import fits, is_too_large
from scalai.core.planner.model import ModelShape
from scalai.core.planner.time import step_time

NEEDED = (
    "layers", "hidden", "heads", "seq", "vocab", "gpus", "gpu_type", "tp", "pp", "dp",
    "global_batch", "iteration_time_s",
)  # fmt: skip
"""Columns that every row has a value in."""
OPEN_MICRO_BATCHES = (1, 2, 4, 8, 16)
FUSED_SINCE = ("h100", "h200", "h800", "h20", "b200", "gb200", "mi300x")
"""Devices of which there is no software in use without fused attention."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured step.

    Attributes:
        source: Who measured it, of which cluster and software.
        cluster: Source and device: what one calibration is about.
        model: What is the same in a group of one model.
        work, device, layout: What ran; None where the row cannot be taken.
        seconds: What it took; 0 where the row does not say.
        refused: Why the row cannot be taken, or is held infeasible; empty: it is neither.
    """

    source: str
    cluster: tuple[str, str]
    model: tuple[str, ...]
    gpus: int
    work: Workload | None
    device: Device | None
    layout: Layout | None
    seconds: float
    refused: str = ""

    @property
    def case(self) -> tuple[Workload, Device, Layout]:
        """What ``columns_of`` takes."""
        assert self.work is not None and self.device is not None and self.layout is not None
        return self.work, self.device, self.layout

    @property
    def group(self) -> tuple[object, ...]:
        """Rows of one group differ in nothing but their layout: one of them is the best."""
        seq = self.work.shape.seq if self.work else 0
        batch = self.work.global_batch if self.work else 0
        return (*self.cluster, *self.model, seq, batch, self.gpus)


def read_rows(lines: Sequence[Mapping[str, str]]) -> tuple[Row, ...]:
    """Read the lines of a table; a line that cannot be taken is a row that says why."""
    return tuple(_read(line, number) for number, line in enumerate(lines, 2))


def _read(line: Mapping[str, str], number: int) -> Row:
    source, kind = line.get("source", ""), (line.get("gpu_type") or "").strip()
    cluster = (source, kind.lower())
    model = tuple(
        line.get(name) or "" for name in ("layers", "hidden", "heads", "ffn", "kv_heads", "vocab")
    )
    try:
        return _taken(line, source, cluster, model)
    except (ScalaiError, ValueError, ArithmeticError) as error:
        gpus, seconds = line.get("gpus") or "", line.get("iteration_time_s") or ""
        return Row(
            source, cluster, model, int(gpus) if gpus.isdecimal() else 0, None, None, None,
            _seconds(seconds), f"line {number}: {error}",
        )  # fmt: skip


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return seconds if 0 < seconds < inf else 0.0


def _taken(
    line: Mapping[str, str], source: str, cluster: tuple[str, str], model: tuple[str, ...]
) -> Row:
    missing = [name for name in NEEDED if not (line.get(name) or "").strip()]
    if missing:
        raise RefusedError(f"{', '.join(missing)} is missing")

    def integer(name: str, default: int) -> int:
        text = (line.get(name) or "").strip()
        return int(float(text)) if text else default

    notes, kind = (line.get("notes") or "").lower(), line["gpu_type"]
    device = device_named(kind)
    experts = integer("experts", 0)
    shape = _shape(integer, experts)
    precision = (line.get("precision") or "bf16").strip().lower()
    is_fused = "flash" in notes or device.name.partition("-")[0] in FUSED_SINCE
    work = Workload(
        shape, integer("global_batch", 0), precision, is_fused, not shape.is_gated,
        gathers_per_layer=1 if "fsdp" in notes else 4,
    )  # fmt: skip
    device.peak(precision)
    degrees = Degrees(
        integer("tp", 1), integer("pp", 1), integer("dp", 1), integer("vpp", 1),
        integer("cp", 1), integer("ep", 1),
    )  # fmt: skip
    gpus, seconds = integer("gpus", 0), float(line["iteration_time_s"])
    if degrees.world_size != gpus:
        raise RefusedError(f"{degrees} takes {degrees.world_size} devices, but gpus={gpus}")
    if not 0 < seconds < inf:
        raise RefusedError(f"iteration_time_s={seconds} is no time")
    sharding = integer("zero_stage", 0)
    if sharding not in range(4):
        raise RefusedError(f"zero_stage={sharding} is none of 0 to 3")
    base = Layout(degrees, 1, "none", sharding, (line.get("seq_parallel") or "0") == "1")
    layouts = _layouts(base, work, line)
    layout = _best(layouts, work, device)
    row = Row(source, cluster, model, gpus, work, device, layout, seconds)
    if is_too_large(columns_of([row.case]))[0]:
        return replace(row, refused=f"{layout} is held not to fit on {device.name}")
    return row


def _shape(integer: Callable[[str, int], int], experts: int) -> ModelShape:
    layers, hidden, heads = integer("layers", 0), integer("hidden", 0), integer("heads", 0)
    if not layers or not hidden or not heads:
        raise RefusedError(f"layers={layers}, hidden={hidden}, heads={heads} is no model")
    is_gated = bool(integer("gated_mlp", 0))
    ffn = integer("ffn", 4 * hidden)
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, vocab=integer("vocab", 0),
        seq=integer("seq", 0), ffn=ffn, kv_groups=integer("kv_heads", heads),
        head_dim=integer("head_dim", hidden // heads), is_gated=is_gated, is_tied=not is_gated,
        positions=0 if is_gated else integer("seq", 0), has_bias=not is_gated,
        has_norm_bias=not is_gated, experts=experts, moe_layers=layers if experts else 0,
        top_k=integer("top_k", 2) if experts else 0,
        expert_ffn=integer("expert_ffn", ffn) if experts else 0,
    )  # fmt: skip


def _layouts(base: Layout, work: Workload, line: Mapping[str, str]) -> list[Layout]:
    """Return the layouts that a row may mean: where micro-batch, virtual stages or recomputation
    are not said, all that are valid."""
    degrees, shape = base.degrees, work.shape
    each, rest = divmod(work.global_batch, degrees.dp)
    if rest:
        raise RefusedError(f"dp={degrees.dp} does not divide global_batch={work.global_batch}")

    def said(name: str) -> str:
        return (line.get(name) or "").strip()

    micros = [int(float(said("micro_batch")))] if said("micro_batch") else [
        micro for micro in OPEN_MICRO_BATCHES if each % micro == 0
    ]  # fmt: skip
    stage = max(shape.layers // degrees.pp, 1)
    chunks = [degrees.vpp] if said("vpp") or degrees.pp == 1 else [
        vpp for vpp in range(1, stage + 1) if stage % vpp == 0
    ]  # fmt: skip
    again = [said("recompute").lower()] if said("recompute") else list(RECOMPUTES)
    if not set(again) <= set(RECOMPUTES):
        raise RefusedError(f"recompute={again[0]!r} is none of {', '.join(RECOMPUTES)}")
    # What ran is valid: the stricter rule for virtual stages is for those that a row leaves open.
    limits = limits_of(work)
    if said("vpp"):
        limits = replace(limits, global_batch_size=None)
    parts = degrees.pp * degrees.vpp
    if shape.layers % parts:
        extra = [n for n in (1, 2) if (shape.layers + n) % parts == 0]
        # Embedding and loss may count as layers; DeepSpeed's stages may be unequal.
        unequal: dict[str, object] = {"extra_layers": extra[0]} if extra else {"num_layers": None}
        if extra or degrees.vpp == 1:
            limits = limits_of(work, **{"global_batch_size": limits.global_batch_size, **unequal})
            chunks = [degrees.vpp]
    found, why = [], "nothing divides"
    for micro in micros:
        for vpp in chunks:
            tried = replace(degrees, vpp=vpp)
            fault = refusal(tried, limits, micro)
            if each % micro:
                fault = f"micro_batch={micro} does not divide the {each} samples of a replica"
            why = fault or why
            if fault is None:
                found += [
                    replace(base, degrees=tried, micro_batch=micro, recompute=kind)  # type: ignore[arg-type]
                    for kind in again
                ]
    if not found:
        raise RefusedError(f"{degrees} is not valid: {why}")
    return found


def limits_of(work: Workload, **more: object) -> ModelLimits:
    """Return the limits of a model's shape; ``more`` are others beside it."""
    shape = work.shape
    limits = ModelLimits(
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_groups,
        num_layers=shape.layers,
        global_batch_size=work.global_batch,
        seq_length=shape.seq,
        num_experts=shape.experts or None,
        expert_tp=work.expert_tp,
        ffn_hidden_size=shape.ffn if shape.moe_layers < shape.layers else None,
        expert_ffn_hidden_size=shape.expert_ffn or None,
        shared_ffn_hidden_size=shape.shared_ffn or None,
    )
    return replace(limits, **more)  # type: ignore[arg-type]


def _best(layouts: Sequence[Layout], work: Workload, device: Device) -> Layout:
    """Return the layout that the table alone holds fastest, of those that fit if any do."""
    if len(layouts) == 1:
        return layouts[0]
    x = columns_of([(work, device, layout) for layout in layouts])
    seconds = step_time(x).total
    is_fit = fits(x)
    return layouts[int(np.argmin(np.where(is_fit | ~is_fit.any(), seconds, np.inf)))]
