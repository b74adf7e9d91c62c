"""The numbers of a ``train_step`` of Megatron-LM before its update."""

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from scalai.core.job.function_proof import Numbers
from scalai.patches.hooking import Call
from scalai.patches.megatron.shares import own_weight, trackers
from scalai.patches.step_proof import OwnLoop, RepeatedBatches, bare_pass, mean, random_parts
from scalai.runtime.session import Session

log = logging.getLogger(__name__)

LOSSES, SKIPPED, NORM = 0, 1, 5
"""Places in the result of ``train_step``, from 0.14 on."""
PARTS = ("data_iterator", "model", "optimizer", "opt_param_scheduler", "forward_backward_func")
"""Parameters of ``train_step`` needed for a further pass."""
RANDOM = ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps")
"""Flags for random numbers in passes."""
OBSTACLES = {
    "fp8": "FP8 keeps the largest values of each pass",
    "fp4": "FP4 keeps the largest values of each pass",
    "enable_cuda_graph": "CUDA graphs keep dropout",
    "external_cuda_graph": "CUDA graphs keep dropout",
    "cuda_graph_impl": "CUDA graphs keep dropout",
    "qk_clip": "--qk-clip changes weights behind each pass",
    "log_max_attention_logit": "--log-max-attention-logit keeps the largest of all passes",
    "moe_paged_stash": "the stash of experts is planned in the first pass",
    "fine_grained_activation_offloading": "offloaded activations are planned in the first pass",
}
"""Flags with permanent traces of a further pass, or with dropout in it."""


class NormInDouble:
    """Takes the norm of a step's gradients again, in float64: torch's sums in float32 are off by
    1e-5 on a CPU, as much as the faults it looks for. The step's own use of its norm stays.

    Attributes:
        norm: Norm of the step; None: none, or not finite.
        norms: Norms of the parts of a chain of optimizers: experts, spread by expert parallelism,
            and others.
    """

    def __init__(self, optimizer: Any) -> None:
        self.norm: float | None = None
        self.norms: dict[str, float] = {}
        self._optimizer = optimizer

    def __enter__(self) -> "NormInDouble":
        prepare = getattr(self._optimizer, "prepare_grads", None)
        if prepare is None:
            return self

        def prepare_and_measure() -> bool:
            has_infinite = bool(prepare())
            if not has_infinite:
                try:
                    self.norm = self._measure()
                except Exception as error:  # no step fails for its measure
                    log.warning("event=function_unproven no norm of the gradients: %r", error)
            return has_infinite

        self._optimizer.prepare_grads = prepare_and_measure
        return self

    def __exit__(self, *error: object) -> None:
        vars(self._optimizer).pop("prepare_grads", None)

    def _measure(self) -> float | None:
        from megatron.core.optimizer import clip_grads

        single, clip_grads.l2_norm_impl = clip_grads.l2_norm_impl, _norm_in_double
        try:
            norm = self._optimizer.get_grad_norm()
            self.norms = self._of_parts()
        finally:
            clip_grads.l2_norm_impl = single
        return None if norm is None else float(norm)

    def _of_parts(self) -> dict[str, float]:
        from megatron.core.optimizer import ChainedOptimizer

        if type(self._optimizer) is not ChainedOptimizer:
            return {}
        parts: dict[str, list[float]] = {}
        for each in self._optimizer.chained_optimizers:
            kinds = {bool(group.get("is_expert_parallel")) for group in each.param_groups}
            name = "experts" if kinds == {True} else "others"
            parts.setdefault(name, []).append(float(each.get_grad_norm() or 0.0))
        found = {name: math.hypot(*norms) for name, norms in parts.items()}
        return found if "experts" in found else {}


def _norm_in_double(chunk: int, buffer: Any, tensors: Any, by_tensor: bool) -> tuple[Any, None]:
    """Stand in for apex's ``multi_tensor_l2norm``."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for part in tensors for t in part]
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1).float(), None


@contextmanager
def without_update(optimizer: Any) -> Iterator[None]:
    """Have ``optimizer.step`` prepare gradients and return their norm, and change no parameter."""
    optimizer.step_with_ready_grads = lambda: True
    try:
        yield
    finally:
        del optimizer.step_with_ready_grads


def loss_of(result: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the sum of the losses of a step, as its result has it; None: another stage has it."""
    if not result[LOSSES]:
        return None
    return torch.stack([torch.as_tensor(v).double().sum() for v in result[LOSSES].values()]).sum()


def tells_of_steps() -> bool:
    """True if this rank tells of each step: the first of the last stage."""
    from megatron.core import parallel_state

    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    is_first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return bool(is_last and is_first and not parallel_state.get_tensor_model_parallel_rank())


def randomness_of(job: Any, chunks: list[torch.nn.Module]) -> str:
    """Return the sources of random numbers in steps; empty: none known."""
    flags = [f"{name} {value:g}" for name in RANDOM if (value := getattr(job, name, None))]
    return ", ".join(flags) or next(filter(None, map(random_parts, chunks)), "")


def obstacle_of(job: Any, given: Mapping[str, Any]) -> str:
    """Return the obstacle to a further pass; empty: none. ``given`` are the arguments of
    ``train_step``."""
    for name, reason in OBSTACLES.items():
        if getattr(job, name, None) not in (None, False, "none", ""):
            return reason
    if getattr(job, "rerun_mode", "disabled") == "report_stats":
        return "--rerun-mode report_stats makes each pass again by itself"
    if missing := [name for name in PARTS if name not in given]:
        return f"train_step is not Megatron-LM's: it has no {', '.join(missing)}"
    is_dino = getattr(job, "vision_pretraining_type", None) == "dino"
    if is_dino and getattr(job, "vision_pretraining", False):
        return "DINO changes its teacher in each step"
    return ""


