"""A script's own learning-rate schedules of torch, over the engine's optimizer.

They are carried with the learning rates made by them. A script of a later round makes its schedules
anew and goes through its epochs again. So their state is put back at the training's position, and
the script's steps before it are skipped.

Source: torch/optim/lr_scheduler.py, 2.13.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import wrapt
from torch.optim import lr_scheduler

from scalai.core.jsonable import Json
from scalai.patches.hooking import Call
from scalai.patches.plain import all_live, all_plain

log = logging.getLogger(__name__)


Curve = Sequence[Sequence[float]]
_CURVE_STEPS = (0, *(2**power for power in range(16)))
"""Steps of a schedule with a comparison of its functions."""
_MOST_FUNCTIONS = 16
_CURVES: weakref.WeakKeyDictionary[Any, Curve] = weakref.WeakKeyDictionary()
MAKERS = ("LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")
"""Classes with an ``__init__`` that may not call another of them."""


class OwnSchedules:
    """The schedules of one process stepped neither by the engine nor by a trainer around it.

    Args:
        is_behind: Returns True while the script repeats an earlier round.
        differs: Called with detail and way out if a schedule differs from the state's.
        say: Warns, with event and detail.

    Attributes:
        stepped_elsewhere: Return schedules carried elsewhere: a trainer's.
        following: Identities of schedules with functions of this round's ranks, stepped so.
        on_step: Called with a schedule's kind at a step, skipped or not.
    """

    def __init__(
        self,
        is_behind: Callable[[], bool],
        differs: Callable[[str, str], None],
        say: Callable[[str, str], None],
    ) -> None:
        self._is_behind, self._differs, self._say = is_behind, differs, say
        self.stepped_elsewhere: list[Callable[[], Iterable[Any]]] = []
        self.following: set[int] = set()
        self.on_step: Callable[[str], None] = lambda kind: None
        self._made: list[weakref.ref[Any]] = []
        self._curves: Sequence[Curve] = ()
        """Of the schedules: until this round's first step those of the state, then its own."""
        self._guarded: set[type] = set()
        self._engine: Any = None
        self._saved: Sequence[Mapping[str, Any]] | None = None
        self._groups: Sequence[Mapping[str, Any]] = ()
        """Values of the engine's restored parameter groups, before the script makes a schedule."""
        self._has_begun = False

    def install(self) -> None:
        for name in MAKERS:
            wrapt.wrap_function_wrapper(lr_scheduler, f"{name}.__init__", self._make)

    def start(self, engine: Any) -> None:
        """Know the engine; before the state is restored into it."""
        self._engine = engine

    def restored(self) -> None:
        """Keep the values of restored parameter groups: a new schedule sets them."""
        self._groups = [_values(group) for group in self._engine.optimizer.param_groups]

    def forget(self) -> None:
        """The engine has loaded a checkpoint, and the script does with its schedules as it says."""
        self._saved, self._groups = None, ()

    def take(self) -> Json:
        """Return the position of the schedules; None: no step was made yet."""
        if not self._has_begun:
            return {"own": self._saved, "curves": self._curves}
        own = list(self.own())
        states = [
            {
                "kind": (kind := type(schedule).__name__),
                "state": all_plain(_state(schedule, own), kind),
            }
            for schedule in own
        ]
        return {"own": states, "curves": self._curves}

    def put(self, saved: Mapping[str, Any]) -> None:
        self._saved, self._curves = saved["own"], saved["curves"]

    def begin(self) -> None:
        """Continue schedules and parameter groups of the last round, at this round's first step.
        Called at the place of a stop.

        Raises:
            RefusedError: A schedule's state has no JSON form, or the script has made other
                schedules without changed arguments.
        """
        if self._has_begun:
            return
        self._has_begun = True
        saved, self._saved = self._saved, None
        self._compare_curves()
        if saved is None:
            self.take()  # refuses here what it would refuse at a change
            return
        own = list(self.own())
        kinds = [type(schedule).__name__ for schedule in own]
        had = [entry["kind"] for entry in saved]
        is_same = kinds[: len(had)] == had
        if not is_same:
            self._differs(
                f"the script keeps learning-rate schedules over the engine's optimizer: {had} when "
                f"the state was taken, {kinds or 'none'} before the first step of this round",
                "Make the same ones, in the same order, before the training loop",
            )
        for entry, schedule in zip(saved, own, strict=False) if is_same else ():
            schedule.load_state_dict(all_live(entry["state"]))
        self._put_groups(is_scheduled=bool(had))

    def _put_groups(self, *, is_scheduled: bool) -> None:
        """Restore the parameter groups of the state: a new schedule sets them, and a script's
        settings at this place of its loop are the same."""
        if not self._groups:
            return
        groups = self._engine.optimizer.param_groups
        for number, (group, values) in enumerate(zip(groups, self._groups, strict=True)):
            others = [key for key, value in values.items() if not _is_equal(group.get(key), value)]
            if others and not is_scheduled:
                key = others[0]
                self._say(
                    "rates",
                    f"parameter group {number} has {key} {group.get(key)} before the first step; "
                    f"it had {values[key]} when the state was taken, and has that again. Have the "
                    "script set it by engine.global_steps, or by the epoch",
                )
            group.update(values)

    def _compare_curves(self) -> None:
        """Compare the functions of schedules with those of the state: no state holds them."""
        schedules, curves = list(self._on_engine()), self._curves
        self._curves = [curve_of(schedule) for schedule in schedules]
        for schedule, now, then in zip(schedules, self._curves, curves, strict=False):
            if id(schedule) in self.following:
                continue
            for at, (value, before) in enumerate(zip(now, then, strict=False)):
                is_alike = len(value) == len(before)
                if not is_alike or not np.allclose(value, before, 1e-9, 1e-12, equal_nan=True):
                    self._differs(
                        f"{type(schedule).__name__} gives {value} times the rate of each group at "
                        f"its step {_CURVE_STEPS[at]}, and gave {before} when the state was taken",
                        "Make it from len(loader), engine.gradient_accumulation_steps(), "
                        "engine.train_batch_size() or accelerator.num_processes, and not from "
                        "torch's or the environment's number of ranks",
                    )
                    return

    def _on_engine(self) -> Iterator[Any]:
        """Yield all schedules over the engine's parameter groups."""
        groups = {id(group) for group in self._engine.optimizer.param_groups}
        for of in self._made:
            schedule = of()
            over = getattr(getattr(schedule, "optimizer", None), "param_groups", ())
            if any(id(group) in groups for group in over):
                yield schedule

    def _make(self, wrapped: Call, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        if all(made() is not instance for made in self._made):
            self._made = [made for made in self._made if made() is not None]
            self._made.append(weakref.ref(instance))
            self._guard(type(instance))

    def _guard(self, kind: type) -> None:
        """Have the ``step`` of a class do nothing while the script is behind."""
        owner = next(base for base in kind.__mro__ if "step" in vars(base))
        if owner in self._guarded:
            return
        self._guarded.add(owner)
        plain = vars(owner)["step"]
        schedules = self

        @functools.wraps(plain)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if schedules._engine is not None:
                schedules.on_step(type(self).__name__)
            is_again = schedules._engine is not None and schedules._is_behind()
            if is_again and any(own is self for own in schedules.own()):
                return None  # stepped in an earlier round
            return plain(self, *args, **kwargs)

        owner.step = step  # type: ignore[attr-defined]

    def own(self) -> Iterator[Any]:
        """Yield the schedules over the engine's parameter groups, without those carried elsewhere
        and parts of others."""
        made = [schedule for of in self._made if (schedule := of()) is not None]
        others = [part for schedule in made for part in getattr(schedule, "_schedulers", ())]
        others += [self._engine.lr_scheduler]
        others += [schedule for entry in self.stepped_elsewhere for schedule in entry()]
        carried = {id(schedule) for schedule in others}
        groups = {id(group) for group in self._engine.optimizer.param_groups}
        for schedule in made:
            over = getattr(schedule.optimizer, "param_groups", ())
            if id(schedule) not in carried and any(id(group) in groups for group in over):
                yield schedule


def curve_of(schedule: Any) -> Curve:
    """Return the values of a LambdaLR's functions at some of its steps, [steps, functions]; empty:
    no functions.

    A script's functions may be slow, or count their calls: each schedule is asked once, and an
    object called as a function gets its attributes back.
    """
    if schedule not in _CURVES:
        each = {id(function): function for function in getattr(schedule, "lr_lambdas", ())}
        _CURVES[schedule] = _asked(list(each.values())[:_MOST_FUNCTIONS])
    return _CURVES[schedule]


def _asked(functions: Sequence[Callable[[int], Any]]) -> Curve:
    kept = [dict(getattr(function, "__dict__", {})) for function in functions]
    values = [[_value(function, at) for function in functions] for at in _CURVE_STEPS]
    for function, attributes in zip(functions, kept, strict=True):
        if attributes:
            vars(function).clear()
            vars(function).update(attributes)
    return values if functions else []


def _value(function: Callable[[int], Any], at: int) -> float:
    try:
        return float(function(at))
    except Exception as error:  # of any class: a script's function may know its own steps alone
        log.debug("event=curve unread=%d detail=%r", at, error)
        return -1.0


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _state(schedule: Any, own: Sequence[Any]) -> dict[str, Any]:
    """Return a schedule's state without schedules carried for themselves: a warm-up may hold its
    successor."""
    carried = {id(other) for other in own}
    return {key: v for key, v in schedule.state_dict().items() if id(v) not in carried}


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
