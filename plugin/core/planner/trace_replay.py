"""Replays a trace under a policy: pieces of time, and an account of lost time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import inf
from typing import Literal, Protocol

import numpy as np

from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits, divisors, refusal
from scalai.core.degrees.passes import MICRO_BATCHES
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import GRADIENTS, Layout, Workload, columns_of
from scalai.core.planner.devices import GB, Device
from scalai.core.planner.fit import Calibration
from scalai.core.planner.reconfiguration import Rates, reconfiguration
from scalai.core.planner.search import Choices, search
from scalai.core.planner.step_memory import fits, step_memory
from scalai.core.planner.trace import Trace, TraceEvent
from scalai.core.planner.weighing import RESIDENCE_S, is_worth_leaving, steps_within

MOST_OPTIONS = 8
"""Fastest layouts considered for a change."""


class Cost(Protocol):
    """Seconds from one layout to another; before None: from a checkpoint, or from nothing."""

    def __call__(self, before: Layout | None, after: Layout) -> float: ...


@dataclass(frozen=True, slots=True)
class Menu:
    """Valid layouts that fit in memory.

    Attributes:
        seconds: Seconds of a step.
        margin: Half of the interval of ``seconds``, relative; absent: exact.
    """

    seconds: Mapping[Layout, float]
    margin: Mapping[Layout, float] = field(default_factory=dict)

    def on(self, gpus: int) -> tuple[Layout, ...]:
        """Return the layouts possible on ``gpus`` devices, fastest first, then fewest devices."""
        possible = [one for one in self.seconds if one.degrees.world_size <= gpus]
        return tuple(
            sorted(possible, key=lambda one: (self.seconds[one], one.degrees.world_size, str(one)))
        )

    def only(self, is_wanted: Callable[[Layout], bool]) -> "Menu":
        """Return the menu of the wanted layouts."""
        return Menu({one: s for one, s in self.seconds.items() if is_wanted(one)}, self.margin)


@dataclass(frozen=True, slots=True)
class Moment:
    """Knowledge at a change of devices.

    Attributes:
        gpus: Devices available now.
        layout: Running layout, or the target of a change in progress; None: the job waits.
        remaining_s: Seconds until ``layout`` runs.
        held: Layout of the state in memory; None: only a checkpoint has it.
        is_failure: Workers died; ``layout`` must start anew.
        residence_s: Expected seconds until devices change again.
    """

    gpus: int
    layout: Layout | None
    remaining_s: float
    held: Layout | None
    is_failure: bool
    residence_s: float

    @property
    def can_stay(self) -> bool:
        return (
            self.layout is not None
            and not self.is_failure
            and self.layout.degrees.world_size <= self.gpus
        )


Decide = Callable[[Moment], Layout | None]


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to decide, with the cost of its changes.

    Attributes:
        name: Name in reports.
        decide: Layout to run; None: the job waits.
        cost: Seconds of a change.
        save_s: Seconds to write state before an announced change.
        kept_every_s: Interval of kept states; a failure loses the work since the last one.
        is_in_memory: Peers keep the state; only a failure of more than half of the devices returns
            to a checkpoint.
    """

    name: str
    decide: Decide
    cost: Cost
    kept_every_s: float
    save_s: float = 0.0
    is_in_memory: bool = True


def by_work(menu: Menu, cost: Cost) -> Decide:
    """Decide for the layout with the most work until the next expected change of devices.

    Like ``change.choose`` without hosts: a change must beat staying by 5 %, and by the margin of
    its prediction.
    """

    def decide(now: Moment) -> Layout | None:
        options = _near(menu.on(now.gpus), now)
        if not options:
            return None
        home = now.layout if now.can_stay else None

        def until(one: Layout) -> float:
            return now.remaining_s if one == home else cost(now.held, one)

        waits = {one: until(one) for one in options}
        work = {
            one: steps_within(now.residence_s, waits[one], menu.seconds[one]) for one in options
        }
        best = max(options, key=lambda one: (work[one], -waits[one]))
        spread = menu.margin.get(best, 0.0)
        if home is not None and not is_worth_leaving(work[best], work[home], spread):
            return home
        return best

    return decide


def _near(options: tuple[Layout, ...], now: Moment) -> tuple[Layout, ...]:
    """Return the fastest options, the running one, and the fastest two cut like the held state."""
    alike = [one for one in options if now.held is not None and _is_cut_alike(one, now.held)]
    kept = {*options[:MOST_OPTIONS], *alike[:2], now.layout}
    return tuple(one for one in options if one in kept)


