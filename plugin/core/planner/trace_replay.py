"""What a policy makes of a trace: pieces of time, and where the time went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Literal

from scalai.core.planner.columns import Layout
from scalai.core.planner.trace import Event, Trace
from scalai.core.planner.trace_policies import Menu, Moment, Policy
from scalai.core.planner.weighing import RESIDENCE_S

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
