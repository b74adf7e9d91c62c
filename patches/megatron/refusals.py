"""What of a live model and its optimizer cannot change its layout: said at the start, not at the
first resize.

What the arguments of a script say is the law of ``scalai.converters.megatron.rules``.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from scalai.converters.megatron.rules import ALLOW_UNTESTED, scaled_dtypes, untested
from scalai.core.faults import refuse_all
from scalai.patches.megatron.optimizer import leaf_optimizers
from scalai.patches.megatron.shapes import unwrap

_UNSUPPORTED_OPTIMIZERS: Mapping[str, str] = {
    "LayerWiseDistributedOptimizer": "it gives whole parameters to data-parallel ranks",
    "FullyShardedOptimizer": "its parameters are sharded by Megatron-FSDP",
}
_BLOCKWISE = "blockwise"
"""Muon's mode that orthogonalizes each tensor-parallel shard by itself."""


def refuse_unsupported(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Check a live model and its optimizer.

    Raises:
        RefusedError: Names everything that is in the way, with the reason.
    """
    refuse_all((*_faults_of_model(chunks), *_faults_of_optimizer(optimizer)))


def fixed_axes(optimizer: Any) -> Iterator[str]:
    """Yield the axes whose degree has to stay what it is, as far as the optimizer shows it."""
    yield "cp"  # no adapter is proven for another split of sequences
    for leaf in leaf_optimizers(optimizer):
        # TensorParallelMuon calls it mode up to 0.16 and tp_mode since.
        if _BLOCKWISE in (getattr(leaf.optimizer, name, None) for name in ("mode", "tp_mode")):
            yield "tp"
            return


def _faults_of_model(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    for chunk in chunks:
        model = unwrap(chunk)
        config = getattr(model, "config", None)
        for flag in ("fp8_param", "fp4_param"):
            if getattr(config, flag, False):
                yield f"{flag}: parameters are kept in {flag[:3].upper()} with scales"
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "device_mesh"):
                yield f"{name} is a DTensor: torch's FSDP and Megatron-FSDP are not supported"
                break


def _faults_of_optimizer(optimizer: Any) -> Iterator[str]:
    yield from _faults_by_name(optimizer)
    for leaf in leaf_optimizers(optimizer):
        yield from _faults_by_name(leaf)
        if getattr(getattr(leaf, "ddp_config", None), "use_megatron_fsdp", False):
            yield "use_megatron_fsdp: Megatron-FSDP shards parameters in a way of its own"
        yield from scaled_dtypes(vars(leaf.config))
        if os.environ.get(ALLOW_UNTESTED) != "1":
            yield from untested(vars(leaf.config))


def _faults_by_name(optimizer: Any) -> Iterator[str]:
    name = type(optimizer).__name__
    if name in _UNSUPPORTED_OPTIMIZERS:
        yield f"{name}: {_UNSUPPORTED_OPTIMIZERS[name]}"
