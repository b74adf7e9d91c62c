"""What a step of a DeepSpeed engine has computed before its update."""

import sys
import time
from typing import Any

import torch

from scalai.core.function_proof import Numbers
from scalai.patches.function_proof import RandomDraws, mean, norm_of_gradients, random_parts


class StepNumbers:
    """The numbers of one engine's step while it is made. Every rank has them.

    Args:
        engine: Before its methods are hooked further.
        version: Of DeepSpeed.
    """

    def __init__(self, engine: Any, version: str, *, is_pipeline: bool) -> None:
        self._engine, self._version, self._is_pipeline = engine, version, is_pipeline
        self._losses: list[torch.Tensor] = []
        self._are_shares = False
        self._draws = RandomDraws()
        self._norm: float | None = None
        self.began = time.monotonic()

    def begin(self) -> None:
        """A step begins."""
        self._losses, self._draws, self._norm = [], RandomDraws(), None
        self.began = time.monotonic()

    def forward(self, method: Any, args: Any, kwargs: Any) -> Any:
        """Make a forward pass."""
        with self._draws:
            return method(*args, **kwargs)

    def note_loss(self, loss: Any, *, is_share: bool) -> None:
        """Note the loss of a micro-batch. ``is_share``: it was divided by their number before."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())
            self._are_shares = is_share

    def at_the_door(self) -> None:
        """All gradients of the step are there. Where nobody else takes their norm: of parameters
        that are whole on each rank, in float64."""
        engine = self._engine
        is_plain = engine.optimizer is getattr(engine, "basic_optimizer", None)
        if self._is_pipeline or not (is_plain and engine.is_gradient_accumulation_boundary()):
            return
        self._norm = norm_of_gradients(engine.module)

    def take(self, result: Any, *, tp: int) -> Numbers:
        """Return the numbers of the step that has ended. A collective of the replicas.

        Args:
            result: Of ``train_batch`` of a pipeline, which is the loss.
            tp: Tensor-parallel degree.
        """
        engine = self._engine
        norm = getattr(engine.optimizer, "_global_grad_norm", None)
        norm = (self._norm if tp == 1 else None) if norm is None else float(norm)
        has_overflow = bool(getattr(engine.optimizer, "overflow", False))
        random = random_parts(engine.module) if self._is_pipeline else self._draws.found
        return Numbers(
            loss=float(result) if self._is_pipeline else self._loss(),
            norm=norm,
            is_skipped=has_overflow,
            dtype=self._dtype(),
            framework=f"deepspeed {self._version}",
            obstacle=f"{random}: other degrees have other random streams" if random else "",
            seconds=time.monotonic() - self.began,
        )

    def known(self, result: Any) -> tuple[Any, Any]:
        """Return loss and norm of the step that has ended as far as no collective is needed."""
        norm = getattr(self._engine.optimizer, "_global_grad_norm", None)
        return (result if self._is_pipeline else None), norm

    def _loss(self) -> float | None:
        if not self._losses:
            return None
        losses = torch.stack([loss.double().reshape(()) for loss in self._losses])
        value = losses.sum() if self._are_shares else losses.mean()
        return mean(float(value), self._engine.data_parallel_group, losses.device)

    def _dtype(self) -> str:
        engine = self._engine
        if engine.bfloat16_enabled():
            return "bfloat16"
        return "float16" if engine.fp16_enabled() else "float32"


def without_update(engine: Any) -> None:
    """From now on the engine's optimizer changes no parameter, and the engine tells nobody of a
    step. This process ends soon."""
    engine.monitor.enabled, engine.tput_timer.steps_per_output = False, None
    engine.steps_per_print = lambda: sys.maxsize  # it divides by it
    optimizer = getattr(engine, "basic_optimizer", None) or engine.optimizer
    optimizer.step = lambda *args, **kwargs: None
