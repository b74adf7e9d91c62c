"""Features and releases of DeepSpeed that cannot change their layout, refused together at the
start, and one mended fault.

ZeRO stages of a job are those in which DeepSpeed itself trains the same:

* fp16, 0.18.3 to 0.19.8: without ZeRO ``DeepSpeedEngine.backward`` does not multiply the loss by
  the loss scale, and the optimizer divides the gradients by it all the same. So moments of stage 0
  do not go on in stages 1 to 3, nor the reverse: the state is exact, the losses are another
  training's. A scale of 1 changes nothing.
* Stage 2, 0.17.6 to 0.18.2: only the last micro-batch of a step counts (DeepSpeed's issue 7718).
  The number of micro-batches follows from DP.

Source: deepspeed/runtime/engine.py, fp16/fused_optimizer.py, fp16/unfused_optimizer.py and
zero/stage_1_and_2.py (``independent_gradient_partition_epilogue``).
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import wrapt

from scalai.core.errors import refuse_all
from scalai.core.release import numbers_of

log = logging.getLogger(__name__)

_ZERO_FLAGS: Mapping[str, str] = {
    "zero_quantized_weights": "ZeRO++ keeps weights in eight bits with scales",
    "zero_quantized_nontrainable_weights": "frozen weights are kept in eight bits with scales",
    "zenflow": "ZenFlow keeps the state of important gradients apart",
}
"""Forbidden switches of ``zero_optimization``, with reasons."""

_ENGINE_FLAGS: Mapping[str, str] = {
    "amp_enabled": "Apex keeps the masters inside of its own optimizer. Use bf16 or fp16",
    "random_ltd_enabled": "the schedule of dropped tokens is not carried",
    "eigenvalue_enabled": "the state of the quantization in training is not carried",
}
"""Forbidden features, by methods of an engine, with reasons."""


def refuse_unsupported(engine: Any) -> None:
    """Check an engine.

    Raises:
        RefusedError: Names every obstacle, with the reason.
    """
    refuse_all(_faults(engine))


def _faults(engine: Any) -> Iterator[str]:
    zero = engine._config.zero_config
    for name, reason in _ZERO_FLAGS.items():
        if getattr(zero, name, None):
            yield f"zero_optimization.{name}: {reason}"
    if zero.zero_hpz_partition_size > 1:
        yield (
            f"zero_optimization.zero_hpz_partition_size {zero.zero_hpz_partition_size}: ZeRO++ "
            "keeps second copies of weights on each node. Set it to 1"
        )
    yield from _faults_of_offloading(zero)
    for name, reason in _ENGINE_FLAGS.items():
        if hasattr(engine, name) and getattr(engine, name)():
            yield f"{name.removesuffix('_enabled')}: {reason}"
    if engine.has_moe_layers:
        yield "experts (MoE): their parameters have data-parallel groups of their own"
    if engine.optimizer is None or type(_base(engine.optimizer)).__name__ == "DummyOptim":
        yield "no optimizer: this engine does not train"
    if getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None:
        yield "torch_autocast in fp16: the state of torch's GradScaler is not carried. Use bf16"


def _faults_of_offloading(zero: Any) -> Iterator[str]:
    for name in ("offload_param", "offload_optimizer"):
        offload = getattr(zero, name)
        if offload is None:
            continue
        if offload.device == "nvme":
            yield (
                f"zero_optimization.{name}.device nvme: the state is in files of DeepSpeed's. Use "
                "cpu"
            )
        if getattr(offload, "super_offload", False):
            yield f"zero_optimization.{name}.super_offload: another process computes the updates"
        if getattr(offload, "ratio", 1.0) != 1.0:
            yield (
                f"zero_optimization.{name}.ratio {offload.ratio}: two optimizers keep a part of "
                "the state each. Leave it out"
            )


_ON_HOSTS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def offload_fault(optimizer: Any) -> str | None:
    """Return the reason against the state of a script's own optimizer in host memory; None: none,
    or DeepSpeed builds the optimizer."""
    if optimizer is None or type(optimizer).__name__ in ("DummyOptim", "DeepSpeedCPUAdam"):
        return None
    if type(optimizer) not in _ON_HOSTS:
        known = ", ".join(f"torch.optim.{kind.__name__}" for kind in _ON_HOSTS)
        return f"the script's optimizer is {type(optimizer).__name__}; {known} work there"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "the script's optimizer is capturable, which needs devices"
    return None


def needs_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed takes DeepSpeedCPUAdam for an offloaded optimizer."""
    params = (config.get("optimizer") or {}).get("params") or {}
    return not params.get("torch_adam")


