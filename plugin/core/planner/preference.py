"""Orders a running job's valid degrees by cost: seconds a step, and seconds of the change.

The present layout stays until another is better by more than the uncertainty. The job's own
measurements take precedence over predictions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median_high, median_low

import numpy as np
import numpy.typing as npt

from scalai.core.degrees.batches import fit_batches
from scalai.core.degrees.degrees import Degrees, Sharding
from scalai.core.degrees.passes import (
    AS_GIVEN,
    Offload,
    Passes,
    Recompute,
    offload_of_json,
    recompute_of_json,
)
from scalai.core.degrees.policy import Choice
from scalai.core.errors import ScalaiError
from scalai.core.planner.columns import Cases, Layout, Workload, columns_of
from scalai.core.planner.devices import Device
from scalai.core.planner.fit import Calibration, calibrate, uncalibrated
from scalai.core.planner.meter import ChangeTime
from scalai.core.planner.reconfiguration import reconfiguration
from scalai.core.planner.search import spill_line
from scalai.core.planner.step_memory import USABLE, fits_host, step_memory
from scalai.core.planner.weighing import (
    MEASURED_SPREAD,
    RESIDENCE_S,
    is_worth_leaving,
    needed_gain,
    steps_within,
)

KNOWN_LAYOUTS = 2
"""Measured layouts after which the planner decides unasked."""
COSTED = 8
"""Best cases with a count of the change's bytes."""


_Key = tuple[Degrees, Passes]
"""Identity of a layout in the job; its passes are never None."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of the job in one layout.

    Attributes:
        micro_batch: Samples of a pass.
        seconds: Typical seconds of one step.
        recompute, offload: None: by the script's flags.
    """

    degrees: Degrees
    micro_batch: int
    steps: int
    seconds: float
    recompute: Recompute | None = None
    offload: Offload | None = None

    @property
    def passes(self) -> Passes:
        return Passes(self.micro_batch, self.recompute, self.offload)


@dataclass(frozen=True, slots=True)
class PlannerTerms:
    """The user's settings for the planner, and the measured time of a change.

    Attributes:
        is_asked: The planner decides even without measurements.
        change: Pause of training in the last change; before the first, the assumed relaunch time.
    """

    is_asked: bool = False
    change: ChangeTime = field(default_factory=ChangeTime)


@dataclass(frozen=True, slots=True)
class _Case:
    """A choice that fits in memory, with seconds of a step and of the change."""

    choice: Choice
    seconds: float
    low: float
    high: float
    is_measured: bool
    cost_s: float
    work: float = 0.0
    """Steps within the residence."""
    uncounted: str = ""
    """Reason for a cost without the change's bytes."""


