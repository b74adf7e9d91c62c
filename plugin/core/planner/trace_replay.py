"""Replays a trace under a policy: pieces of time, and an account of lost time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Literal, Protocol

from scalai.core.planner.columns import Layout
from scalai.core.planner.trace import Event, Trace
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
class Piece:
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
    pieces: list[Piece] = field(default_factory=list)


def replay(trace: Trace, policy: Policy, start: Layout | None, terms: Terms) -> tuple[Piece, ...]:
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


def count_changes(pieces: Sequence[Piece]) -> int:
    """Return the number of starts of another layout, or of the same one anew."""
    return sum(
        after.layout is not None
        and (after.layout != before.layout or _begins(before.state, after.state))
        for before, after in pairwise(pieces)
    )


def _begins(before: State, after: State) -> bool:
    return after == "reconfiguration" and before != "reconfiguration"


def _fail(job: _Job, event: Event, gpus: int, policy: Policy, terms: Terms) -> None:
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


def _lost_since(one: Piece, kept_s: float) -> tuple[Piece, ...]:
    if one.state != "run" or one.end_s <= kept_s:
        return (one,)
    if one.begin_s >= kept_s:
        return (replace(one, state="redone"),)
    return (replace(one, end_s=kept_s), replace(one, begin_s=kept_s, state="redone"))


def _change(job: _Job, event: Event, policy: Policy, residence: float) -> None:
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


def _pass(job: _Job, event: Event, end_s: float) -> None:
    begin, middle = event.at_s, end_s if job.layout is None else min(job.ready_s, end_s)
    state: State = "waiting" if job.layout is None else "reconfiguration"
    if middle > begin:
        job.pieces.append(Piece(begin, middle, state, event.gpus, job.layout))
    if end_s > max(begin, middle):
        job.pieces.append(Piece(max(begin, middle), end_s, "run", event.gpus, job.layout))


def account(pieces: Sequence[Piece], menu: Menu) -> Account:
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