def _is_cut_alike(one: Layout, other: Layout) -> bool:
    mine, others = one.degrees, other.degrees
    return (mine.tp, mine.pp, mine.vpp, mine.ep) == (others.tp, others.pp, others.vpp, others.ep)


def fastest(menu: Menu) -> Decide:
    """Decide for the fastest layout at any cost of change; keep the present one among equals."""

    def decide(now: Moment) -> Layout | None:
        options = menu.on(now.gpus)
        if not options:
            return None
        if now.layout in options and menu.seconds[now.layout] <= menu.seconds[options[0]]:
            return now.layout
        return options[0]

    return decide


def by_table(table: Mapping[int, Layout]) -> Decide:
    """Decide by a user's table of device counts; the next smaller count applies."""

    def decide(now: Moment) -> Layout | None:
        sizes = [size for size in table if size <= now.gpus]
        return table[max(sizes)] if sizes else None

    return decide


def replicas_only(menu: Menu, start: Layout) -> Menu:
    """Return the layouts that differ from ``start`` in replicas and micro-batch alone."""

    def core(one: Layout) -> Layout:
        return replace(one, degrees=replace(one.degrees, dp=1, ep=1), micro_batch=1)

    return menu.only(lambda one: core(one) == core(start) and one.degrees.ep == start.degrees.ep)


def same_degrees(menu: Menu, start: Layout) -> Menu:
    """Return ``start`` alone."""
    return menu.only(lambda one: one == start)


State = Literal["run", "reconfiguration", "redone", "waiting"]
CAUSES = ("reconfiguration", "redone", "idle", "slower", "waiting")
"""Losses of time: changes; repeated work; unused devices; degrees slower than the best; no valid
layout, or no device."""
_NEWEST = 0.3
"""Weight of the newest stay in the expected one."""


@dataclass(frozen=True, slots=True)
class TracePiece:
    """A stretch of time without changes. ``redone``: a later failure lost its work."""

    begin_s: float
    end_s: float
    state: State
    gpus: int
    layout: Layout | None

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms common to all policies.

    Attributes:
        residence_s: Expected seconds until devices change; None: a running mean of past stays, with
            weight 0.3 for the newest and 35 minutes at first.
        checkpoint_every_s: Interval of durable checkpoints, used after a loss of more than half of
            the devices.
    """

    residence_s: float | None = None
    checkpoint_every_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Account:
    """Use of a policy's time.

    Attributes:
        steps: Optimizer steps made and not lost, fractions included.
        ideal_steps: Steps of a job always on the best layout, with changes at no cost.
        useful_s: Seconds of the ideal job for ``steps``; with ``lost_s`` the time of the trace.
        lost_s: Seconds by cause (``CAUSES``).
        idle_device_s: Device-seconds of available devices without work while others ran.
        changes: Number of restarts of the job.
    """

    steps: float
    ideal_steps: float
    useful_s: float
    lost_s: Mapping[str, float]
    idle_device_s: float
    changes: int

    @property
    def goodput(self) -> float:
        """Steps over the ideal job's steps."""
        return self.steps / self.ideal_steps if self.ideal_steps else 0.0


@dataclass(slots=True)
class _Job:
    """State of the replayed job."""

    begin_s: float
    layout: Layout | None
    held: Layout | None
    ready_s: float
    anchor_s: float
    """Begin of the intervals of kept states."""
    pieces: list[TracePiece] = field(default_factory=list)


def replay(
    trace: Trace, policy: Policy, start: Layout | None, terms: Terms
) -> tuple[TracePiece, ...]:
    """Return the job's pieces over the whole trace, without gaps.

    The job begins with ``start`` (None: it waits, without state in memory). Announced changes lose
    no work. Failed devices are assumed in use. If devices change again during a change, it
    continues if its layout is still wanted, else begins anew.
    """
    begin = trace.events[0].at_s
    job = _Job(begin, start, start, begin, begin)
    residence = RESIDENCE_S if terms.residence_s is None else terms.residence_s
    gpus = trace.events[0].gpus
    ends = [event.at_s for event in trace.events[1:]] + [trace.end_s]
    for place, (event, end_s) in enumerate(zip(trace.events, ends, strict=True)):
        if place and terms.residence_s is None:
            stay = event.at_s - trace.events[place - 1].at_s
            residence += _NEWEST * (stay - residence)
        if event.is_failure:
            _fail(job, event, gpus, policy, terms)
        _change(job, event, policy, residence)
        _pass(job, event, end_s)
        gpus = event.gpus
    return tuple(job.pieces)


