"""What cannot change its layout while it trains: said at the start, not at the first resize."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from scalai.patches.faults import refuse_all
from scalai.patches.megatron.optimizer import is_distributed, leaf_optimizers
from scalai.patches.megatron.shapes import unwrap

FIXED_AXES = ("cp",)
"""Degrees that have to stay what they are: no adapter is proven for another split of sequences."""

_UNSUPPORTED_OPTIMIZERS: Mapping[str, str] = {
    "LayerWiseDistributedOptimizer": "it gives whole parameters to data-parallel ranks",
    "FullyShardedOptimizer": "its parameters are sharded by Megatron-FSDP",
}
_UNSUPPORTED_ARGUMENTS: Mapping[str, str] = {
    "use_megatron_fsdp": "Megatron-FSDP shards parameters in a way that is not supported",
    "use_torch_fsdp2": "torch's FSDP shards parameters in a way that is not supported",
    "use_custom_fsdp": "Megatron-FSDP shards parameters in a way that is not supported",
    "use_precision_aware_optimizer": "the masters are inside the optimizer and may be scaled",
    "optimizer_cpu_offload": "the state is split over CPU and GPU copies",
    "fp8_param_gather": "parameters are kept in FP8 with scales",
    "fp8_param": "parameters are kept in FP8 with scales",
    "fp4_param": "parameters are kept in FP4 with scales",
    "async_save": "a save that is in flight at a resize would be lost",
}
"""Flags of Megatron-LM, as names of its arguments, that must be off, and why."""


def refuse_arguments(args: Any) -> None:
    """Check Megatron-LM's parsed arguments before the model is built.

    Args:
        args: The ``Namespace`` of ``get_args()``. Flags that a version does not know count as off.

    Raises:
        RefusedError: Names every flag that is in the way, with the reason.
    """
    refuse_all(_faults_of_arguments(args))


def refuse_unsupported(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Check a live model and its optimizer.

    Raises:
        RefusedError: Names everything that is in the way, with the reason.
    """
    refuse_all((*_faults_of_model(chunks), *_faults_of_optimizer(optimizer)))


def _faults_of_arguments(args: Any) -> Iterator[str]:
    for name, reason in _UNSUPPORTED_ARGUMENTS.items():
        if getattr(args, name, False):
            yield f"--{name.replace('_', '-')}: {reason}"
    instances = getattr(args, "num_distributed_optimizer_instances", 1) or 1
    if instances > 1:
        yield _several_instances(instances)


def _several_instances(instances: int) -> str:
    return (
        f"--num-distributed-optimizer-instances {instances}: only one is supported, every range of "
        "the optimizer state has one owner"
    )


def _faults_of_model(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    for chunk in chunks:
        model = unwrap(chunk)
        config = getattr(model, "config", None)
        for flag in ("fp8_param", "fp4_param"):
            if getattr(config, flag, False):
                yield f"{flag}: {_UNSUPPORTED_ARGUMENTS[flag]}"
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "device_mesh"):
                yield f"{name} is a DTensor: torch's FSDP and Megatron-FSDP are not supported"
                break


def _faults_of_optimizer(optimizer: Any) -> Iterator[str]:
    yield from _faults_by_name(optimizer)
    for leaf in leaf_optimizers(optimizer):
        yield from _faults_by_name(leaf)
        ddp = getattr(leaf, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False):
            yield f"use_megatron_fsdp: {_UNSUPPORTED_ARGUMENTS['use_megatron_fsdp']}"
        instances = getattr(ddp, "num_distributed_optimizer_instances", 1)
        if instances > 1 and is_distributed(leaf):
            yield _several_instances(instances)
        for flag in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
            if getattr(leaf.config, flag, False):
                yield f"{flag}: {_UNSUPPORTED_ARGUMENTS[flag]}"
        if type(leaf.optimizer).__name__ == "HybridDeviceOptimizer":
            yield f"HybridDeviceOptimizer: {_UNSUPPORTED_ARGUMENTS['optimizer_cpu_offload']}"


def _faults_by_name(optimizer: Any) -> Iterator[str]:
    name = type(optimizer).__name__
    if name in _UNSUPPORTED_OPTIMIZERS:
        yield f"{name}: {_UNSUPPORTED_OPTIMIZERS[name]}"