@dataclass(frozen=True, slots=True)
class Preference:
    """The planner of one job.

    Attributes:
        work: Computation of a step.
        device: Device of each rank.
        sharding: ZeRO stage by world size.
        is_sequence_parallel: The script's setting, at any degrees.
        recompute: Recomputation for a choice without its own.
        micro_batch: Samples of a pass for a choice without its own; lowered to a divisor of the
            replica's share of the global batch.
        terms: Settings of the user and time of a change.
        measured: Measurements of the job, one entry a layout.
        calibration: Prediction for other layouts from ``measured``.
    """

    work: Workload
    device: Device
    recompute: Recompute
    sharding: Sharding
    is_sequence_parallel: bool
    micro_batch: int
    terms: PlannerTerms = PlannerTerms()
    measured: tuple[Measured, ...] = ()
    calibration: Calibration = field(default_factory=uncalibrated, compare=False)
    offload: Offload = "none"
    """State in host memory for a choice without its own."""

    @property
    def is_deciding(self) -> bool:
        """Whether the user asked for the planner, or enough layouts are measured."""
        return self.terms.is_asked or len(self.measured) >= KNOWN_LAYOUTS

    def with_measured(self, found: Measured, change: ChangeTime | None = None) -> "Preference":
        """Return the planner with this measurement in place of an older one of the same layout.

        Args:
            change: Time of a change; None: not measured.
        """
        if change is not None:
            return replace(self, terms=replace(self.terms, change=change)).with_measured(found)
        key = found.degrees, found.passes
        others = (each for each in self.measured if (each.degrees, each.passes) != key)
        return self.with_all_measured((*others, found))

    def recalling(self, measured: Sequence[Measured], change: ChangeTime | None) -> "Preference":
        """Return the planner with another one's measurements, still uncalibrated:
        ``recalibrated`` takes time."""
        return replace(
            self, measured=tuple(measured), calibration=uncalibrated(),
            terms=replace(self.terms, change=change or self.terms.change),
        )  # fmt: skip

    @property
    def is_calibrated(self) -> bool:
        """Whether the calibration covers all measurements."""
        return self.calibration.rows == len(self.measured)

    def recalibrated(self) -> "Preference":
        """Return the planner calibrated by its measurements."""
        return self.with_all_measured(self.measured)

    def with_all_measured(self, measured: Sequence[Measured]) -> "Preference":
        """Return the planner calibrated by exactly these measurements."""
        kept = tuple(measured)
        if not kept:
            return replace(self, measured=(), calibration=uncalibrated())
        x = columns_of([self._case(each.degrees, each.passes) for each in kept])
        seconds = np.array([each.seconds for each in kept])
        return replace(self, measured=kept, calibration=calibrate(x, seconds))

    def on_hosts(self, slots: int) -> "Preference":
        """Return the planner for hosts with ``slots`` ranks each."""
        return replace(self, device=replace(self.device, per_host=max(1, slots)))

    def spilled(self, choice: Choice) -> str:
        """Return the reason for a choice's state in host memory, where nothing else fits."""
        return spill_line(columns_of([self._of(choice)]), self.calibration)

    def order(
        self,
        choices: Sequence[Choice],
        present: Degrees | None,
        ran: Passes = AS_GIVEN,
        failed: Sequence[Choice] = (),
    ) -> tuple[Choice, ...]:
        """Return the choices that fit in memory, best first, each with its reason; empty if the
        planner does not decide.

        Args:
            choices: Valid choices, each once.
            present: Running degrees; None: none.
            ran: Passes of ``present``.
            failed: Choices that ran out of memory; a choice modelled at as many bytes does not fit.
        """
        if not self.is_deciding or not choices:
            return ()
        runs = None if present is None else self._key(present, ran)
        cases = sorted(self._cases(choices, runs, failed), key=_by_work)
        if not cases:
            return ()
        if runs is not None:
            nearest = [self._with_cost(case, runs) for case in cases[:COSTED]]
            cases = sorted([*nearest, *cases[COSTED:]], key=_by_work)
        stays = next((case for case in cases if self._of_choice(case.choice) == runs), None)
        first, why = cases[0], "the most work until the next change"
        if stays is not None:
            first, why = self._or_stay(cases, stays)
        others = [case for case in cases if case is not first]
        return (
            _with_reason(first, stays, why),
            *(_with_reason(case, stays, "next by work until the next change") for case in others),
        )

    def _or_stay(self, cases: Sequence[_Case], stays: _Case) -> tuple[_Case, str]:
        """Return the case to take if the present degrees are possible, and the reason."""
        best = cases[0]
        spread = self._spread(best, stays)
        if best is not stays and is_worth_leaving(best.work, stays.work, spread):
            return best, "the most work until the next change"
        return (
            stays,
            "kept" if best is stays else f"kept: nothing is better by {needed_gain(spread):.0%}",
        )

    def _with_cost(self, case: _Case, runs: _Key) -> _Case:
        """Return the case with the change's fixed seconds and those of its bytes."""
        if self._of_choice(case.choice) == runs:
            return case
        work, device, before = self._case(*runs)
        try:
            change = reconfiguration(
                work, device, before, self._of(case.choice)[2],
                relaunch_s=self.terms.change.fixed_s,
            )  # fmt: skip
        except ScalaiError as error:  # the formulas do not know the running layout's cut
            return replace(case, uncounted=str(error))
        return _worth(replace(case, cost_s=change.total_s))

    def _spread(self, one: _Case, other: _Case) -> float:
        """Return half of the 90 % interval of the two steps' ratio, less 1."""
        if one is other:
            return 0.0
        x = columns_of([self._of(one.choice), self._of(other.choice)])
        known = (one.is_measured, other.is_measured)
        return self.calibration.spread_of_ratio(x, MEASURED_SPREAD, known)

    def _cases(
        self, choices: Sequence[Choice], runs: _Key | None, failed: Sequence[Choice]
    ) -> list[_Case]:
        known = {self._key(each.degrees, each.passes): each for each in self.measured}
        x = columns_of([self._of(choice) for choice in choices])
        said, fits = self.calibration.predict(x), self._fits(x, failed)
        bias, found = self._bias(), []
        for place, choice in enumerate(choices):
            is_present = self._of_choice(choice) == runs
            mine = known.get(self._of_choice(choice))
            if not (fits[place] or is_present or mine is not None):
                continue
            numbers = (said.seconds[place], said.low[place], said.high[place])
            seconds, low, high = (float(number) * bias for number in numbers)
            if mine is not None:
                seconds = mine.seconds
                low, high = seconds / (1 + MEASURED_SPREAD), seconds * (1 + MEASURED_SPREAD)
            cost_s = 0.0 if is_present else self.terms.change.total_s
            case = _Case(choice, seconds, low, high, mine is not None, cost_s)
            found.append(_worth(case))
        return found

    def _fits(self, x: Cases, failed: Sequence[Choice]) -> Bools:
        """Return a mask of the cases that fit in memory by the model and by past failures."""
        needed = step_memory(x).total
        fits: Bools = fits_host(x) & (needed <= USABLE * self.device.memory)
        if failed:
            too_much = step_memory(columns_of([self._of(choice) for choice in failed])).total
            fits &= needed < too_much.min()
        return fits

    def _bias(self) -> float:
        """Return the factor of this job's measured over predicted seconds, common to its layouts.

        It is the middle value nearer to 1, so that one odd layout among two does not count.
        """
        if not self.measured:
            return 1.0
        x = columns_of([self._case(each.degrees, each.passes) for each in self.measured])
        longer = [one.seconds for one in self.measured] / self.calibration.predict(x).seconds
        return float(np.clip(1.0, median_low(longer), median_high(longer)))

    def _of(self, choice: Choice) -> tuple[Workload, Device, Layout]:
        return self._case(*choice.key)

    def _of_choice(self, choice: Choice) -> _Key:
        return self._key(*choice.key)

    def _fitted(self, degrees: Degrees, stated: int | None) -> int:
        batch, dp = self.work.global_batch, degrees.dp
        if stated or batch < dp:
            return stated or self.micro_batch
        return fit_batches(batch, dp, self.micro_batch, has_fillers=True).micro_batch_size

    def _key(self, degrees: Degrees, passes: Passes) -> _Key:
        """Return the layout, with the script's passes as defaults."""
        micro = self._fitted(degrees, passes.micro_batch_size)
        again, spilled = passes.recompute or self.recompute, passes.offload or self.offload
        return degrees, Passes(micro, again, spilled)

    def _case(self, degrees: Degrees, passes: Passes) -> tuple[Workload, Device, Layout]:
        layout = Layout(
            degrees, self._fitted(degrees, passes.micro_batch_size),
            passes.recompute or self.recompute, self.sharding.on(degrees.world_size),
            self.is_sequence_parallel and degrees.tp > 1, passes.offload or self.offload,
        )  # fmt: skip
        return self.work, self.device, layout


