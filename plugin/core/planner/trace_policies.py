"""What a job does when its devices change: the policies that a trace is replayed with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from scalai.core.planner.columns import Layout
from scalai.core.planner.weighing import is_worth_leaving, steps_within

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
