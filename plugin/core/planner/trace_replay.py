"""What a policy makes of a trace: pieces of time, and where the time went."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Literal, Protocol

from scalai.core.planner.columns import Layout
from scalai.core.planner.trace import Event, Trace
from scalai.core.planner.weighing import RESIDENCE_S, is_worth_leaving, steps_within

MOST_OPTIONS = 8
"""Of so many of the fastest layouts the cost of a change is looked at."""


class Cost(Protocol):
    """Seconds from one layout to another; before None: from a checkpoint, or from nothing."""

    def __call__(self, before: Layout | None, after: Layout) -> float: ...


@dataclass(frozen=True, slots=True)
class Menu:
    """Layouts that are valid and fit.

    Attributes:
        seconds: Of a step.
        margin: Half of the interval of that, over it; none: it is known exactly.
    """

    seconds: Mapping[Layout, float]
    margin: Mapping[Layout, float] = field(default_factory=dict)

    def on(self, gpus: int) -> tuple[Layout, ...]:
        """Return those that so many devices can run, fastest first; fewer devices before more."""
        possible = [one for one in self.seconds if one.degrees.world_size <= gpus]
        return tuple(
            sorted(possible, key=lambda one: (self.seconds[one], one.degrees.world_size, str(one)))
        )

    def only(self, is_wanted: Callable[[Layout], bool]) -> "Menu":
        """Return the menu of some of the layouts."""
        return Menu({one: s for one, s in self.seconds.items() if is_wanted(one)}, self.margin)


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known when devices change.

    Attributes:
        gpus: Devices that are there now.
        layout: What runs, or is being changed to; None: the job waits.
        remaining_s: Seconds until ``layout`` runs.
        held: The layout in which the state is kept in memory; None: only a checkpoint has it.
        is_failure: Whether workers died, so that ``layout`` has to be started anew.
        residence_s: For how long the devices are expected to stay.
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
    """A way to decide, and what its changes cost.

    Attributes:
        name: As reports show it.
        decide: What to run; None: the job waits.
        cost: Seconds of a change.
        save_s: Seconds that an announced change takes before it, in which state is written.
        kept_every_s: A failure loses what was done since the last multiple of it.
        is_in_memory: Whether others keep the state, so that a failure that leaves half of the
            devices goes back to it, and not to a checkpoint.
    """

    name: str
    decide: Decide
    cost: Cost
    kept_every_s: float
    save_s: float = 0.0
    is_in_memory: bool = True


def by_work(menu: Menu, cost: Cost) -> Decide:
    """Decide for the layout that does the most work until devices are expected to change again.

    This is ``change.choose`` without hosts: where staying is possible a change has to do more work
    by 5 %, and by the margin of what it promises.
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
    """Return the fastest options, what runs, and the fastest that cut the model as it is held."""
    alike = [one for one in options if now.held is not None and _is_cut_alike(one, now.held)]
    kept = {*options[:MOST_OPTIONS], *alike[:2], now.layout}
    return tuple(one for one in options if one in kept)


def _is_cut_alike(one: Layout, other: Layout) -> bool:
    mine, others = one.degrees, other.degrees
    return (mine.tp, mine.pp, mine.vpp, mine.ep) == (others.tp, others.pp, others.vpp, others.ep)


def fastest(menu: Menu) -> Decide:
    """Decide for the fastest layout of the menu, whatever it costs; keep it among equals."""

    def decide(now: Moment) -> Layout | None:
        options = menu.on(now.gpus)
        if not options:
            return None
        if now.layout in options and menu.seconds[now.layout] <= menu.seconds[options[0]]:
            return now.layout
        return options[0]

    return decide


def by_table(table: Mapping[int, Layout]) -> Decide:
    """Decide by what a person wrote for a number of devices, or the next smaller one."""

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
"""Where time is lost: changing; work done twice; devices left alone; degrees slower than the best;
no valid layout, or no device."""
_NEWEST = 0.3
"""Weight of the newest stay in the expected one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of time in which nothing changes. ``redone``: its work was lost afterwards."""

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
    """What all policies share.

    Attributes:
        residence_s: How long devices are expected to stay; None: as they did before, the newest
            stay with the weight 0.3, and 35 minutes at first.
        checkpoint_every_s: How often state comes to durable storage, where a failure goes back to
            that leaves less than half of the devices.
    """

    residence_s: float | None = None
    checkpoint_every_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Account:
    """Where a policy's time went.

    Attributes:
        steps: Optimizer steps that were made and not lost, with the part of one.
        ideal_steps: Those of a job that always runs the best layout and changes at no cost.
        useful_s: Seconds in which the ideal job makes ``steps``. With ``lost_s`` it is the time of
            the trace.
        lost_s: Seconds by cause (``CAUSES``).
        idle_device_s: Device-seconds in which a device was there and had nothing to do while others
            ran.
        changes: How often the job was started anew.
    """

    steps: float
    ideal_steps: float
    useful_s: float
    lost_s: Mapping[str, float]
    idle_device_s: float
    changes: int

    @property
    def goodput(self) -> float:
        """Steps over those of the ideal job."""
        return self.steps / self.ideal_steps if self.ideal_steps else 0.0


@dataclass(slots=True)
class _Job:
    """Where the replayed job is."""

    begin_s: float
    layout: Layout | None
    held: Layout | None
    ready_s: float
    anchor_s: float
    """Since when state is kept at multiples of the interval."""
    pieces: list[Piece] = field(default_factory=list)


def replay(trace: Trace, policy: Policy, start: Layout | None, terms: Terms) -> tuple[Piece, ...]:
    """Return what a job does all through a trace, without gaps.

    The job runs ``start`` when the trace begins (None: it waits, and holds no state in memory).
    Announced changes lose no work. Devices that fail are ones in use. A change that is not complete
    when devices change again goes on where its layout is still wanted, else it is begun anew.
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
    """Return how often another layout, or the same one anew, was begun."""
    return sum(
        after.layout is not None
        and (after.layout != before.layout or _begins(before.state, after.state))
        for before, after in pairwise(pieces)
    )


def _begins(before: State, after: State) -> bool:
    return after == "reconfiguration" and before != "reconfiguration"


def _fail(job: _Job, event: Event, gpus: int, policy: Policy, terms: Terms) -> None:
    """Take the lost work out of what was done."""
    is_running = job.layout is not None and job.ready_s <= event.at_s
    if policy.is_in_memory and 2 * event.gpus < gpus:
        kept_s = _last(job.begin_s, event.at_s, terms.checkpoint_every_s)
        job.held = None
    else:
        kept_s = _last(job.anchor_s, event.at_s, policy.kept_every_s)
        job.held = job.layout if is_running else job.held
    job.pieces[:] = [part for one in job.pieces for part in _lost_since(one, kept_s)]


def _last(since_s: float, at_s: float, every_s: float) -> float:
    """Return the last of ``since_s``, and every so many seconds after it, that is not after
    ``at_s``."""
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
    """Return where the time of some pieces went; ``menu`` has all that any policy runs."""
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
