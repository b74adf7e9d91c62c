"""Micro-batches of a step: DeepSpeed's loaders over torch's, and gradients accumulated by a script.

A script gets an accumulation to match the length of its loaders: both are the first round's until
the round's first draw, so schedules computed from them stay; behind it both are the round's.

If the script counts micro-batches itself, DeepSpeed does not: a step has the script's
micro-batches, whatever the configuration says. In a round with other replicas a number of the
script's own is wrong. So is a sum of losses without a division by their number.

Source: deepspeed/runtime/dataloader.py, runtime/pipe/engine.py,
``set_gradient_accumulation_boundary`` and ``no_sync`` of runtime/engine.py, 0.19.8.
"""

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import wrapt

from scalai.core.errors import RefusedError
from scalai.patches.data.loaders import Feed
from scalai.patches.hooking import Args, Call, Kwargs
from scalai.patches.user_script import is_of_framework, script_place


def install(feed: Feed) -> None:

    def count(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> int:
        """A loader is as long as in the first round."""
        if not feed.is_training() or not feed.is_micro_batch(instance.batch_size):
            return int(wrapped(*args, **kwargs))
        return feed.length(len(instance.dataset), drop_last=instance.dataloader_drop_last)

    def draw(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """The repeating loader gives up after an empty pass; consumed ones are empty."""
        while True:
            try:
                return wrapped(*args, **kwargs)
            except StopIteration:
                if not feed.clocks.may_yield_nothing:
                    raise

    loaders = importlib.import_module("deepspeed.runtime.dataloader")
    wrapt.wrap_function_wrapper(loaders, "DeepSpeedDataLoader.__len__", count)
    wrapt.wrap_function_wrapper(loaders, "RepeatingLoader.__next__", draw)


def draw_anew(engine: Any) -> None:
    """Make a pipeline begin its data set again, at the restored position: it draws when it is
    built."""
    loader = engine.training_dataloader
    if loader is not None and hasattr(loader, "data_iter"):
        loader.data_iter = iter(loader.loader)


_DECIDES = ("set_gradient_accumulation_boundary", "no_sync")


class AsThen(int):
    """A number of this round for scripts to store. In arithmetic before the round's first draw it
    is the first round's; behind it, and as a bound of a count, this round's.

    Args:
        now: This round's number.
        then: The first round's.
        has_drawn: Returns True once this round has drawn its first batch.
    """

    def __new__(cls, now: int, then: int, has_drawn: Callable[[], bool]) -> "AsThen":
        made = super().__new__(cls, now)
        made._then, made._has_drawn = then, has_drawn
        return made

    _then: int
    _has_drawn: Callable[[], bool]

    @property
    def value(self) -> int:
        return int(self) if self._has_drawn() else self._then

    def __repr__(self) -> str:
        return repr(self.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __reduce__(self) -> Any:
        return int, (self.value,)


def _computing(name: str, *, is_reflected: bool) -> Callable[[AsThen, Any], Any]:
    compute = getattr(operator, name)

    def computed(self: AsThen, other: Any) -> Any:
        return compute(other, self.value) if is_reflected else compute(self.value, other)

    return computed


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    setattr(AsThen, f"__{_name}__", _computing(_name, is_reflected=False))
    setattr(AsThen, f"__r{_name}__", _computing(_name, is_reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(AsThen, f"__{_name}__", _computing(_name, is_reflected=False))


def told_accumulation(now: int, feed: Feed, asking: Any) -> int:
    """Return the micro-batches of a step, as the asker has to see them.

    Args:
        now: This round's number.
        asking: The asker's frame: frameworks get this round's number.
    """
    is_then = feed.first is not None and feed.is_counting and not feed.has_drawn
    if feed.first is None or not is_then or is_of_framework(asking):
        return now
    then = feed.first.num_micro_batches
    feed.observer.told(f"an accumulation of {then}")
    return now if then == now else AsThen(now, then, lambda: feed.has_drawn)


def tell(engine: Any, feed: Feed) -> None:
    """Have an engine tell the script of how many micro-batches a step is made."""
    plain = engine.gradient_accumulation_steps

    @functools.wraps(plain)
    def told() -> int:
        return told_accumulation(plain(), feed, sys._getframe(1))

    engine.gradient_accumulation_steps = told


_UNSCALED = (
    "engine.backward(scale_wrt_gas=False) ({place}) adds up the losses of a step as they are; how "
    "many a replica has changes with the number of replicas, and the gradient with it. Leave the "
    "argument out, and divide the loss by no number of micro-batches: DeepSpeed divides it by that "
    "of the round."
)


def _is_trainers(frame: FrameType | None) -> bool:
    """True if transformers' Trainer calls: it divides by the round's micro-batches itself. A
    script's own ``training_step`` has to divide, too."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            return True
        frame = frame.f_back
    return False


class Accumulation:
    """Micro-batches of a step, if the script of an engine decides on them."""

    def __init__(self) -> None:
        self._is_the_scripts = False
        self._micro_batches = 0

    def install(self, engine: Any) -> None:
        for name in _DECIDES:
            if hasattr(engine, name):
                setattr(engine, name, self._noting(getattr(engine, name)))
        engine.backward = self._counting(engine.backward)

    def end_step(self, each: int) -> None:
        """Check the micro-batches of an optimizer step.

        Args:
            each: Micro-batches of a step in this round.

        Raises:
            RefusedError: It had another number, by the script's decision.
        """
        made, self._micro_batches = self._micro_batches, 0
        if self._is_the_scripts and made not in (0, each):
            raise RefusedError(
                f"the script has accumulated {made} micro-batches by no_sync() or "
                f"set_gradient_accumulation_boundary(); a step of this round has {each}, which "
                "follow the number of replicas. Count them by engine.gradient_accumulation_steps() "
                "and state their number in DeepSpeed's configuration; or call engine.step() behind "
                "each, and let DeepSpeed count them."
            )

    def _noting(self, method: Call) -> Call:
        @functools.wraps(method)
        def decide(*args: Any, **kwargs: Any) -> Any:
            self._is_the_scripts |= not is_of_framework(sys._getframe(1))
            return method(*args, **kwargs)

        return decide

    def _counting(self, method: Call) -> Call:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def backward(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if given.get("scale_wrt_gas") is False and not _is_trainers(sys._getframe(1)):
                raise RefusedError(_UNSCALED.format(place=script_place()))
            self._micro_batches += 1
            return method(*args, **kwargs)

        return backward