def count_changes(pieces: Sequence[TracePiece]) -> int:
    """Return the number of starts of another layout, or of the same one anew."""
    return sum(
        after.layout is not None
        and (after.layout != before.layout or _begins(before.state, after.state))
        for before, after in pairwise(pieces)
    )


def _begins(before: State, after: State) -> bool:
    return after == "reconfiguration" and before != "reconfiguration"


def _fail(job: _Job, event: TraceEvent, gpus: int, policy: Policy, terms: Terms) -> None:
    """Mark the work since the last kept state as lost."""
    is_running = job.layout is not None and job.ready_s <= event.at_s
    if policy.is_in_memory and 2 * event.gpus < gpus:
        kept_s = _last(job.begin_s, event.at_s, terms.checkpoint_every_s)
        job.held = None
    else:
        kept_s = _last(job.anchor_s, event.at_s, policy.kept_every_s)
        job.held = job.layout if is_running else job.held
    job.pieces[:] = [part for one in job.pieces for part in _lost_since(one, kept_s)]


def _last(since_s: float, at_s: float, every_s: float) -> float:
    """Return the last multiple of ``every_s`` after ``since_s``, up to ``at_s``."""
    if every_s <= 0 or at_s <= since_s:
        return at_s
    return since_s + (at_s - since_s) // every_s * every_s


def _lost_since(one: TracePiece, kept_s: float) -> tuple[TracePiece, ...]:
    if one.state != "run" or one.end_s <= kept_s:
        return (one,)
    if one.begin_s >= kept_s:
        return (replace(one, state="redone"),)
    return (replace(one, end_s=kept_s), replace(one, begin_s=kept_s, state="redone"))


def _change(job: _Job, event: TraceEvent, policy: Policy, residence: float) -> None:
    at_s, is_running = event.at_s, job.layout is not None and job.ready_s <= event.at_s
    if is_running and not event.is_failure:
        job.held = job.layout
    now = Moment(
        event.gpus, job.layout, max(0.0, job.ready_s - at_s), job.held, event.is_failure, residence
    )
    chosen = policy.decide(now)
    if chosen == job.layout and not (event.is_failure and chosen is not None):
        return
    if chosen is not None:
        saving = policy.save_s if is_running and not event.is_failure else 0.0
        job.ready_s = at_s + saving + policy.cost(job.held, chosen)
        job.anchor_s = job.ready_s
    elif event.gpus == 0:
        job.held = None
    job.layout = chosen


def _pass(job: _Job, event: TraceEvent, end_s: float) -> None:
    begin, middle = event.at_s, end_s if job.layout is None else min(job.ready_s, end_s)
    state: State = "waiting" if job.layout is None else "reconfiguration"
    if middle > begin:
        job.pieces.append(TracePiece(begin, middle, state, event.gpus, job.layout))
    if end_s > max(begin, middle):
        job.pieces.append(TracePiece(max(begin, middle), end_s, "run", event.gpus, job.layout))


def account(pieces: Sequence[TracePiece], menu: Menu) -> Account:
    """Return the use of the pieces' time; ``menu`` has all layouts of all policies."""
    lost, steps, ideal, useful, idle = dict.fromkeys(CAUSES, 0.0), 0.0, 0.0, 0.0, 0.0
    bests: dict[int, tuple[float, int]] = {}
    for one in pieces:
        if one.gpus not in bests:
            options = menu.on(one.gpus)
            bests[one.gpus] = (
                (menu.seconds[options[0]], options[0].degrees.world_size) if options else (inf, 0)
            )
        step_s, world = bests[one.gpus]
        ideal += one.seconds / step_s
        if one.state != "run" or one.layout is None:
            lost[one.state] += one.seconds
            continue
        mine = one.seconds / menu.seconds[one.layout]
        used = one.layout.degrees.world_size
        steps += mine
        useful += mine * step_s
        lost["idle" if used < world else "slower"] += max(0.0, one.seconds - mine * step_s)
        idle += (one.gpus - used) * one.seconds
    return Account(steps, ideal, useful, lost, idle, count_changes(pieces))


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
class TraceCase:
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
) -> TraceCase:
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
    return TraceCase(menu, begin, _policies(model, menu, begin, rows, prices), refused)


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
                    yield Layout(degrees, micro, kind, sharding, is_split, choices.offload[0])


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
