"""Agreement of predictions with measurements: seconds of steps, and choice of the best layout."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean, median

import numpy as np

from scalai.core.degrees.degrees import Degrees, ModelLimits, refusal
from scalai.core.degrees.passes import RECOMPUTES
from scalai.core.errors import RefusedError, ScalaiError
from scalai.core.planner.columns import Layout, Workload, columns_of
from scalai.core.planner.devices import Device, device_named
from scalai.core.planner.fit import Calibration, calibrate, uncalibrated
from scalai.core.planner.shape import ModelShape
from scalai.core.planner.step_memory import fits, is_too_large
from scalai.core.planner.step_time import step_time

NEEDED = (
    "layers", "hidden", "heads", "seq", "vocab", "gpus", "gpu_type", "tp", "pp", "dp",
    "global_batch", "iteration_time_s",
)  # fmt: skip
"""Cases with a value in every row."""
OPEN_MICRO_BATCHES = (1, 2, 4, 8, 16)
FUSED_SINCE = ("h100", "h200", "h800", "h20", "b200", "gb200", "mi300x")
"""Devices always used with fused attention."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured step.

    Attributes:
        source: Author of the measurement, cluster and software.
        cluster: Source and device: scope of one calibration.
        model: Sizes common to a group of one model.
        work, device, layout: The measured case; None for an unusable row.
        seconds: Measured seconds; 0: absent.
        refused: Reason against the row: unusable, or held infeasible; empty: none.
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
        """Input of ``columns_of``."""
        assert self.work is not None and self.device is not None and self.layout is not None
        return self.work, self.device, self.layout

    @property
    def group(self) -> tuple[object, ...]:
        """Rows of one group differ in their layout alone: one of them is the best."""
        seq = self.work.shape.seq if self.work else 0
        batch = self.work.global_batch if self.work else 0
        return (*self.cluster, *self.model, seq, batch, self.gpus)


def read_rows(lines: Sequence[Mapping[str, str]]) -> tuple[Row, ...]:
    """Read the lines of a table; an unusable line becomes a row with the reason."""
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
    """Return the possible layouts of a row: all valid ones for a missing micro-batch, number of
    virtual stages or recomputation."""
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
    # A stated number of virtual stages did run: the stricter rule is for open ones.
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
    """Return the limits of a model's shape, with ``more`` others."""
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
    """Return the fastest layout by the table alone, among those that fit if any do."""
    if len(layouts) == 1:
        return layouts[0]
    x = columns_of([(work, device, layout) for layout in layouts])
    seconds = step_time(x).total
    is_fit = fits(x)
    return layouts[int(np.argmin(np.where(is_fit | ~is_fit.any(), seconds, np.inf)))]


REFUSED_ERROR = 1.0
"""Relative error of an unusable row, or one held infeasible."""
CHOICE = 5
"""Least rows of a group for a choice between layouts."""
Figures = dict[str, float | int | None]


