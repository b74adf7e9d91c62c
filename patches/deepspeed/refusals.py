"""What of DeepSpeed cannot change its layout while it trains: said at the start, all of it."""

from collections.abc import Iterator, Mapping
from typing import Any

from scalai.core.faults import refuse_all

_ZERO_FLAGS: Mapping[str, str] = {
    "zero_quantized_weights": "ZeRO++ keeps weights in eight bits with scales",
    "zero_quantized_nontrainable_weights": "frozen weights are kept in eight bits with scales",
    "zenflow": "ZenFlow keeps the state of important gradients apart",
}
"""Switches of ``zero_optimization`` that must be off, and why."""

_ENGINE_FLAGS: Mapping[str, str] = {
    "amp_enabled": "Apex keeps the masters inside of its own optimizer. Use bf16 or fp16",
    "random_ltd_enabled": "the schedule of dropped tokens is not carried",
    "eigenvalue_enabled": "the state of the quantization in training is not carried",
}
"""Methods of an engine that must say no, and why."""


def refuse_unsupported(engine: Any) -> None:
    """Check an engine.

    Raises:
        RefusedError: Names everything that is in the way, with the reason.
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


def _base(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)
