"""Searches the best layout of a training step on the available devices, and explains the others.

``core/degrees/degrees.py`` decides validity, ``step_memory.py`` fit, ``step_time.py`` and the
calibration speed. The global batch is fixed: a layout unable to keep it is invalid.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from scalai.core.degrees.batches import Shares
from scalai.core.degrees.degrees import Degrees, ModelLimits, divisors, refusal, stage_counts
from scalai.core.degrees.passes import (
    MICRO_BATCHES,
    OFFLOADS,
    RECOMPUTES,
    Offload,
    Recompute,
)
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import (
    GRADIENTS,
    NO_SHARDING,
    OPTIMIZER,
    WEIGHTS,
    Cases,
    Layout,
    Workload,
    grid,
)
from scalai.core.planner.devices import GB, Device
from scalai.core.planner.fit import Calibration, uncalibrated
from scalai.core.planner.step_memory import (
    HOST_USABLE,
    USABLE,
    StepMemory,
    fits,
    host_memory,
    step_memory,
)
from scalai.core.planner.step_time import StepTime, step_time

REPLICA_COUNTS = 3
"""Numbers of replicas tried with each split of the model, from the largest possible down: fewer
replicas leave more devices idle."""
RUNNERS_UP, TOO_LARGE = 5, 2
"""Layouts shown beside the best: fitting ones, and faster ones too large for memory."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of a search.

    Attributes:
        micro_batches: Sizes to try; empty: all divisors up to ``MICRO_BATCHES``.
        offload: State in host memory; the first is the script's own, others are for layouts that
            fit in no other way.
        sharding: Kinds by ``columns.py``. Pipelines do not shard gradients and weights.
        context_parallel, expert_parallel: Degrees to try.
        max_tensor_parallel: None: the devices of a host.
    """

    micro_batches: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = RECOMPUTES
    offload: tuple[Offload, ...] = ("none",)
    sharding: tuple[int, ...] = (OPTIMIZER,)
    is_sequence_parallel: bool = True
    context_parallel: tuple[int, ...] = (1,)
    expert_parallel: tuple[int, ...] = (1,)
    max_tensor_parallel: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """One layout with its cost: seconds a step with their 90 % interval, and bytes.

    ``time`` has the parts of ``StepTime``, and in ``neighbours`` the correction from measured steps
    of like layouts; ``memory`` has the parts of ``StepMemory``.
    """

    layout: Layout
    seconds: float
    low: float
    high: float
    time: dict[str, float]
    memory: dict[str, float]
    idle: int
    """Unused devices."""
    reason: str = ""
    """Reason against it; empty: the best."""

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """The best layout, others with reasons, and the numbers of valid and fitting ones."""

    best: Estimate
    runners_up: tuple[Estimate, ...]
    valid: int
    fitting: int
    never_seen: tuple[str, ...] = ()
    """Unmeasured properties of the best layout; empty also without measurements."""
    refused: dict[str, int] = field(default_factory=dict)
    """Reasons against invalid layouts: an example of each kind, with its count."""
    spilled: str = ""
    """Reason for state in host memory; empty: there is none."""


def search(
    work: Workload,
    device: Device,
    devices: int,
    limits: ModelLimits,
    choices: Choices | None = None,
    calibration: Calibration | None = None,
) -> LayoutPlan:
    """Return the fastest valid layout within memory.

    Args:
        devices: Number of devices; a plan may leave some idle.

    Raises:
        RefusedError: No layout is valid, or no valid one fits; the message names the nearest way
            out.
    """
    choices, calibration = choices or Choices(), calibration or uncalibrated()
    if devices < 1:
        raise RefusedError(f"{devices} devices: a job needs at least one.")
    own = replace(choices, offload=choices.offload[:1])
    layouts, refused = _layouts(work, device, devices, limits, own)
    if not layouts:
        raise RefusedError(_why_none(work, device, devices, limits, own, refused))
    x = _columns(work, device, layouts, choices)
    is_fit = fits(x)
    is_spilled = not is_fit.any()
    if is_spilled:
        spilling = replace(choices, offload=choices.offload[1:])
        spilled, _ = _layouts(work, device, devices, limits, spilling)
        y = _columns(work, device, spilled, choices) if spilled else x
        if not fits(y).any():
            raise RefusedError(
                _what_would_fit(work, device, devices, limits, choices, x) + _host_fault(y)
            )
        layouts, x, is_fit = spilled, y, fits(y)
    memory = step_memory(x)
    seconds = calibration.seconds(x)
    order = np.argsort(seconds, kind="stable")
    fitting = order[is_fit[order]]
    shown = _distinct(x, map(int, fitting), RUNNERS_UP + 1)
    faster = order[~is_fit[order] & (seconds[order] < seconds[shown[0]])]
    nearest = faster[np.argsort(memory.total[faster], kind="stable")]
    larger = _distinct(x, map(int, nearest), TOO_LARGE)
    numbers = [*shown, *larger]
    rows = [layouts[number] for number in numbers]
    kept = [_layout(row, choices) for row in rows]
    found = estimates(x.select(numbers), kept, devices, calibration)
    best = found[0]
    others = [replace(one, reason=_why_not(one, best, device, devices)) for one in found[1:]]
    others.sort(key=lambda one: one.seconds)
    return LayoutPlan(
        best, tuple(others), len(layouts), len(fitting),
        calibration.never_seen(x, numbers[0]) if calibration.rows else (), refused,
        spill_line(x.select(numbers[:1]), calibration) if is_spilled else "",
    )  # fmt: skip


def spill_line(x: Cases, calibration: Calibration) -> str:
    """Return the reason for the state in host memory of one case, the first."""
    without = replace(x, layout=replace(x.layout, offload=np.zeros_like(x.layout.offload)))
    before, after = step_memory(without), step_memory(x)
    weights = float(np.ravel(before.weights - after.weights)[0])
    updated = float(np.ravel(before.total - after.total)[0]) - weights
    room, ratio = (
        np.ravel(x.device.memory)[0],
        calibration.seconds(x) / calibration.seconds(without),
    )
    moved = f"the optimizer's {updated / GB:.3g} GB"
    if weights:
        moved += f" and the weights' {weights / GB:.3g} GB"
    return (
        f"nothing fits in {room / GB:.3g} GB without it: {moved} a device go to host memory, steps "
        f"{float(np.ravel(ratio)[0]):.2f} times as long"
    )


def _host_fault(x: Cases) -> str:
    """Return the reason against state in host memory where it would fit the device; else empty."""
    fits_device = step_memory(x).total <= USABLE * x.device.memory
    if not fits_device.any():
        return ""
    needed, room = host_memory(x)[fits_device].min(), np.ravel(x.device.host_memory)[0]
    return (
        f" With state in host memory it would fit, but needs {needed / GB:.3g} GB there a device, "
        f"and there are {HOST_USABLE * room / GB:.3g} GB (--host-memory-gb, [planner] "
        "host_memory_gb)."
    )


def _layouts(
    work: Workload,
    device: Device,
    devices: int,
    limits: ModelLimits,
    choices: Choices,
    replica_counts: int = REPLICA_COUNTS,
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """Return the valid layouts as numbers of ``NAMES``, and the reasons against others: an example
    of each kind with its count."""
    found: list[tuple[int, ...]] = []
    refused: dict[str, int] = {}
    examples: dict[str, str] = {}
    # Fused attention never keeps its scores: selective saves nothing.
    saves = [
        each for each in choices.recompute if each != "selective" or not work.is_attention_fused
    ]
    kinds = [
        (RECOMPUTES.index(kind), sharding, OFFLOADS.index(offload))
        for kind in saves or ["none"]
        for sharding in choices.sharding
        for offload in choices.offload
        if sharding >= _SHARDED_TO_SPILL.get(offload, OPTIMIZER)
    ]
    for degrees, micro in _degrees(work, device, devices, limits, choices, replica_counts):
        why = refusal(degrees, limits, micro)
        if why is not None:
            # Reasons with other numbers are one kind; the first is the example.
            kind = re.sub(r"\d+", "", why)
            example = examples.setdefault(kind, why)
            refused[example] = refused.get(example, 0) + 1
            continue
        sizes = (degrees.tp, degrees.pp, degrees.dp, degrees.vpp, degrees.cp, degrees.ep, micro)
        found += [
            (*sizes, again, sharding, offload)
            for again, sharding, offload in kinds
            if sharding < GRADIENTS or degrees.pp == 1
        ]
    return found, refused


def _degrees(
    work: Workload,
    device: Device,
    devices: int,
    limits: ModelLimits,
    choices: Choices,
    replica_counts: int,
) -> Iterator[tuple[Degrees, int]]:
    """Yield possible degrees and micro-batches: divisors of the sizes to cut."""
    shape, batch = work.shape, work.global_batch
    most = choices.max_tensor_parallel or device.per_host
    layers = shape.layers + limits.extra_layers
    replicas = divisors(batch)
    for tp in (t for t in divisors(shape.heads) if t <= most):
        for pp in stage_counts(shape.layers, limits):
            for cp in choices.context_parallel:
                room = devices // (tp * pp * cp)
                counts = [d for d in replicas if d <= room][-replica_counts:]
                for micro in _micro_batches(batch, choices):
                    count = batch // micro
                    shared = [d for d in counts if count % d == 0]
                    if limits.has_uneven_shares and 0 < room <= count:
                        # As few as make as many passes as all; more shard the optimizer further.
                        shared += [-(-count // Shares(count, room).passes), room]
                    for dp in dict.fromkeys(shared):
                        for vpp in divisors(-(-layers // pp)) if pp > 1 else [1]:
                            for ep in choices.expert_parallel:
                                if cp * dp % ep == 0:
                                    yield Degrees(tp, pp, dp, vpp, cp, ep), micro


def _micro_batches(batch: int, choices: Choices) -> list[int]:
    if choices.micro_batches:
        return [micro for micro in choices.micro_batches if batch % micro == 0]
    return [micro for micro in divisors(batch) if micro <= MICRO_BATCHES]


NAMES = ("tp", "pp", "dp", "vpp", "cp", "ep", "micro_batch", "recompute", "sharding", "offload")
_SHARDED_TO_SPILL: dict[Offload, int] = {"none": NO_SHARDING, "parameters": WEIGHTS}
"""The least sharding for a state in host memory; for others that of the optimizer."""


def _columns(
    work: Workload, device: Device, layouts: Sequence[tuple[int, ...]], choices: Choices
) -> Cases:
    table = np.array(layouts, dtype=float)
    columns = dict(zip(NAMES, table.T, strict=True))
    columns["is_sequence_parallel"] = (columns["tp"] > 1) * float(choices.is_sequence_parallel)
    return grid(work, device, columns)


def _layout(row: Sequence[int], choices: Choices) -> Layout:
    tp, pp, dp, vpp, cp, ep, micro, again, sharding, offload = row
    return Layout(
        Degrees(tp, pp, dp, vpp, cp, ep), micro, RECOMPUTES[again], sharding,
        choices.is_sequence_parallel and tp > 1, OFFLOADS[offload],
    )  # fmt: skip


def _distinct(x: Cases, numbers: Iterable[int], most: int) -> list[int]:
    """Return the first of each combination of degrees, virtual stages and micro-batch aside."""
    seen: dict[tuple[float, ...], int] = {}
    for number in numbers:
        key = (
            x.layout.tp[number],
            x.layout.pp[number],
            x.layout.dp[number],
            x.layout.cp[number],
            x.layout.ep[number],
        )
        if key not in seen:
            seen[key] = number
            if len(seen) == most:
                break
    return list(seen.values())


def estimates(
    x: Cases, layouts: Sequence[Layout], devices: int, calibration: Calibration
) -> list[Estimate]:
    """Return the costs of these layouts, with columns ``x``, on so many devices."""
    time, memory = step_time(x, calibration.coefficients), step_memory(x)
    said, total = calibration.predict(x), np.ravel(time.total)
    found = []
    for place, layout in enumerate(layouts):
        seconds = float(said.seconds[place])
        parts = _parts(time, place)
        if calibration.neighbours is not None:
            parts["neighbours"] = seconds - float(total[place if len(total) > 1 else 0])
        idle = devices - layout.degrees.world_size
        interval = float(said.low[place]), float(said.high[place])
        found.append(Estimate(layout, seconds, *interval, parts, _parts(memory, place), idle))
    return found


def _parts(of: StepTime | StepMemory, place: int) -> dict[str, float]:
    parts = {}
    for part in fields(of):
        column = np.ravel(getattr(of, part.name))
        parts[part.name] = float(column[place if len(column) > 1 else 0])
    return parts


def _why_not(one: Estimate, best: Estimate, device: Device, devices: int) -> str:
    """Return the reason: memory, with its largest parts, or the longer parts of time."""
    room = USABLE * device.memory
    if one.bytes > room:
        largest = sorted(one.memory.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in largest)
        return f"does not fit: {one.bytes / GB:.1f} of {room / GB:.1f} GB ({parts})"
    more = {name: one.time[name] - best.time[name] for name in one.time}
    longest = [name for name in sorted(more, key=lambda n: -more[n]) if more[name] > 0][:2]
    parts = ", ".join(f"{name} +{more[name]:.3g} s" for name in longest)
    text = f"{one.seconds / best.seconds - 1:.1%} slower" + (f": {parts}" if parts else "")
    if one.idle > best.idle:
        text += f"; leaves {one.idle} of {devices} devices idle"
    return text


def _why_none(
    work: Workload,
    device: Device,
    devices: int,
    limits: ModelLimits,
    choices: Choices,
    refused: dict[str, int],
) -> str:
    batch = work.global_batch
    if choices.micro_batches and all(batch % micro for micro in choices.micro_batches):
        micro = min(choices.micro_batches)
        near = [size for size in (batch // micro * micro, -(-batch // micro) * micro) if size]
        return (
            f"a micro-batch of {' or '.join(map(str, choices.micro_batches))} does not divide the "
            f"global batch of {batch}, on any number of devices. Use a global batch of "
            f"{' or '.join(map(str, dict.fromkeys(near)))}, or a micro-batch that divides {batch}."
        )
    often = max(refused, key=lambda why: refused[why]) if refused else "no split of it is so small"
    nearest = nearest_fitting(work, device, devices, limits, choices)
    way = f"Use {nearest} devices, the fewest on which one is." if nearest else "Change the model."
    return (
        f"no layout of {work.shape.layers} layers and {work.shape.heads} heads is valid on "
        f"{devices} devices ({often}). {way}"
    )


def _what_would_fit(
    work: Workload,
    device: Device,
    devices: int,
    limits: ModelLimits,
    choices: Choices,
    x: Cases,
) -> str:
    """Return the message for no fitting layout: the least need of memory, and the way out."""
    memory = step_memory(x)
    least = int(np.argmin(memory.total))
    parts = _parts(memory, least)
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {size / GB:.1f} GB" for name, size in largest)
    layout = _layout([int(getattr(x.layout, name)[least]) for name in NAMES], choices)
    text = (
        f"nothing that is valid on {devices} devices fits: {layout} needs the least, "
        f"{sum(parts.values()) / GB:.1f} of {USABLE * device.memory / GB:.1f} GB of {device.name} "
        f"({named})."
    )
    nearest = nearest_fitting(work, device, devices, limits, choices)
    if nearest is None:
        return f"{text} Nor does it on any number of them; use devices with more memory."
    return f"{text} Use {nearest} devices, the fewest on which it does."


def nearest_fitting(
    work: Workload, device: Device, devices: int, limits: ModelLimits, choices: Choices
) -> int | None:
    """Return the smallest number of devices above ``devices`` with a fitting layout."""
    shape = work.shape
    most = device.per_host * shape.layers * max(choices.context_parallel) * work.global_batch
    least = replace(choices, micro_batches=choices.micro_batches or (1,))
    size, found = devices, None
    while size < most and found is None:
        size = min(size * 2, most)
        layouts, _ = _layouts(work, device, size, limits, least, len(divisors(work.global_batch)))
        if not layouts:
            continue
        x = _columns(work, device, layouts, choices)
        is_fit = fits(x)
        if is_fit.any():
            found = int(x.world_size[is_fit].min())
    return found
