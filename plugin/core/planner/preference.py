"""Which of the degrees that are valid a running job takes, by what they cost: a step, and the
change to them.

Whatever is taken is kept until something is better by more than is uncertain. What was measured in
the job itself is believed before what is predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median_high, median_low

import numpy as np
import numpy.typing as npt

from scalai.core.degrees.batches import fit_batches
from scalai.core.degrees.degrees import Degrees, Sharding
from scalai.core.degrees.passes import AS_GIVEN, Passes, Recompute, recompute_of_json
from scalai.core.degrees.policy import Choice
from scalai.core.errors import ScalaiError
from scalai.core.planner.columns import Columns, Layout, Workload, columns_of
from scalai.core.planner.devices import Device
from scalai.core.planner.fit import Calibration, calibrate, uncalibrated
from scalai.core.planner.meter import ChangeTime
from scalai.core.planner.reconfiguration import reconfiguration
from scalai.core.planner.step_memory import USABLE, step_memory
from scalai.core.planner.weighing import (
    MEASURED_SPREAD,
    RESIDENCE_S,
    is_worth_leaving,
    needed_gain,
    steps_within,
)

KNOWN_LAYOUTS = 2
"""So many layouts of a job were measured before its planner decides without being asked to."""
COSTED = 8
"""Of so many of the best the bytes of the change are counted."""


_Key = tuple[Degrees, Passes]
"""What tells a layout of the job from others: none of the passes is None."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of the job in one layout.

    Attributes:
        micro_batch: Samples of a pass.
        steps: How many were made while it was measured.
        seconds: Of a usual one.
        recompute: None: as the script's flags say.
    """

    degrees: Degrees
    micro_batch: int
    steps: int
    seconds: float
    recompute: Recompute | None = None

    @property
    def passes(self) -> Passes:
        return Passes(self.micro_batch, self.recompute)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a person says about the planner, and what the job has measured of its changes.

    Attributes:
        is_asked: The planner decides although nothing was measured yet.
        change: How long the training stands still for a change, as the last one took; until the job
            has made one, what a relaunch is taken to cost.
    """

    is_asked: bool = False
    change: ChangeTime = field(default_factory=ChangeTime)


@dataclass(frozen=True, slots=True)
class _Case:
    """A choice that fits, with what a step takes and what it would earn."""

    choice: Choice
    seconds: float
    low: float
    high: float
    is_measured: bool
    cost_s: float
    work: float = 0.0
    """Steps within the residence."""
    uncounted: str = ""
    """Why the bytes of the change are not in its cost."""