def numbers_of(
    training: Any,
    result: tuple[Any, ...],
    began: float,
    exact: NormInDouble,
    unlike: str = "",
) -> Numbers:
    """Return the numbers of a step. A collective of the replicas of the last stage: a loss function
    may average over its own replica only.

    Args:
        training: The module ``megatron.training.training``.
        result: Result of ``train_step``.
        began: Begin of the step, by ``time.monotonic``.
        exact: The norm of its gradients; without one the result's counts.
        unlike: Reason against a comparison, such as random streams.
    """
    import megatron.core
    from megatron.core import parallel_state

    job = training.get_args()
    norm = result[NORM] if exact.norm is None else exact.norm
    loss, total = None, loss_of(result)
    if total is not None:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # A loss may be of this replica's micro-batches alone.
        loss = mean(float(total) * own_weight(), group, total.device)
    dtype = "bfloat16" if job.bf16 else "float16" if job.fp16 else "float32"
    return Numbers(
        loss=loss,
        norm=None if norm is None else float(norm),
        is_skipped=bool(result[SKIPPED]),
        dtype=dtype,
        framework=f"megatron-core {megatron.core.__version__}",
        obstacle=unlike,
        seconds=time.monotonic() - began,
        norms=exact.norms,
        is_random=bool(unlike),
    )


class BareStep:
    """A step without random numbers and update, before or instead of the real one, with the same
    micro-batches.

    Args:
        training: The module ``megatron.training.training``.
        train_step: Its function.
        given: The call's arguments.
    """

    def __init__(self, training: Any, train_step: Call, given: dict[str, Any]) -> None:
        self._training, self._train_step, self._given = training, train_step, given
        iterators = given["data_iterator"]
        self._batches: Any = _dealt(iterators, RepeatedBatches)

    def make(self, *, is_first: bool) -> Numbers:
        """Make it. Every rank does. ``is_first``: of its round."""
        from scalai.patches.megatron import this_rank

        if is_first and isinstance(self._batches, RepeatedBatches):
            self._batches.prime()
        began, job = time.monotonic(), self._training.get_args()
        optimizer, chunks = self._given["optimizer"], self._given["model"]
        still = SimpleNamespace(step=lambda *args, **kwargs: None)
        changed = _changed_by_a_pass(optimizer)
        with _not_written(job), without_update(optimizer), NormInDouble(optimizer) as norm:
            streams = lambda: this_rank.rng_state(this_rank.degrees())()  # noqa: E731
            with bare_pass(chunks, streams, this_rank.continue_rng, changed) as drawn:
                result = self._call(is_copying=True, opt_param_scheduler=still)
        numbers = numbers_of(self._training, result, began, norm)
        return replace(numbers, obstacle=drawn.found, is_random=True)

    def real(self) -> Any:
        return self._call(is_copying=False)

    def _call(self, *, is_copying: bool, **other: Any) -> Any:
        method = self._given["forward_backward_func"]

        @functools.wraps(method)
        def passes(*args: Any, **kwargs: Any) -> Any:  # again, where Megatron checks a result
            kwargs["data_iterator"] = _dealt(
                self._batches, lambda each: each.rewind(is_copying=is_copying)
            )
            return method(*args, **kwargs)

        return self._train_step(**{**self._given, **other, "forward_backward_func": passes})


def _dealt(iterators: Any, make: Callable[[Any], Any]) -> Any:
    """Return ``make`` of each iterator: one, a list by chunk, and None on a rank without data."""
    if isinstance(iterators, list | tuple):
        return [_dealt(each, make) for each in iterators]
    return None if iterators is None else make(iterators)


def _changed_by_a_pass(optimizer: Any) -> list[dict[str, Any]]:
    """Return the objects changed by a pass of Megatron-LM's, beside gradients, buffers and random
    streams."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    scalers = [getattr(each, "grad_scaler", None) for each in chain]
    changed = [vars(get_rerun_state_machine()), *(vars(each) for each in scalers if each)]
    return [*changed, *trackers()]


@contextmanager
def _not_written(job: Any) -> Iterator[None]:
    """Keep ``train_step`` from writing files."""
    kept: Mapping[str, Any] = {
        key: value
        for key, value in vars(job).items()
        if key.startswith("save_") and key.endswith("_interval")
    }
    vars(job).update(dict.fromkeys(kept))
    try:
        yield
    finally:
        vars(job).update(kept)


def watch_optimizer(session: Session, chunks: list[torch.nn.Module], optimizer: Any) -> None:
    """Have a loop of one's own tell the norm of its gradients: the optimizer takes it."""
    import megatron.core

    if optimizer is None:
        return
    loop = OwnLoop(session, chunks, f"megatron-core {megatron.core.__version__}")
    step = optimizer.step

    @functools.wraps(step)
    def measured(*args: Any, **kwargs: Any) -> Any:
        if not loop.is_proving:
            return step(*args, **kwargs)
        with without_update(optimizer) if loop.is_last else nullcontext():
            with NormInDouble(optimizer) as exact:
                result = step(*args, **kwargs)
        loop.tell(exact.norm)
        return result

    optimizer.step = measured
