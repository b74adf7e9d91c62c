"""What a step of Megatron-LM's ``train_step`` has computed before its update."""

import functools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from scalai.core.function_proof import Numbers
from scalai.patches.function_proof import NumberedSession, OwnLoop, mean

log = logging.getLogger(__name__)

LOSSES, SKIPPED, NORM = 0, 1, 5
"""Places in the result of ``train_step``, from 0.14 on."""
RANDOM = ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps")
"""Flags with which passes depend on random streams."""


class NormInDouble:
    """Takes the norm of a step's gradients once more, in float64: torch's own sums in float32 are
    off by 1e-5 on a CPU, as far as the fault is that is looked for. What the step itself does with
    its norm stays as it is.

    Attributes:
        norm: Of the step; None: there was none, or it was not finite.
    """

    def __init__(self, optimizer: Any) -> None:
        self.norm: float | None = None
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
        finally:
            clip_grads.l2_norm_impl = single
        return None if norm is None else float(norm)


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
    """Whether this rank is the one that tells of each step: the first of the last stage."""
    from megatron.core import parallel_state

    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    is_first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return bool(is_last and is_first and not parallel_state.get_tensor_model_parallel_rank())


def numbers_of(
    training: Any, result: tuple[Any, ...], began: float, exact: float | None = None
) -> Numbers:
    """Return the numbers of a step. A collective of the replicas of the last stage: a loss function
    may average over its own replica only.

    Args:
        training: The module ``megatron.training.training``.
        result: Of ``train_step``.
        began: When the step did, of ``time.monotonic``.
        exact: The norm of its gradients; None: as of the result.
    """
    import megatron.core
    from megatron.core import parallel_state

    job = training.get_args()
    norm = result[NORM] if exact is None else exact
    loss, total = None, loss_of(result)
    if total is not None:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        loss = mean(float(total), group, total.device)
    random = [f"{name} {value:g}" for name in RANDOM if (value := getattr(job, name, None))]
    dtype = "bfloat16" if job.bf16 else "float16" if job.fp16 else "float32"
    return Numbers(
        loss=loss,
        norm=None if norm is None else float(norm),
        is_skipped=bool(result[SKIPPED]),
        dtype=dtype,
        framework=f"megatron-core {megatron.core.__version__}",
        obstacle=f"{', '.join(random)}: other degrees have other random streams" if random else "",
        seconds=time.monotonic() - began,
    )


def watch_optimizer(
    session: NumberedSession, chunks: list[torch.nn.Module], optimizer: Any
) -> None:
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
