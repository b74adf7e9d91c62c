"""Micro-batches of a step: DeepSpeed's loaders over torch's, and gradients accumulated by a script.

A script gets an accumulation to match the length of its loaders: both are the first round's until
the round's first draw, so schedules computed from them stay; behind it both are the round's.

If the script counts micro-batches itself, DeepSpeed does not: a step has the script's
micro-batches, whatever the configuration says. In a round with other replicas a number of the
script's own is wrong. So is a sum of losses without a division by their number.

Uneven shares (``core.degrees.batches``): the gradient of a filler has the factor zero, and its loss
counts nowhere; the gradients of all others have one factor. Where shares are even, nothing of it is
wrapped. In a pipeline slower replicas may make fewer passes by measured paces, without fillers.

Source: deepspeed/runtime/dataloader.py, runtime/pipe/engine.py, ``backward``, ``step``,
``set_gradient_accumulation_boundary`` and ``no_sync`` of runtime/engine.py, 0.16.9 to 0.19.8.
"""

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import wrapt

from scalai.core.degrees.batches import Shares
from scalai.core.errors import RefusedError
from scalai.patches.data.loaders import Feed
from scalai.patches.hooking import Args, Call, Kwargs
from scalai.patches.step_proof import keep
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


class _Weighed(torch.autograd.Function):
    """A value whose gradient has a factor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Accumulation:
    """Micro-batches of a step: the number made, if the script of an engine decides on it, and the
    weight of each, if replicas have uneven shares.

    Attributes:
        weight: Factor of a micro-batch, if not the one of a mean over the step's passes; set by a
            framework around the engine before each pass. None: that one.
        factor: Factor of the newest backward pass; 0 for a filler.
        has_fillers: True if replicas with a smaller share make a filler in the pass at hand.
    """

    def __init__(self) -> None:
        self._engine: Any = None
        self._is_the_scripts = False
        self._micro_batches = 0
        self._shares: Shares | None = None
        self._replica = 0
        self.weight: float | None = None
        self.factor = 1.0
        self.has_fillers = False

    def install(self, engine: Any) -> None:
        self._engine = engine
        for name in _DECIDES:
            if hasattr(engine, name):
                setattr(engine, name, self._noting(getattr(engine, name)))
        engine.backward = self._counting(engine.backward)

    def share(self, engine: Any, shares: Shares, replica: int) -> None:
        """Weigh the passes of an engine in a round with uneven shares; not of a pipeline."""
        self._engine, self._shares, self._replica = engine, shares, replica
        engine.forward = self._filling(engine.forward)
        engine.backward = self._weighing(engine.backward)
        if hasattr(
            engine, "_backward_prologue_per_tensor"
        ):  # a loss's own backward() may be called
            engine._backward_prologue = self._beginning(engine._backward_prologue)
            plain = engine._backward_prologue_per_tensor
            engine._backward_prologue_per_tensor = self._weighing_scaled(plain)

    def next_factor(self) -> float:
        """Return the factor of the next backward pass."""
        if self._shares is None:
            return 1.0
        if self._is_short and self._is_last:
            return 0.0
        return self._shares.weight if self.weight is None else self.weight

    def own_weight(self) -> float:
        """Return the factor of a mean over this replica's micro-batches in a mean over replicas."""
        if self._shares is None:
            return 1.0
        return self._shares.weight_of(self._replica)

    @property
    def is_filler(self) -> bool:
        """True if the pass at hand is a filler."""
        return self.has_fillers and self._is_short

    def without_fillers(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return the values of all replicas, [replicas * each, ...], without a filler's."""
        if self._shares is None or gathered.ndim == 0:
            return gathered
        full = self._shares.micro_batches % self._shares.dp
        return gathered[: len(gathered) // self._shares.dp * full]

    @property
    def _is_short(self) -> bool:
        """True if this replica's last pass of a step is a filler."""
        assert self._shares is not None
        return self._shares.has_filler(self._replica)

    @property
    def _is_last(self) -> bool:
        """True if the pass at hand is the last of its step."""
        assert self._shares is not None
        is_stated = getattr(self._engine, "_is_gradient_accumulation_boundary", None) is not None
        is_counted_here = is_stated or self._is_the_scripts
        made = self._micro_batches if is_counted_here else self._engine.micro_steps
        return bool(made % self._shares.passes == self._shares.passes - 1)

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

    def _filling(self, method: Call) -> Call:
        @functools.wraps(method)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.has_fillers = torch.is_grad_enabled() and self._is_last
            if not (self.has_fillers and self._is_short):
                return method(*args, **kwargs)
            put_back = keep([self._engine.module], [])
            try:
                return method(*args, **kwargs)
            finally:
                put_back()

        return forward

    def _weighing(self, method: Call) -> Call:
        @functools.wraps(method)
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self.factor = self.next_factor()
            weighed = _Weighed.apply(loss, self.factor)  # type: ignore[no-untyped-call]
            return method(weighed, *args, **kwargs)

        return backward

    def _beginning(self, plain: Call) -> Call:
        @functools.wraps(plain)
        def begin(*args: Any, **kwargs: Any) -> Any:
            if not self._engine._running_engine_backward:
                self.factor = self.next_factor()
                self._micro_batches += 1
            return plain(*args, **kwargs)

        return begin

    def _weighing_scaled(self, plain: Call) -> Call:
        @functools.wraps(plain)
        def scale(gradient: Any) -> Any:
            scaled = plain(gradient)
            # Of the engine's own backward() it returns the gradient itself.
            return scaled if scaled is gradient else scaled * self.factor

        return scale


def evaluating(evaluate: Call, shares: Shares) -> Call:
    """Return a pipeline's ``eval_batch`` that draws no more micro-batches than each replica has."""

    @functools.wraps(evaluate)
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(evaluate).bind(*args, **kwargs).arguments
        if given.get("num_micro_batches") is None:
            given["num_micro_batches"] = shares.micro_batches // shares.dp
        return evaluate(**given)

    return evaluated


class PipelinePasses:
    """The passes of a pipeline's step where shares are uneven, or passes are measured.

    Args:
        engine: A ``PipelineEngine``.
        shares: Micro-batches of a step.
        replica: Index of this replica.
        begin_pass: As of ``Session``.
    """

    def __init__(
        self, engine: Any, shares: Shares, replica: int, begin_pass: Callable[[int, int], None]
    ) -> None:
        self._engine, self._shares, self._begin_pass = engine, shares, begin_pass
        self._passes, self._is_short = shares.passes_of(replica), shares.has_filler(replica)
        self._made = 0
        """Forward passes of training so far."""

    def install(self) -> None:
        engine, passes = self._engine, importlib.import_module("deepspeed.runtime.pipe.schedule")
        table = dict(engine._INSTRUCTION_MAP)
        table[passes.ForwardPass] = self._filling(table[passes.ForwardPass])
        table[passes.BackwardPass] = self._weighing(table[passes.BackwardPass])
        engine._INSTRUCTION_MAP = table
        engine._aggregate_total_loss = self._aggregating(engine._aggregate_total_loss)
        if self._shares.quotas:
            engine._exec_schedule = self._scheduling(engine._exec_schedule, passes.TrainSchedule)

    def _scheduling(self, run: Call, kind: Any) -> Call:
        @functools.wraps(run)
        def execute(schedule: Any) -> None:
            if isinstance(schedule, kind):
                schedule = type(schedule)(self._passes, schedule.stages, schedule.stage_id)
            run(schedule)

        return execute

    @property
    def _is_filler(self) -> bool:
        """True if the newest forward pass is a filler's."""
        return self._is_short and self._made % self._passes == 0

    def _filling(self, run: Call) -> Call:
        def forward(engine: Any, *args: Any, **kwargs: Any) -> None:
            if torch.is_grad_enabled():
                self._begin_pass(self._made % self._passes, self._passes)
                self._made += 1
            if not (torch.is_grad_enabled() and self._is_filler):
                run(engine, *args, **kwargs)
                return
            totals = [engine.total_loss, engine.total_additional_losses]
            put_back = keep([engine.module], [{"totals": totals}])
            run(engine, *args, **kwargs)
            put_back()
            engine.total_loss, engine.total_additional_losses = totals

        return forward

    def _weighing(self, run: Call) -> Call:
        def backward(engine: Any, *args: Any, **kwargs: Any) -> None:
            if engine.is_last_stage():  # there each forward pass is followed by its backward pass
                factor = 0.0 if self._is_filler else self._shares.weight
                engine.loss = _Weighed.apply(engine.loss, factor)  # type: ignore[no-untyped-call]
            run(engine, *args, **kwargs)

        return backward

    def _aggregating(self, aggregate: Call) -> Call:
        @functools.wraps(aggregate)
        def total() -> Any:
            engine, weight = self._engine, self._shares.weight
            if engine.is_last_stage():
                engine.total_loss = engine.total_loss * weight
                others = engine.total_additional_losses or {}
                for name in others:
                    others[name] = others[name] * weight
            return aggregate()

        return total
