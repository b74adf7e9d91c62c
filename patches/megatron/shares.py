"""Uneven shares of the batch under Megatron-LM: data parallelism that does not divide it.

A step has ``n`` micro-batches; replica ``r`` takes every DP-th from the ``r``-th on. All replicas
make equally many passes, so that a collective within a pass meets its partners. Where a replica has
no micro-batch left, its last pass is a filler: its sampler gives the step's first micro-batch once
more, the loss has the factor zero, and its entry in the log is left out. Where shares are even,
nothing is wrapped.

By measured paces (``Session.paces``) slower replicas make fewer passes, without fillers: there no
collective of replicas lies within a pass. All divide their losses by one number.

Source: ``num_microbatches_calculator.py``, ``forward_step_calc_loss`` and ``backward_step`` of
schedules.py, ``train_step`` and ``evaluate`` of training.py, ``validate_args``, 0.14 to 0.20.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import wrapt

from scalai.converters.megatron.rules import LAYOUT
from scalai.core.degrees.batches import BatchRamp, Shares
from scalai.core.errors import RefusedError
from scalai.patches.hooking import Args, Call, Kwargs, given_to
from scalai.patches.step_proof import keep
from scalai.runtime.session import Session, current

CALCULATOR = "megatron.core.num_microbatches_calculator"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
VIRTUAL_STAGES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
EVAL_BATCH = "eval_global_batch_size"


class PassCount(int):
    """The passes of a step, as Megatron-LM counts with them: the product with micro-batch size and
    DP is the global batch, and a quotient by them is a mean over micro-batches."""

    batch: int
    block: int

    @classmethod
    def of(cls, batch: int, block: int) -> "PassCount":
        """Return it for ``batch`` samples, of which ``block`` are one micro-batch a replica."""
        passes = cls(-(-batch // block))
        passes.batch, passes.block = batch, block
        return passes

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int) or self.block % other:
            return int(self) * other
        block = self.block // other
        return self.batch if block == 1 else PassCount.of(self.batch, block)

    __rmul__ = __mul__

    def __rtruediv__(self, other: Any) -> Any:
        return other / (self.batch / self.block)


def install() -> None:
    wrapt.register_post_import_hook(_hook_calculator, CALCULATOR)
    wrapt.register_post_import_hook(_hook_schedules, SCHEDULES)
    for name in SCALERS:
        wrapt.register_post_import_hook(_hook_scaler, name)


def _hook_calculator(module: Any) -> None:
    wrapt.wrap_function_wrapper(module, "_build_num_microbatches_calculator", _build)


def _build(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Build a calculator of passes that leave no sample out."""
    given = given_to(wrapped, args, kwargs)
    block = given["micro_batch_size"] * given["data_parallel_size"]
    ramp, last = given.get("rampup_batch_size"), given.get("global_batch_size")
    sizes = [] if last is None else [last, *(map(int, ramp[:2]) if ramp else ())]
    is_other = given.get("step_batch_size_schedule") or given.get("decrease_batch_size_if_needed")
    if is_other or not any(size % block for size in sizes):
        return wrapped(*args, **kwargs)
    # Its own log would tell of a smaller batch.
    built = wrapped(**{**given, "rank": -1, "decrease_batch_size_if_needed": True})
    built.get = lambda: PassCount.of(built.current_global_batch_size, block)
    built.get_current_running_global_batch_size = built.get_current_global_batch_size
    return built


class _Divisible(int):
    """A number that any other divides, as far as it is asked by ``%``."""

    def __mod__(self, other: Any) -> int:
        return 0


