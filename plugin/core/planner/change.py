"""Chooses a layout when devices come or go: the one with the most steps until the next change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scalai.core.degrees.degrees import ModelLimits, refusal
from scalai.core.errors import RefusedError
from scalai.core.planner.columns import Layout, Workload, columns_of
from scalai.core.planner.devices import Device
from scalai.core.planner.fit import Calibration, uncalibrated
from scalai.core.planner.overlaps import overlaps_of
from scalai.core.planner.placement import Placed, place_by
from scalai.core.planner.reconfiguration import Hosts, Rates, Reconfiguration, cost_of
from scalai.core.planner.search import Choices, Estimate, estimates, search
from scalai.core.planner.step_memory import USABLE
from scalai.core.planner.weighing import (
    MEASURED_SPREAD,
    RESIDENCE_S,
    is_worth_leaving,
    needed_gain,
    steps_within,
)


@dataclass(frozen=True, slots=True)
class Option:
    """One layout on the available hosts.

    Attributes:
        estimate: The layout with its seconds a step.
        hosts: Hosts in the order of the ranks.
        change: Cost of the change; None: the job goes on unchanged.
        unplaced_moves: Crossing bytes with the hosts in their given order.
    """

    estimate: Estimate
    hosts: Hosts
    change: Reconfiguration | None = None
    unplaced_moves: int = 0

    @property
    def is_stay(self) -> bool:
        return self.change is None

    def steps(self, residence_s: float) -> float:
        """Return the steps made within ``residence_s``."""
        return steps_within(residence_s, _seconds_of(self), self.estimate.seconds)


@dataclass(frozen=True, slots=True)
class ChangeChoice:
    """The chosen option, and the others with reasons, ordered by work."""

    taken: Option
    reason: str
    others: tuple[tuple[Option, str], ...]


def choose(
    options: Sequence[Option],
    residence_s: float,
    spread_of: Callable[[Estimate, Estimate], float] | None = None,
) -> ChangeChoice:
    """Return the option with the most steps within ``residence_s`` seconds.

    Another option replaces staying only if it promises 5 % more steps, and more than the
    uncertainty. If no option makes a step, the job stays, or else takes the shortest change.

    Args:
        spread_of: Half of the interval of the ratio of two steps; None: of the other's step.

    Raises:
        RefusedError: There is no option.
    """
    if not options:
        raise RefusedError("no layout is possible on the devices that are there; add devices.")
    stay = next((option for option in options if option.is_stay), None)
    ranked = sorted(options, key=lambda one: (-one.steps(residence_s), _seconds_of(one)))
    taken, reason = ranked[0], "most steps until the next change"
    if taken is stay:
        reason = "no change makes more steps"
    elif stay is not None:
        taken, reason = _or_stay(taken, stay, residence_s, spread_of or _half_width)
    others = [(one, _why_not(one, taken, residence_s)) for one in ranked if one is not taken]
    return ChangeChoice(taken, reason, tuple(others))


def _or_stay(
    best: Option,
    stay: Option,
    residence_s: float,
    spread_of: Callable[[Estimate, Estimate], float],
) -> tuple[Option, str]:
    """Return the best option or staying, with the reason."""
    spread = spread_of(best.estimate, stay.estimate)
    steps, present = best.steps(residence_s), stay.steps(residence_s)
    gain = _gain(steps, present)
    if is_worth_leaving(steps, present, spread):
        return best, f"{gain:+.1%} of steps against staying"
    need = needed_gain(spread)
    return stay, f"the best change promises {gain:+.1%} of steps, below {need:.1%}"


def options_for(
    work: Workload,
    device: Device,
    candidates: Sequence[Estimate],
    before: Layout,
    before_hosts: Hosts,
    there: Hosts,
    *,
    lost: frozenset[str] = frozenset(),
    relaunch_s: float | None = None,
    step_s: float = 0.0,
    calibration: Calibration | None = None,
) -> list[Option]:
    """Return each candidate on the hosts with the fewest crossing bytes, with the cost of the
    change.

    Args:
        before_hosts: Hosts of the old ranks, in order.
        there: Available hosts with their numbers of devices, in the order of joining.
        lost: Old hosts without their memory.

    Raises:
        RefusedError: The overlaps of all candidates are unknown; single ones are left out.
    """
    rates, calibration = Rates(), calibration or uncalibrated()
    order = in_order(before_hosts, there)
    can_stay = _goes_on(before_hosts, there, lost)
    found: list[Option] = []
    refused: RefusedError | None = None
    for estimate in candidates:
        if estimate.layout == before and can_stay:
            found.append(Option(estimate, before_hosts))
            continue
        degrees = estimate.layout.degrees
        new = fill(order, degrees.world_size, degrees.tp)
        try:
            overlaps = overlaps_of(work, before, estimate.layout)
        except RefusedError as error:  # other candidates may have known overlaps
            refused = refused or error
            continue
        placed: Placed = place_by(overlaps, before_hosts, new, devices=dict(there), lost=lost)
        hosts = tuple((name, count) for name, count in placed.hosts if count)
        change = cost_of(
            before, estimate.layout, before_hosts, hosts, overlaps, device=device, lost=lost,
            rates=rates, relaunch_s=rates.relaunch_s if relaunch_s is None else relaunch_s,
            step_s=step_s, coefficients=calibration.coefficients,
        )  # fmt: skip
        found.append(Option(estimate, hosts, change, placed.unplaced_moves))
    if refused is not None and not found:
        raise refused
    return found


def plan_change(
    work: Workload,
    device: Device,
    limits: ModelLimits,
    before: Layout,
    before_hosts: Hosts,
    there: Hosts,
    *,
    choices: Choices | None = None,
    calibration: Calibration | None = None,
    residence_s: float = RESIDENCE_S,
    lost: frozenset[str] = frozenset(),
    relaunch_s: float | None = None,
) -> ChangeChoice:
    """Search on the available hosts, and choose.

    Candidates are the fastest layouts of the search, the fastest with the running TP and PP, and
    the running one.

    Raises:
        RefusedError: Nothing is valid on the devices, or nothing fits.
    """
    calibration = calibration or uncalibrated()
    devices = sum(count for _, count in there)
    present = estimate_of(work, device, before, devices, calibration)
    found: list[Estimate] = []
    why: RefusedError | None = None
    for narrowed in (limits, _with_split_of(before, limits)):
        try:
            plan = search(work, device, devices, narrowed, choices, calibration)
        except RefusedError as error:
            why = why or error
            continue
        found += [plan.best, *plan.runners_up]
    room = USABLE * device.memory
    fitting = [present] if _is_possible(present, devices, limits) else []
    fitting += [one for one in found if one.bytes <= room]
    if not fitting:
        raise why or RefusedError(f"nothing fits on {devices} devices; add devices.")
    distinct = list({one.layout: replace(one, reason="") for one in reversed(fitting)}.values())
    options = options_for(
        work, device, distinct[::-1], before, before_hosts, there, lost=lost,
        relaunch_s=relaunch_s, step_s=present.seconds, calibration=calibration,
    )  # fmt: skip

    def spread_of(one: Estimate, other: Estimate) -> float:
        x = columns_of([(work, device, each.layout) for each in (one, other)])
        return calibration.spread_of_ratio(x, MEASURED_SPREAD, (False, False))

    return choose(options, residence_s, spread_of)


def estimate_of(
    work: Workload,
    device: Device,
    layout: Layout,
    devices: int,
    calibration: Calibration | None = None,
) -> Estimate:
    """Return the cost of one layout on so many devices."""
    x = columns_of([(work, device, layout)])
    return estimates(x, [layout], devices, calibration or uncalibrated())[0]


def in_order(before_hosts: Hosts, there: Hosts) -> Hosts:
    """Return the available hosts: the old ones in their order, then the others."""
    place = {name: number for number, (name, _) in enumerate(before_hosts)}
    return tuple(sorted(there, key=lambda host: place.get(host[0], len(place))))


def fill(hosts: Hosts, ranks: int, tp: int = 1) -> Hosts:
    """Give ranks to hosts in order, up to the devices of each; the rest have none.

    With enough devices each host has a multiple of ``tp``: no TP group spans two hosts.

    Raises:
        RefusedError: There are fewer devices.
    """
    whole = [(name, devices // tp * tp) for name, devices in hosts]
    if sum(devices for _, devices in whole) < ranks:
        whole = list(hosts)
    filled = []
    for name, devices in whole:
        count = min(devices, ranks)
        filled.append((name, count))
        ranks -= count
    if ranks:
        raise RefusedError(f"{ranks} ranks have no device; add hosts, or take a smaller layout.")
    return tuple(filled)


def _goes_on(before_hosts: Hosts, there: Hosts, lost: frozenset[str]) -> bool:
    room: Mapping[str, int] = dict(there)
    return not lost & {name for name, _ in before_hosts} and all(
        room.get(name, 0) >= count for name, count in before_hosts
    )


def _is_possible(present: Estimate, devices: int, limits: ModelLimits) -> bool:
    """Whether the old layout is valid on the devices; it did fit, whatever the estimate."""
    layout = present.layout
    is_valid = refusal(layout.degrees, limits, layout.micro_batch) is None
    return is_valid and layout.degrees.world_size <= devices


def _with_split_of(before: Layout, limits: ModelLimits) -> ModelLimits:
    why = "what runs now"
    degrees = before.degrees
    fixed = tuple(one for one in limits.fixed if one[0] not in ("tp", "pp"))
    return replace(limits, fixed=(*fixed, ("tp", degrees.tp, why), ("pp", degrees.pp, why)))


def _half_width(estimate: Estimate, _: Estimate) -> float:
    return (estimate.high - estimate.low) / (2 * estimate.seconds)


def _gain(steps: float, reference: float) -> float:
    return steps / reference - 1 if reference else float("inf") if steps else 0.0


def _seconds_of(option: Option) -> float:
    return option.change.total_s if option.change else 0.0


def _why_not(one: Option, taken: Option, residence_s: float) -> str:
    mine, best = one.steps(residence_s), taken.steps(residence_s)
    if mine > best:
        return f"{_gain(mine, best):+.1%} of steps, too few to leave what runs"
    if not mine:
        return f"the change takes {_seconds_of(one):.0f} s, longer than the devices stay"
    text = f"{_gain(mine, best):+.1%} of steps"
    longer = _seconds_of(one) - _seconds_of(taken)
    if one.estimate.seconds < taken.estimate.seconds and longer > 0:
        text += f": faster steps, but the change takes {longer:.0f} s longer"
    return text