@dataclass(frozen=True, slots=True)
class Preference:
    """The planner of one job.

    Attributes:
        work: What a step computes.
        device: What each rank runs on.
        sharding: ZeRO's stage by world size.
        is_sequence_parallel: How the script runs, at any degrees.
        recompute: What is computed again where a choice does not say it.
        micro_batch: Samples of a pass where a choice does not say it: where they divide a
            replica's share of the global batch, else as many below as do.
        terms: What holds beside.
        measured: What the job has measured, one entry a layout.
        calibration: What those say of all other layouts.
    """

    work: Workload
    device: Device
    recompute: Recompute
    sharding: Sharding
    is_sequence_parallel: bool
    micro_batch: int
    terms: Terms = Terms()
    measured: tuple[Measured, ...] = ()
    calibration: Calibration = field(default_factory=uncalibrated, compare=False)

    @property
    def is_deciding(self) -> bool:
        """Whether its word counts: a person asked for it, or enough was measured."""
        return self.terms.is_asked or len(self.measured) >= KNOWN_LAYOUTS

    def with_measured(self, found: Measured, change: ChangeTime | None = None) -> "Preference":
        """Return the planner that has learned this, which replaces what it knew of the layout, and
        what a change takes (None: not measured)."""
        if change is not None:
            return replace(self, terms=replace(self.terms, change=change)).with_measured(found)
        key = found.degrees, found.passes
        others = (each for each in self.measured if (each.degrees, each.passes) != key)
        return self.with_all_measured((*others, found))

    def recalling(self, measured: Sequence[Measured], change: ChangeTime | None) -> "Preference":
        """Return the planner that knows what another one has measured; what that says of other
        layouts is computed by ``recalibrated``, which takes its time."""
        return replace(
            self, measured=tuple(measured), calibration=uncalibrated(),
            terms=replace(self.terms, change=change or self.terms.change),
        )  # fmt: skip

    @property
    def is_calibrated(self) -> bool:
        """Whether all that was measured counts for other layouts too."""
        return self.calibration.rows == len(self.measured)

    def recalibrated(self) -> "Preference":
        """Return the planner that has computed what its measurements say of other layouts."""
        return self.with_all_measured(self.measured)

    def with_all_measured(self, measured: Sequence[Measured]) -> "Preference":
        """Return the planner that knows this of the job, and nothing else."""
        kept = tuple(measured)
        if not kept:
            return replace(self, measured=(), calibration=uncalibrated())
        x = columns_of([self._case(each.degrees, each.passes) for each in kept])
        seconds = np.array([each.seconds for each in kept])
        return replace(self, measured=kept, calibration=calibrate(x, seconds))

    def on_hosts(self, slots: int) -> "Preference":
        """Return the planner for hosts with so many ranks each."""
        return replace(self, device=replace(self.device, per_host=max(1, slots)))

    def order(
        self,
        choices: Sequence[Choice],
        present: Degrees | None,
        ran: Passes = AS_GIVEN,
        failed: Sequence[Choice] = (),
    ) -> tuple[Choice, ...]:
        """Return the choices that fit, best first, with the reason of each; none of them where the
        planner does not decide.

        Args:
            choices: What is valid, each once.
            present: The degrees that run; None: none do.
            ran: The passes that run with them.
            failed: What ran out of memory: nothing fits that is held to need as much.
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
        """Return what to take where the present degrees may stay, and why."""
        best = cases[0]
        spread = self._spread(best, stays)
        if best is not stays and is_worth_leaving(best.work, stays.work, spread):
            return best, "the most work until the next change"
        return (
            stays,
            "kept" if best is stays else f"kept: nothing is better by {needed_gain(spread):.0%}",
        )

    def _with_cost(self, case: _Case, runs: _Key) -> _Case:
        """Return the case with the seconds of its change: those that any takes, and those of its
        own bytes."""
        if self._of_choice(case.choice) == runs:
            return case
        work, device, before = self._case(*runs)
        try:
            change = reconfiguration(
                work, device, before, self._of(case.choice)[2],
                relaunch_s=self.terms.change.fixed_s,
            )  # fmt: skip
        except ScalaiError as error:  # what runs is cut as the formulas do not know
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

    def _fits(self, x: Columns, failed: Sequence[Choice]) -> Bools:
        """Return which of these cases fit into memory, as far as that is known."""
        needed = step_memory(x).total
        fits: Bools = needed <= USABLE * self.device.memory
        if failed:
            too_much = step_memory(columns_of([self._of(choice) for choice in failed])).total
            fits &= needed < too_much.min()
        return fits

    def _bias(self) -> float:
        """Return by how much steps of this job take longer than predicted, as far as coefficients
        do not say it: all of its layouts have that in common. Of two middle ones it is the one
        nearer to 1, so that one strange layout among two says nothing of all others."""
        if not self.measured:
            return 1.0
        x = columns_of([self._case(each.degrees, each.passes) for each in self.measured])
        longer = [one.seconds for one in self.measured] / self.calibration.predict(x).seconds
        return float(np.clip(1.0, median_low(longer), median_high(longer)))

    def _of(self, choice: Choice) -> tuple[Workload, Device, Layout]:
        return self._case(*choice.key)

    def _of_choice(self, choice: Choice) -> _Key:
        return self._key(*choice.key)

    def _fitted(self, degrees: Degrees, micro_batch: int) -> int:
        if self.work.global_batch % degrees.dp:
            return micro_batch
        return fit_batches(self.work.global_batch, degrees.dp, micro_batch).micro_batch_size

    def _key(self, degrees: Degrees, passes: Passes) -> _Key:
        """Return the layout with the script's own passes where none are stated."""
        micro = self._fitted(degrees, passes.micro_batch_size or self.micro_batch)
        return degrees, Passes(micro, passes.recompute or self.recompute)

    def _case(self, degrees: Degrees, passes: Passes) -> tuple[Workload, Device, Layout]:
        layout = Layout(
            degrees, self._fitted(degrees, passes.micro_batch_size or self.micro_batch),
            passes.recompute or self.recompute, self.sharding.on(degrees.world_size),
            self.is_sequence_parallel and degrees.tp > 1,
        )  # fmt: skip
        return self.work, self.device, layout


def measured_to_json(measured: Sequence[Measured]) -> list[list[object]]:
    """Return what ``measured_of_json`` reads."""
    return [
        [each.degrees.to_json(), each.micro_batch, each.steps, each.seconds, each.recompute]
        for each in measured
    ]


def measured_of_json(data: object) -> list[Measured]:
    """Raises ``ValueError`` where it is nothing of the kind."""
    if not isinstance(data, list | tuple):
        raise ValueError(f"{data!r} is no list of measured steps")
    return [_measured_of_json(entry) for entry in data]


def change_to_json(change: ChangeTime | None) -> list[float | None]:
    """Return what ``change_of_json`` reads: the seconds of a change, and of these its bytes'."""
    return [None, None] if change is None else [change.total_s, change.moves_s]


def change_of_json(data: Sequence[object]) -> ChangeTime | None:
    """Read a change's seconds. Raises ``ValueError`` where it is nothing of the kind."""
    match tuple(data):
        case (None, None):
            return None
        case (float() | int() as total_s, float() | int() as moves_s):
            return ChangeTime(total_s - moves_s, moves_s)
    raise ValueError(f"{data!r} is no time of a change")


def _measured_of_json(entry: object) -> Measured:
    wrong = f"{entry!r} is no measured step: degrees, samples of a pass, steps, seconds, recompute"
    match entry:
        case (dict() as degrees, int(micro), int(steps), float() | int() as seconds, again) if (
            all(isinstance(size, int) for size in degrees.values())
            and micro > 0 and 0 < seconds < inf
        ):  # fmt: skip
            recompute = recompute_of_json(again)
            return Measured(Degrees.from_json(degrees), micro, steps, float(seconds), recompute)
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