OTHER_STAGES: dict[str, object] = {
    **dict.fromkeys(VIRTUAL_STAGES), "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}  # fmt: skip
"""Arguments that a layout of stages replaces, and their values without flags."""


def check_args(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have ``validate_args`` accept an evaluation's batch that replicas do not divide, and a
    round's layout of stages beside the script's own flags of stages.

    Raises:
        RefusedError: A replica would have no micro-batch, or the micro-batch does not divide it.
    """
    job = next(iter(given_to(wrapped, args, kwargs).values()))
    if getattr(job, LAYOUT, None):  # a person's script with both has been refused
        for name, value in OTHER_STAGES.items():
            if hasattr(job, name):
                setattr(job, name, value)
    batch = getattr(job, EVAL_BATCH, None) or getattr(job, "global_batch_size", None)
    is_dealt = getattr(job, "dataloader_type", None) in (None, "single", "cyclic")
    if not hasattr(job, EVAL_BATCH) or batch is None or not is_dealt:
        return wrapped(*args, **kwargs)
    setattr(job, EVAL_BATCH, _Divisible(batch))
    checked = wrapped(*args, **kwargs)
    setattr(job, EVAL_BATCH, int(getattr(job, EVAL_BATCH)))
    batch, micro = _evaluated(job)
    if batch % micro or batch < micro * job.data_parallel_size:
        raise RefusedError(
            f"an evaluation's batch of {batch} samples gives no whole micro-batches of {micro} to "
            f"each of {job.data_parallel_size} replicas. Use another --eval-micro-batch-size or DP."
        )
    return checked


def hook_training(training: Any) -> None:
    """Have the passes of training and evaluations fill uneven shares."""

    def get(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        return functools.partial(_passes, training, wrapped(*args, **kwargs))

    wrapt.wrap_function_wrapper(training, "get_forward_backward_func", get)


def _passes(training: Any, make: Callable[..., Any], **kwargs: Any) -> Any:
    """Make the passes of a step, of the training or an evaluation."""
    job, is_training = training.get_args(), not kwargs.get("forward_only", False)
    shares, session = None, current()
    if not _has_schedule(job):
        shares = _shares_of(job, kwargs["num_microbatches"], is_training=is_training)
    kwargs["num_microbatches"] = int(kwargs["num_microbatches"])
    is_measured = is_training and session is not None and session.paces is not None
    if shares is None and not is_measured:
        return make(**kwargs)
    replica, config = _replica(), training.get_model_config(_first(kwargs["model"]))
    if shares is not None:
        kwargs["num_microbatches"] = shares.passes_of(replica)
    has_filler = shares is not None and shares.has_filler(replica)
    kwargs["forward_step_func"] = _Passes(
        kwargs["forward_step_func"], kwargs["num_microbatches"], config.calculate_per_token_loss,
        has_filler=has_filler,
        divisor=shares.passes if shares is not None and shares.quotas else None,
        session=session if is_measured else None,
    )  # fmt: skip
    weight = 1.0 if shares is None or config.calculate_per_token_loss else shares.weight
    is_weighed = is_training and weight != 1.0
    with _weighed_gradients(config, weight) if is_weighed else nullcontext():
        made = make(**kwargs)
    if is_measured:
        _refuse_means(session, made, replica)
    if shares is None:
        return made
    made = made[:-1] if has_filler and made else made
    if not is_training and getattr(job, "sft", False):
        made = [_weighed(each, shares.weight_of(replica)) for each in made]
    return made


def _refuse_means(session: Session | None, losses: Any, replica: int) -> None:
    """Keep passes even for a script whose log has means of replicas, not sums over tokens: it takes
    them by a collective within each pass."""
    if session is None or session.paces or not losses or not isinstance(losses[0], dict):
        return
    if any(getattr(each, "numel", lambda: 1)() != 2 for each in losses[0].values()):
        why = "the script's losses are means, which replicas may exchange in each pass"
        session.keep_even(why, tells=replica == 0)


@contextmanager
def _weighed_gradients(config: Any, weight: float) -> Iterator[None]:
    """Scale a step's complete gradients by a weight: losses in 16 bits would round otherwise."""
    finalize = config.finalize_model_grads_func

    def finalized(model: Any, *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        for chunk in model:
            chunk.scale_gradients(weight)

    config.finalize_model_grads_func = finalized
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize


def _first(model: Any) -> Any:
    return model[0] if isinstance(model, list) else model


SCALERS = {
    "megatron.core.transformer.moe.moe_utils": "MoEAuxLossAutoScaler",
    "megatron.core.transformer.multi_token_prediction": "MTPLossAutoScaler",
    "megatron.core.transformer.experimental_attention_variant.dsa": "DSAIndexerLossAutoScaler",
}
"""Classes that give auxiliary losses a gradient of their own, by module."""
TRACKERS = ("get_moe_metrics_tracker", "get_moe_layer_wise_logging_tracker")
"""Functions for the logs of experts: from 0.18 on, and before."""


def trackers() -> list[dict[str, Any]]:
    """Return Megatron-LM's sums of auxiliary losses for its log."""
    found = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.core.transformer."):
            continue
        for key, value in list(vars(module).items()):
            if key.endswith("LoggingHelper") and isinstance(value, type):
                found.append(getattr(value, "tracker", {}))
        if get := next((vars(module)[key] for key in TRACKERS if key in vars(module)), None):
            tracker = get()
            found.append(tracker if isinstance(tracker, dict) else vars(tracker))
    return found


class _Filling:
    """The filler of this process that is being made: its auxiliary losses have no gradient, and
    what it counts in buffers and logs is put back."""

    put_back: Callable[[], None] | None = None

    def begin(self, chunk: torch.nn.Module) -> None:
        self.put_back = keep([chunk], trackers())

    def end(self) -> None:
        if self.put_back is not None:
            put_back, self.put_back = self.put_back, None
            put_back()


FILLING = _Filling()


class _Marked(torch.autograd.Function):
    """Marks a filler's output: its backward pass begins here, recomputed layers included."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, chunk: torch.nn.Module) -> torch.Tensor:
        ctx.chunk = chunk
        return output.clone()  # an output that is no view of another tensor may be freed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        FILLING.begin(ctx.chunk)
        return *gradients, None


def _hook_schedules(schedules: Any) -> None:
    def backward(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        try:
            return wrapped(*args, **kwargs)
        finally:
            FILLING.end()

    def forward(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        passes = args[0] if args else kwargs["forward_step_func"]
        if not isinstance(passes, _Passes) or passes.divisor is None:
            return wrapped(*args, **kwargs)
        return wrapped(**{**given_to(wrapped, args, kwargs), "num_microbatches": passes.divisor})

    wrapt.wrap_function_wrapper(schedules, "backward_step", backward)
    wrapt.wrap_function_wrapper(schedules, "forward_step", forward)


def _hook_scaler(module: Any) -> None:
    scaler = getattr(module, SCALERS[module.__name__], None)
    if scaler is None:
        return
    apply = scaler.apply

    def silent(output: torch.Tensor, loss: torch.Tensor) -> Any:
        return apply(output, loss if FILLING.put_back is None else loss * 0)

    scaler.apply = staticmethod(silent)


class _Passes:
    """A step's forward passes on a replica whose last one may be a filler.

    Args:
        forward: The script's forward step.
        is_per_token: Whether its losses are sums, divided by all tokens of the step.
        divisor: Number that divides losses on all replicas; None: that of the passes.
        session: Notes their begins; None: nobody does.
    """

    def __init__(
        self, forward: Callable[..., Any], passes: int, is_per_token: bool, *, has_filler: bool,
        divisor: int | None, session: Session | None,
    ) -> None:  # fmt: skip
        functools.update_wrapper(self, forward)
        self.divisor = divisor
        self._forward, self._passes, self._is_per_token = forward, passes, is_per_token
        self._has_filler, self._session = has_filler, session
        self._made: dict[int, int] = {}
        """Passes begun, by chunk of the model."""

    def __call__(self, iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._made[id(model)] = made = self._made.get(id(model), 0) + 1
        if self._session is not None:
            self._session.begin_pass(made - 1, self._passes)
        if made < self._passes or not self._has_filler:
            return self._forward(iterator, model, *args, **kwargs)
        FILLING.begin(model)
        try:
            output, loss_of = self._forward(iterator, model, *args, **kwargs)
        finally:
            FILLING.end()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output = _Marked.apply(output, model)  # type: ignore[no-untyped-call]
        return output, None if loss_of is None else functools.partial(self._silent, loss_of)

    def _silent(self, loss_of: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the results of a loss function with a loss of zero, and without tokens where they
        count."""
        found = loss_of(*args, **kwargs)
        if not isinstance(found, tuple):
            return found
        loss, *others = found
        if self._is_per_token and len(others) > 1:
            others[0] = others[0] * 0
        return loss * 0, *others


def _weighed(losses: Any, weight: float) -> Any:
    """Return an entry of the log whose values stand for a mean of this replica's micro-batches."""
    first = {key: each.view(-1).clone() for key, each in losses.items()}
    for each in first.values():
        each[0] *= weight
    return first


def _shares_of(job: Any, count: int, *, is_training: bool) -> Shares | None:
    """Return the shares of a step of the training, with its number of passes, or of an evaluation;
    None: they are even."""
    if not is_training:
        batch, micro = _evaluated(job)
    else:
        micro = job.micro_batch_size
        batch = count * micro * job.data_parallel_size  # of a ``PassCount`` too
    paces = _paces() if is_training else ()
    shares = Shares(batch // micro, job.data_parallel_size, paces)
    return None if shares.is_even else shares


def _paces() -> tuple[int, ...]:
    session = current()
    return () if session is None else session.paces or ()


def own_weight() -> float:
    """Return the factor of a mean over this replica's micro-batches of the present step in a mean
    over replicas, so that each micro-batch counts alike."""
    from megatron.core.num_microbatches_calculator import get_micro_batch_size, get_num_microbatches
    from megatron.core.parallel_state import get_data_parallel_world_size

    dp = get_data_parallel_world_size()
    batch = get_num_microbatches() * get_micro_batch_size() * dp  # of a ``PassCount`` too
    return Shares(batch // get_micro_batch_size(), dp, _paces()).weight_of(_replica())


def _replica() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_rank())


@dataclass(frozen=True, slots=True)
class UnevenSteps:
    """The samples of each step of a data set, where replicas have uneven shares of them.

    Attributes:
        ramp: Sizes of the global batch.
        dp: Number of replicas.
        before: Consumed samples of the job before the data set's first place.
        paces: As of ``Shares``.
    """

    ramp: BatchRamp
    dp: int
    before: int = 0
    paces: tuple[int, ...] = ()

    def size_at(self, place: int) -> int:
        """Return the samples of the step that begins at a place."""
        return self.ramp.size_at(self.before + place)


def steps_of(job: Any, *, is_training: bool, before: int = 0) -> UnevenSteps | None:
    """Return the steps of the training's data or an evaluation's; None: all shares are even.

    Args:
        job: Megatron-LM's arguments.
        before: As of ``UnevenSteps``.
    """
    dp = job.data_parallel_size
    if _has_schedule(job):
        return None
    if is_training:
        micro, last = job.micro_batch_size, job.global_batch_size
        start, by, samples = map(int, getattr(job, "rampup_batch_size", None) or (last, 1, 0))
        ramp = BatchRamp(start, by, samples, last)
    else:
        batch, micro = _evaluated(job)
        ramp = BatchRamp(batch, 1, 0, batch)
    paces = _paces() if is_training else ()
    is_even = not paces and not any(size % (micro * dp) for size in ramp.sizes)
    return None if is_even else UnevenSteps(ramp, dp, before, paces)


def _has_schedule(job: Any) -> bool:
    return bool(getattr(job, "step_batch_size_schedule", None))


def _evaluated(job: Any) -> tuple[int, int]:
    batch = getattr(job, EVAL_BATCH, None) or job.global_batch_size
    return batch, getattr(job, "eval_micro_batch_size", None) or job.micro_batch_size


class Filler(list[int]):
    """Samples of a filler: those of the replica's first micro-batch of the step."""


def dealt(shares: Shares, replica: int, begin: int, micro: int) -> Iterator[list[int]]:
    """Yield a replica's places of the step that begins at a place, micro-batch by micro-batch."""
    for number in shares.dealt_to(replica):
        yield [*range(begin + number * micro, begin + (number + 1) * micro)]
    if shares.has_filler(replica):
        first = begin + replica * micro
        yield Filler(range(first, first + micro))


def micro_batches(
    sampler: Any, steps: UnevenSteps, *, is_endless: bool = False
) -> Iterator[list[int]]:
    """Yield a replica's places until a step would go beyond the data.

    Args:
        sampler: A sampler of Megatron-LM's, at its consumed samples.
        is_endless: Places go on over all passes over the data.
    """
    begin, micro = sampler.consumed_samples, sampler.micro_batch_size
    while is_endless or begin + steps.size_at(begin) <= sampler.total_samples:
        size = steps.size_at(begin)
        shares = Shares(size // micro, steps.dp, steps.paces)
        yield from dealt(shares, sampler.data_parallel_rank, begin, micro)
        begin += size