def has_cpu_adam() -> bool:
    """Whether DeepSpeedCPUAdam is compiled, or can be: at its first use, in about a minute."""
    builder = importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder()
    try:
        builder.load(verbose=False)
    except Exception as error:  # whatever compilers raise
        log.warning(
            "event=offload detail=%r", f"DeepSpeedCPUAdam cannot be compiled, torch's slower Adam "
            f"updates in host memory: {error!r:.300}",
        )  # fmt: skip
        return False
    return True


def _base(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


UNSCALED_SINCE = (0, 18, 3)
LOSING_SINCE, KEEPING_SINCE = (0, 17, 6), (0, 18, 3)


def refuse_unfit_stages(
    config: Mapping[str, Any], stages: frozenset[int], before: int | None, version: str
) -> None:
    """Check the stages of a job.

    Args:
        config: DeepSpeed's configuration.
        stages: Stages from ``stages_of`` of ``converters/deepspeed/validity.py``.
        before: Stage of the round before; None: this is the first.

    Raises:
        RefusedError: The losses would fork.
    """
    passed = stages if before is None else stages | {before}
    refuse_all((*_forking(config, passed, version), *_losing(stages, version)))


def _forking(config: Mapping[str, Any], stages: frozenset[int], version: str) -> Iterator[str]:
    fp16 = config.get("fp16") or {}
    is_scaled = fp16.get("enabled") and fp16.get("loss_scale", 0) != 1
    if is_scaled and 0 in stages and stages != {0} and numbers_of(version) >= UNSCALED_SINCE:
        yield (
            f"fp16 with ZeRO stages {', '.join(map(str, sorted(stages)))} in one job: without ZeRO "
            f"DeepSpeed {version} divides gradients by a loss scale by which it has not multiplied "
            "the loss, so the losses would fork. Expected are stage 0 alone, or stages 1 to 3: "
            "correct zero_optimization.stage and [deepspeed] zero_stage, use bf16, or set "
            "fp16.loss_scale to 1"
        )


def _losing(stages: frozenset[int], version: str) -> Iterator[str]:
    if 2 in stages and LOSING_SINCE <= numbers_of(version) < KEEPING_SINCE:
        yield (
            f"ZeRO stage 2 with DeepSpeed {version}: of gradients that it accumulates it keeps "
            "only the last micro-batch's, and another DP accumulates. Use stage 1 or 3, or "
            "DeepSpeed up to 0.17.5 or from 0.18.3 on"
        )


def install() -> None:
    """Let the flat buffers of ZeRO 1 and 2 be memory alone, without autograd's history.

    0.18.7 to 0.18.9 flatten the parameters with it. Their first step ends over gloo, which writes
    into views of the buffer: "Output 0 of Split is a view and is being modified inplace". DeepSpeed
    detaches the buffer itself from 0.19.0 on (its pull request 7948), and up to 0.18.6 flattens
    copies.

    Source: ``flatten_dense_tensors_aligned`` of deepspeed/runtime/zero/stage_1_and_2.py.
    """
    module = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
    name = "DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned"
    wrapt.wrap_function_wrapper(module, name, _detached)


def _detached(
    wrapped: Callable[..., torch.Tensor],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> torch.Tensor:
    return wrapped(*args, **kwargs).detach()
