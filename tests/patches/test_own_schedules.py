"""Torch's schedules that a script steps itself go on where they were, through repeated epochs."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from scalai.core.errors import RefusedError
from scalai.patches.deepspeed.own_schedules import MAKERS, OwnSchedules, curve_of

pytestmark = [
    pytest.mark.fault,
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:Seems like:UserWarning"),
]


class WarmupThen(torchs.LRScheduler):
    """A warm-up that keeps the schedule that comes after it, as people write it."""

    def __init__(self, optimizer: Any, steps: int, after: Any) -> None:
        self.steps, self.after = steps, after
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch >= self.steps:
            return [float(rate) for rate in self.after.get_last_lr()]
        return [rate * (self.last_epoch + 1) / self.steps for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= self.steps:
            self.after.step()
            self._last_lr = self.after.get_last_lr()
        else:
            super().step()


KINDS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torchs.StepLR(o, 1, 0.5),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [2, 5]),
    "LambdaLR": lambda o: torchs.LambdaLR(o, lambda at: (at + 1) / 9),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 2.0, total_steps=20),
    "CyclicLR": lambda o: torchs.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "ReduceLROnPlateau": lambda o: torchs.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, 1.0, 3), torchs.StepLR(o, 2)], [3]
    ),
    "ChainedScheduler": lambda o: torchs.ChainedScheduler(
        [torchs.ConstantLR(o, 0.5, 2), torchs.ExponentialLR(o, 0.9)]
    ),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 3),
}
STEPS, LEFT_AT = 10, 4


class Round:
    """A script in one round: an optimizer, a schedule, and what the hooks know."""

    def __init__(self, saved: Any = None, group: Any = None) -> None:
        self.is_behind = saved is not None
        self.said: list[str] = []
        say = lambda detail, other: self.said.append(detail)  # noqa: E731
        self.hooks = OwnSchedules(lambda: self.is_behind, say, lambda event, text: say(text, event))
        self.hooks.install()
        self.optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
        self.engine = SimpleNamespace(optimizer=self.optimizer, lr_scheduler=None)
        self._group, self._saved = group or {}, saved

    def build_engine(self) -> None:
        self.hooks.start(self.engine)
        if self._saved is not None:
            self.hooks.put(json.loads(json.dumps(self._saved)))
            self.optimizer.param_groups[0].update(self._group)
            self.hooks.restored()

    def train(self, schedule: Any, steps: int) -> list[float]:
        """Return the learning rate of each step."""
        self.hooks.begin()
        rates = []
        for _ in range(steps):
            rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            step(schedule)
        return rates

    def after(self) -> "Round":
        """Return the next round, with what this one has left."""
        group = {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        return Round(self.hooks.take(), group)


def begun(make: Callable[[Any], Any], there: Round | None = None) -> tuple[Round, Any]:
    """Return a round whose script makes a schedule before its engine, and the schedule."""
    there = there or Round()
    schedule = make(there.optimizer)
    there.build_engine()
    return there, schedule


def step(schedule: Any) -> None:
    schedule.step(*((1.0,) if isinstance(schedule, torchs.ReduceLROnPlateau) else ()))


def schedules_of_torch() -> list[type]:
    kinds = [kind for kind in vars(torchs).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, torchs.LRScheduler)]


@pytest.fixture(autouse=True)
def _unhooked() -> Iterator[None]:
    """Leave torch as it was."""
    names, kinds = ("__init__", "step"), schedules_of_torch()
    before = [(kind, n, vars(kind)[n]) for kind in kinds for n in names if n in vars(kind)]
    yield
    for kind, name, method in before:
        setattr(kind, name, method)


@pytest.mark.parametrize("repeated", [LEFT_AT, 0], ids=["each-epoch", "each-step"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before-engine", "behind-engine"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_goes_on_where_it_was(kind: str, is_before: bool, repeated: int) -> None:
    """Stepped each epoch it is stepped again in the epochs that are over; each step, it is not."""
    alone = Round()
    alone.build_engine()
    expected = alone.train(KINDS[kind](alone.optimizer), STEPS)
    first, schedule = begun(KINDS[kind])
    made = first.train(schedule, LEFT_AT)
    # and none of its parts
    assert [reported["kind"] for reported in first.hooks.take()["own"]] == [kind]
    then = first.after()
    schedule = KINDS[kind](then.optimizer) if is_before else None
    then.build_engine()
    schedule = schedule or KINDS[kind](then.optimizer)
    for _ in range(repeated):
        step(schedule)
    then.is_behind = False
    assert made + then.train(schedule, STEPS - LEFT_AT) == expected
    assert not then.said


@pytest.mark.parametrize("left_at", [2, 6])
def test_a_warm_up_that_keeps_the_next_schedule_goes_on_where_it_was(left_at: int) -> None:
    def make(optimizer: Any) -> Any:
        return WarmupThen(optimizer, 3, torchs.ExponentialLR(optimizer, 0.5))

    alone, schedule = begun(make)
    expected = alone.train(schedule, STEPS)
    assert len(set(expected)) > 6
    first, schedule = begun(make)
    made = first.train(schedule, left_at)
    then, schedule = begun(make, first.after())
    then.is_behind = False
    assert made + then.train(schedule, STEPS - left_at) == expected


def test_schedules_that_something_else_carries_are_left_to_it() -> None:
    there = Round()
    schedules = [KINDS[kind](there.optimizer) for kind in ("StepLR", "LambdaLR", "MultiStepLR")]
    other = KINDS["StepLR"](torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    there.engine.lr_scheduler = schedules[0]
    there.hooks.stepped_elsewhere.append(lambda: [schedules[1]])
    there.build_engine()
    assert list(there.hooks.own()) == [schedules[2]] and other is not None


class Unplain:
    """A learning rate's function with a state that no text holds."""

    def __init__(self) -> None:
        self.seen = {1, 2}

    def __call__(self, at: int) -> float:
        return 1.0