@dataclass(frozen=True, slots=True)
class Scored:
    """A row with its prediction. ``is_known``: by a calibration of its cluster, else by the table
    of devices alone. Seconds of a refused row are 0."""

    row: Row
    is_known: bool
    seconds: float = 0.0
    low: float = 0.0
    high: float = 0.0
    never_seen: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Relative to the measured seconds."""
        if self.row.refused:
            return REFUSED_ERROR
        return abs(self.seconds / self.row.seconds - 1)

    @property
    def is_inside(self) -> bool:
        """Whether the measurement is inside the predicted interval."""
        return not self.row.refused and self.low <= self.row.seconds <= self.high

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / (2 * self.seconds)


def predict_rows(rows: Sequence[Row], measured: Sequence[Row] = ()) -> list[Scored]:
    """Predict each row by the ``measured`` rows of its cluster, else by the table alone."""
    scored: dict[int, Scored] = {}
    for cluster in dict.fromkeys(row.cluster for row in rows):
        known = [row for row in measured if row.cluster == cluster and not row.refused]
        calibration = calibrate_rows(known) if known else uncalibrated()
        mine = [number for number, row in enumerate(rows) if row.cluster == cluster]
        taken = [number for number in mine if not rows[number].refused]
        scored |= {number: Scored(rows[number], bool(known)) for number in mine}
        if not taken:
            continue
        x = columns_of([rows[number].case for number in taken])
        said = calibration.predict(x)
        for place, number in enumerate(taken):
            scored[number] = Scored(
                rows[number], bool(known), float(said.seconds[place]), float(said.low[place]),
                float(said.high[place]), calibration.never_seen(x, place) if known else (),
            )  # fmt: skip
    return [scored[number] for number in range(len(rows))]


def calibrate_rows(rows: Sequence[Row]) -> Calibration:
    """Return the calibration of rows of one cluster."""
    x = columns_of([row.case for row in rows])
    return calibrate(x, np.array([row.seconds for row in rows]), has_neighbours=True)


def figures(scored: Sequence[Scored]) -> Figures:
    """Return the figures over all rows; None for a figure without rows."""
    known = [one.error for one in scored if one.is_known]
    foreign = [one.error for one in scored if not one.is_known]
    widths = [one.half_width for one in scored if not one.row.refused]
    choices = [group for group in _groups(scored) if len(group) >= CHOICE]
    regrets = [regret(group) for group in choices]
    return {
        "rows": len(scored),
        "rows_refused": sum(bool(one.row.refused) for one in scored),
        "rows_known": len(known),
        "error_mean": _or_none(fmean, known),
        "error_max": _or_none(max, known),
        "transfer_error_mean": _or_none(fmean, foreign),
        "interval_coverage": _or_none(fmean, [float(one.is_inside) for one in scored]),
        "interval_half_width": _or_none(median, widths),
        "regret_mean": _or_none(fmean, regrets),
        "regret_max": _or_none(max, regrets),
        "rank_correlation_min": _or_none(min, [rank_correlation(group) for group in choices]),
    }


def group_figures(scored: Sequence[Scored]) -> list[dict[str, object]]:
    """Return the figures of each group: rows of one cluster, model, sequence, batch and number of
    devices; ``refused`` has the reasons of rows counted as errors."""
    found: list[dict[str, object]] = []
    for group in _groups(scored):
        row = group[0].row
        layers, hidden, heads, *_ = row.model
        never = {name for one in group for name in one.never_seen}
        found.append(
            {
                "source": row.source,
                "device": row.cluster[1],
                "model": f"{layers} layers, hidden {hidden}, {heads} heads",
                "gpus": row.gpus,
                "global_batch": row.work.global_batch if row.work else None,
                **figures(group),
                "never_seen": sorted(never),
                "refused": sorted({one.row.refused for one in group if one.row.refused}),
            }
        )
    return found


def regret(group: Sequence[Scored]) -> float:
    """Return the relative loss of the predicted best layout against the measured best.

    A refused row is never predicted best; if all are refused, the slowest counts.
    """
    measured = [one.row.seconds for one in group if one.row.seconds > 0]
    taken = [one for one in group if not one.row.refused]
    if not measured:
        return REFUSED_ERROR
    chosen = min(taken, key=lambda one: one.seconds).row.seconds if taken else max(measured)
    return chosen / min(measured) - 1


def rank_correlation(group: Sequence[Scored]) -> float:
    """Return Spearman's coefficient, ties averaged; refused rows are predicted slowest."""
    predicted = [one.seconds if not one.row.refused else np.inf for one in group]
    one, two = _ranks(predicted), _ranks([one.row.seconds for one in group])
    if np.ptp(one) == 0 or np.ptp(two) == 0:
        return 0.0
    return float(np.corrcoef(one, two)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    array = np.array(values)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    ranks: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = below + (equal + 1) / 2
    return ranks


def _groups(scored: Iterable[Scored]) -> list[list[Scored]]:
    groups: dict[tuple[object, ...], list[Scored]] = {}
    for one in scored:
        groups.setdefault(one.row.group, []).append(one)
    return list(groups.values())


def _or_none(reduce: Callable[[list[float]], float], values: list[float]) -> float | None:
    return float(reduce(values)) if values else None
