"""The numbers of a DeepSpeed engine's step before its update."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from scalai.core.job.function_proof import Numbers
from scalai.patches.deepspeed import small_state
from scalai.patches.hooking import Args, Call, Kwargs
from scalai.patches.step_proof import (
    RandomDraws,
    RepeatedBatches,
    bare_pass,
    mean,
    norm_of_gradients,
    other_streams,
    random_parts,
)

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


class StepNumbers:
    """The numbers of one engine's current step. Every rank has them.

    Args:
        engine: The engine, before further hooks of its methods.
    """

    def __init__(self, engine: Any, version: str, *, is_pipeline: bool) -> None:
        self._engine, self._version, self._is_pipeline = engine, version, is_pipeline
        self._losses: list[torch.Tensor] = []
        self._are_shares = False
        self._draws = RandomDraws()
        self._norm: float | None = None
        self.obstacle = ""
        self.began = time.monotonic()

    def begin(self) -> None:
        self._losses, self._draws, self._norm = [], RandomDraws(), None
        self.began = time.monotonic()

    def forward(self, method: Any, args: Any, kwargs: Any) -> Any:
        with self._draws:
            return method(*args, **kwargs)

    def note_loss(self, loss: Any, factor: float, *, is_share: bool) -> None:
        """Note the loss of a micro-batch, which has a factor. ``is_share``: it was divided by their
        number before."""
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach() * factor)
            self._are_shares = is_share

    def at_the_door(self) -> None:
        """Note the step's complete gradients. If nobody else takes their norm: the norm of whole
        parameters, in float64."""
        engine = self._engine
        is_plain = engine.optimizer is getattr(engine, "basic_optimizer", None)
        if self._is_pipeline or not (is_plain and engine.is_gradient_accumulation_boundary()):
            return
        self._norm = norm_of_gradients(engine.module)

    def take(self, result: Any, *, tp: int) -> Numbers:
        """Return the numbers of the finished step. A collective of the replicas.

        Args:
            result: The loss, of a pipeline's ``train_batch``.
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
            obstacle=other_streams(random, self.obstacle),
            seconds=time.monotonic() - self.began,
            is_random=bool(random),
        )

    def known(self, result: Any) -> tuple[Any, Any]:
        """Return loss and norm of the finished step, as far as known without a collective."""
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


class BareBatch:
    """A ``train_batch`` of a pipeline without random numbers and update, before or instead of the
    real one, with the same micro-batches.

    Args:
        engine: A ``PipelineEngine``.
        train_batch: Its method.
        args, kwargs: The call's arguments.
    """

    def __init__(self, engine: Any, train_batch: Call, args: Args, kwargs: Kwargs) -> None:
        self._engine, self._train_batch = engine, train_batch
        given = args[0] if args else kwargs.get("data_iter")
        self._is_given = given is not None
        self._iterator = given if self._is_given else engine.data_iterator
        reads = self._iterator is not None and (engine.is_first_stage() or engine.is_last_stage())
        self._batches = RepeatedBatches(self._iterator) if reads else None

    def make(self, numbers: StepNumbers, *, tp: int, is_first: bool) -> Numbers:
        """Make it; return ``numbers`` of it. Every rank does. ``is_first``: of its round."""
        engine = self._engine
        if is_first and self._batches is not None:
            self._batches.prime()
        streams = lambda: small_state.rng_state(engine)()  # noqa: E731
        with _undone(engine):
            with bare_pass([engine.module], streams, small_state.continue_rng, []) as drawn:
                told = numbers.take(self._call(is_copying=True), tp=tp)
        return replace(told, obstacle=drawn.found, is_random=True)

    def real(self) -> Any:
        return self._call(is_copying=False)

    def _call(self, *, is_copying: bool) -> Any:
        engine, batches = self._engine, self._batches
        if batches is None:
            return self._train_batch()
        batches.rewind(is_copying=is_copying)
        if self._is_given:
            loss = self._train_batch(batches)
        else:
            engine.data_iterator = batches
            loss = self._train_batch()
        if engine.data_iterator is batches:
            engine.data_iterator = self._iterator
        return loss


def obstacle_of(engine: Any) -> str:
    """Return why no further pass is made; empty: nothing stands in its way."""
    is_offloaded = getattr(engine.optimizer, "cpu_offload", False)
    return "an offloaded optimizer keeps gradients on the host" if is_offloaded else ""


def _basic(engine: Any) -> Any:
    return getattr(engine, "basic_optimizer", None) or engine.optimizer


def without_update(engine: Any) -> None:
    """From now on the engine's optimizer changes no parameter, and the engine tells nobody of a
    step."""
    engine.monitor.enabled, engine.tput_timer.steps_per_output = False, None
    engine.steps_per_print = lambda: sys.maxsize  # it divides by it
    _basic(engine).step = lambda *args, **kwargs: None


@contextmanager
def _undone(engine: Any) -> Iterator[None]:
    """Have a step update, count, schedule and tell nothing."""
    optimizer, basic, own = engine.optimizer, vars(_basic(engine)), vars(engine)
    scaler = getattr(optimizer, "loss_scaler", None)
    kept = [(own, {key: own[key] for key in (*COUNTERS, "lr_scheduler")})]
    for each in (optimizer, scaler, engine.tput_timer, engine.monitor):
        values = getattr(each, "__dict__", {})
        plain = {k: v for k, v in values.items() if isinstance(v, bool | int | float | None)}
        kept.append((values, plain))
    kept.append((basic, {key: basic[key] for key in ("step",) if key in basic}))
    without_update(engine)
    engine.lr_scheduler = None
    try:
        yield
    finally:
        del basic["step"], own["steps_per_print"]
        for values, entries in kept:
            values.update(entries)