def test_a_schedule_that_cannot_be_carried_is_refused_before_the_first_step() -> None:
    there, _schedule = begun(lambda optimizer: torchs.LambdaLR(optimizer, Unplain()))
    with pytest.raises(RefusedError, match=r"LambdaLR's .* cannot be kept as JSON"):
        there.hooks.begin()


def test_other_schedules_than_the_job_had_are_a_difference() -> None:
    """Where a person has changed the script's arguments they begin at its groups' rates."""
    saved = {"own": [{"kind": "StepLR", "state": {}}], "curves": []}
    then, schedule = begun(KINDS["LambdaLR"], Round(saved, {"lr": 0.25}))
    assert then.train(schedule, 1) == [0.25]
    (said,) = then.said
    assert "['StepLR'] when" in said and "['LambdaLR'] before the first" in said


def test_every_schedule_of_torch_is_noticed_when_it_is_made() -> None:
    schedules = [kind for kind in schedules_of_torch() if "__init__" in vars(kind)]
    roots = {vars(torchs)[name] for name in MAKERS}
    assert len(schedules) > 10
    for kind in schedules:
        assert roots & set(kind.__mro__), kind


def test_a_curve_that_is_another_one_is_found_before_the_first_step() -> None:
    """No state holds the functions of a schedule; what they say is compared."""

    def linear(total: int) -> Callable[[Any], Any]:
        return lambda optimizer: torchs.LambdaLR(optimizer, lambda at: 1 - at / total)

    first, schedule = begun(linear(24))
    first.train(schedule, 2)
    for total in (24, 12):
        then, _schedule = begun(linear(total), Round(first.hooks.take()))
        then.hooks.begin()
        assert len(then.said) == (total != 24)
    assert "LambdaLR gives [0.9166" in then.said[0]
    assert "at its step 1, and gave [0.958" in then.said[0]


def test_rates_that_a_script_has_begun_anew_are_those_of_the_state_and_are_told_of() -> None:
    first = Round()
    first.build_engine()
    first.hooks.begin()
    then = Round(first.hooks.take(), {"lr": 0.25})
    then.build_engine()
    then.optimizer.param_groups[0]["lr"] = 1.0
    then.hooks.begin()
    assert then.optimizer.param_groups[0]["lr"] == 0.25
    (said,) = then.said
    assert "has lr 1.0 before the first step; it had 0.25" in said


class Counting:
    """A function of a script's that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, at: int) -> float:
        self.calls += 1
        return 1.0 / self.calls


def test_snapshots_ask_nothing_of_a_schedules_functions() -> None:
    """They are a script's own: slow ones, and ones that count."""
    own, calls = Counting(), list[int]()

    def noting(at: int) -> float:
        calls.append(at)
        return 1.0

    there = Round()
    for function in (own, noting):
        schedule = torchs.LambdaLR(there.optimizer, function)
    there.build_engine()
    there.train(schedule, 1)
    made, asked = own.calls, len(calls)
    assert made == 1, "asked for its curve, it counts on from where it was"
    for _ in range(3):
        there.hooks.take()
        curve_of(schedule)
    assert (own.calls, len(calls)) == (made, asked)
