"""Menus and policies for a trace, from a model, devices and searches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits, refusal
from scalai.core.degrees.passes import MICRO_BATCHES
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import GRADIENTS, Layout, Workload, columns_of
from scalai.core.planner.devices import GB, Device
from scalai.core.planner.fit import Calibration
from scalai.core.planner.reconfiguration import Rates, reconfiguration
from scalai.core.planner.search import Choices, divisors, search
from scalai.core.planner.step_memory import fits, step_memory
from scalai.core.planner.trace import Trace
from scalai.core.planner.trace_replay import (
    Cost,
    Menu,
    Policy,
    by_table,
    by_work,
    fastest,
    replicas_only,
    same_degrees,
)

STATE_BYTES = 14
"""Of one parameter in a checkpoint: 2 of the weight, 4 of the master and of each moment."""
STORAGE = 1e9
"""Bytes/s in which a whole checkpoint is written or read. Tenplex-Central, whose state goes through
one host, takes 13.3 s per 1e9 parameters (arXiv 2312.05181, figure 14, by data parallelism)."""
CHECKPOINT_S, SNAPSHOT_S = 1800.0, 300.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of changes and failures, beside the computed ones.

    Attributes:
        rates: Rates of relaunches and of the state's transfer.
        checkpoint_every_s: Seconds between checkpoints on durable storage.
        snapshot_every_s: Seconds between generations of state in other hosts' memory.
        storage: Bytes/s of a whole checkpoint.
        residence_s: Expected seconds until devices change; None: by past stays.
    """

    rates: Rates = field(default_factory=Rates)
    checkpoint_every_s: float = CHECKPOINT_S
    snapshot_every_s: float = SNAPSHOT_S
    storage: float = STORAGE
    residence_s: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Common input of the compared policies.

    Attributes:
        start: Layout at the begin of the trace, or as soon as possible.
        refused: Reasons for no layout, by number of devices.
    """

    menu: Menu
    start: Layout
    policies: tuple[Policy, ...]
    refused: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class _Model:
    work: Workload
    device: Device
    limits: ModelLimits
    choices: Choices
    calibration: Calibration

    def menu(self, layouts: Sequence[Layout]) -> Menu:
        """Return the layouts with their seconds and uncertainty."""
        x = columns_of([(self.work, self.device, one) for one in layouts])
        said = self.calibration.predict(x)
        return Menu(
            dict(zip(layouts, map(float, said.seconds), strict=True)),
            dict(zip(layouts, map(float, said.half_width), strict=True)),
        )

    def timed(self, layouts: Sequence[Layout]) -> dict[Layout, float]:
        """Return the seconds of a step of the fitting layouts."""
        if not layouts:
            return {}
        x = columns_of([(self.work, self.device, one) for one in layouts])
        seconds = self.calibration.seconds(x)
        is_fit = fits(x)
        return {one: float(seconds[place]) for place, one in enumerate(layouts) if is_fit[place]}


def build_case(
    trace: Trace,
    work: Workload,
    device: Device,
    limits: ModelLimits,
    choices: Choices,
    calibration: Calibration,
    prices: Prices,
    *,
    start: DegreeRequest | None = None,
    table: Mapping[int, DegreeRequest] | None = None,
) -> Case:
    """Return the policies of a trace: ours, data parallelism only, fixed degrees, restarts from
    checkpoints, and the user's table of degrees, if any.

    Args:
        start: Degrees at the beginning; None: the fastest on the first devices.
        table: Degrees by number of devices.

    Raises:
        RefusedError: Nothing is valid and fits on any of the trace's numbers of devices, or given
            degrees are not valid, do not fit, or need more devices than ever there.
    """
    model = _Model(work, device, limits, choices, calibration)
    found: dict[Layout, float] = {}
    refused: dict[int, str] = {}
    best: dict[int, Layout] = {}
    for gpus in trace.sizes:
        try:
            plan = search(work, device, gpus, limits, choices, calibration)
        except RefusedError as error:
            refused[gpus] = str(error)
            continue
        best[gpus] = plan.best.layout
        found |= model.timed([plan.best.layout, *(one.layout for one in plan.runners_up)])
    if not best:
        raise RefusedError(refused[max(refused)])
    rows = {size: _given(model, request, size) for size, request in sorted((table or {}).items())}
    first = next(event.gpus for event in trace.events if event.gpus in best)
    begin = _given(model, start, first) if start is not None else best[first]
    _may_ever_run(begin, trace)
    found |= model.timed([*rows.values(), begin])
    found |= model.timed(
        [one for gpus in trace.sizes for one in _with_replicas(model, begin, gpus)]
    )
    menu = model.menu(list(found))
    return Case(menu, begin, _policies(model, menu, begin, rows, prices), refused)


def stored_s(work: Workload, prices: Prices) -> float:
    """Return the seconds to write or read a whole checkpoint."""
    return work.shape.total_parameters * STATE_BYTES / prices.storage


def change_cost(work: Workload, device: Device, prices: Prices) -> Cost:
    """Return the cost function of changes in memory; without an old layout, of a start."""
    rates = prices.rates

    @cache
    def cost(before: Layout | None, after: Layout) -> float:
        try:
            change = reconfiguration(work, device, before, after, rates=rates)
        except RefusedError:
            # A model that cannot be cut to the byte: its state comes from storage.
            return rates.relaunch_s + stored_s(work, prices)
        return change.total_s

    return cost


def _policies(
    model: _Model, menu: Menu, start: Layout, table: Mapping[int, Layout], prices: Prices
) -> tuple[Policy, ...]:
    moved = change_cost(model.work, model.device, prices)
    whole_s = stored_s(model.work, prices)

    def memory(before: Layout | None, after: Layout) -> float:
        # What no host holds is read from the newest checkpoint.
        return moved(before, after) + (whole_s if before is None else 0.0)

    def storage(before: Layout | None, after: Layout) -> float:
        return prices.rates.relaunch_s + whole_s

    every = prices.snapshot_every_s
    found = [
        Policy("ours", by_work(menu, memory), memory, every),
        Policy("dp-only", fastest(replicas_only(menu, start)), memory, every),
        Policy("fixed", fastest(same_degrees(menu, start)), memory, every),
        Policy(
            "checkpoint", fastest(menu), storage, prices.checkpoint_every_s, whole_s,
            is_in_memory=False,
        ),
    ]  # fmt: skip
    if table:
        found.append(Policy("table", by_table(table), memory, every))
    return tuple(found)


def _may_ever_run(start: Layout, trace: Trace) -> None:
    if start.degrees.world_size > max(trace.sizes):
        raise RefusedError(
            f"{start.degrees} needs {start.degrees.world_size} devices, and the trace has "
            f"{max(trace.sizes)} at most. Start with fewer."
        )


def _given(model: _Model, request: DegreeRequest, gpus: int) -> Layout:
    """Return the fastest layout with the user's degrees for a number of devices."""
    cut = request.tp * request.pp * (request.cp or 1)
    rooms = [request.dp] if request.dp else list(_replica_counts(model, gpus // cut))
    reasons: list[str] = []
    for dp in rooms:
        degrees = Degrees(request.tp, request.pp, dp, request.vpp, request.cp or 1, request.ep or 1)
        if degrees.world_size > gpus:
            reasons.append(f"they need {degrees.world_size} devices")
            continue
        layouts = list(_variants(model, degrees, request.micro_batch_size, reasons))
        timed = model.timed(layouts)
        if timed:
            return min(timed, key=lambda one: timed[one])
        if layouts:
            least = step_memory(columns_of([(model.work, model.device, o) for o in layouts])).total
            reasons.append(f"they need {float(np.min(least)) / GB:.1f} GB of a device's memory")
    why = reasons[0] if reasons else f"they need {cut} devices at least"
    raise RefusedError(f"{request} on {gpus} devices: {why}. Give other degrees for {gpus}.")


def _replica_counts(model: _Model, room: int) -> Iterator[int]:
    """Yield numbers of replicas that divide the batch, largest first."""
    for dp in reversed(divisors(model.work.global_batch)):
        if dp <= room:
            yield dp


def _variants(
    model: _Model, degrees: Degrees, micro_batch: int | None, reasons: list[str]
) -> Iterator[Layout]:
    """Yield all valid layouts with some degrees."""
    choices, batch = model.choices, model.work.global_batch
    if batch % degrees.dp:
        reasons.append(f"{degrees.dp} replicas do not divide the global batch of {batch}")
        return
    each = batch // degrees.dp
    wanted = (micro_batch,) if micro_batch else choices.micro_batches
    micros = [
        micro for micro in wanted or divisors(each) if micro <= max(MICRO_BATCHES, *wanted, 0)
    ]
    for micro in micros:
        why = refusal(degrees, model.limits, micro)
        if why is not None or each % micro:
            reasons.append(why or f"a micro-batch of {micro} does not divide {each} samples")
            continue
        for kind in choices.recompute:
            for sharding in choices.sharding:
                if sharding < GRADIENTS or degrees.pp == 1:
                    is_split = choices.is_sequence_parallel and degrees.tp > 1
                    yield Layout(degrees, micro, kind, sharding, is_split)


def _with_replicas(model: _Model, start: Layout, gpus: int) -> Iterator[Layout]:
    """Yield ``start`` with the most replicas possible on so many devices, in all micro-batches."""
    room = gpus // (start.degrees.tp * start.degrees.pp * start.degrees.cp)
    for dp in _replica_counts(model, room):
        if dp * start.degrees.cp % start.degrees.ep:
            continue
        found = [
            one
            for one in _variants(model, replace(start.degrees, dp=dp), None, [])
            if (one.recompute, one.sharding) == (start.recompute, start.sharding)
        ]
        if model.timed(found):
            yield from found
            return