def measured_to_json(measured: Sequence[Measured]) -> list[list[object]]:
    """Return the input of ``measured_of_json``."""
    return [
        [
            each.degrees.to_json(),
            each.micro_batch,
            each.steps,
            each.seconds,
            each.recompute,
            each.offload,
        ]
        for each in measured
    ]


def measured_of_json(data: object) -> list[Measured]:
    """Read measured steps. Raises ``ValueError`` for anything else."""
    if not isinstance(data, list | tuple):
        raise ValueError(f"{data!r} is no list of measured steps")
    return [_measured_of_json(entry) for entry in data]


def change_to_json(change: ChangeTime | None) -> list[float | None]:
    """Return the input of ``change_of_json``: total seconds of a change, and its bytes' share."""
    return [None, None] if change is None else [change.total_s, change.moves_s]


def change_of_json(data: Sequence[object]) -> ChangeTime | None:
    """Read a change's seconds. Raises ``ValueError`` for anything else."""
    match tuple(data):
        case (None, None):
            return None
        case (float() | int() as total_s, float() | int() as moves_s):
            return ChangeTime(total_s - moves_s, moves_s)
    raise ValueError(f"{data!r} is no time of a change")


def _measured_of_json(entry: object) -> Measured:
    wrong = (
        f"{entry!r} is no measured step: degrees, samples of a pass, steps, seconds, recompute, "
        "offload"
    )
    match entry:
        case (
            dict() as degrees, int(micro), int(steps), float() | int() as seconds, again, *spilled,
        ) if (
            len(spilled) < 2 and
            all(isinstance(size, int) for size in degrees.values())
            and micro > 0 and 0 < seconds < inf
        ):  # fmt: skip
            passes = recompute_of_json(again), offload_of_json((*spilled, None)[0])
            return Measured(Degrees.from_json(degrees), micro, steps, float(seconds), *passes)
    raise ValueError(wrong)


def _worth(case: _Case) -> _Case:
    return replace(case, work=steps_within(RESIDENCE_S, case.cost_s, case.seconds))


def _by_work(case: _Case) -> float:
    return -case.work


def _with_reason(case: _Case, stays: _Case | None, why: str) -> Choice:
    source = "measured" if case.is_measured else f"{case.low:.3g} to {case.high:.3g}"
    text = f"{case.choice.reason}; by cost: {case.seconds:.3g} s a step ({source}), {why}"
    if stays is not None and case is not stays:
        is_same = stays.choice.degrees == case.choice.degrees
        runs = "what runs" if is_same else str(stays.choice.degrees)
        text += f"; {runs} has {stays.seconds:.3g} s, a change costs {case.cost_s:.0f} s"
        text += f" and its bytes: {case.uncounted}" if case.uncounted else ""
    return replace(case.choice, reason=text)
