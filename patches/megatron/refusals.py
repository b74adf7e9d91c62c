"""What of a live model and its optimizer cannot change its layout: said at the start, not at the
first resize.

The law is ``scalai.converters.megatron.rules``, as for the arguments of a script: here it is asked
by what was built, whatever script did so.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from scalai.converters.megatron.rules import (
    FSDP,
    REFUSED_OPTIMIZERS,
    allows_untested,
    configured_faults,
    summed_axes,
)
from scalai.converters.megatron.sums import BLOCKWISE
from scalai.core.faults import refuse_all
from scalai.patches.megatron import grid
from scalai.patches.megatron.optimizer import leaf_optimizers
from scalai.patches.megatron.shapes import unwrap


def refuse_unsupported(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Check a live model and its optimizer.

    Raises:
        RefusedError: Names everything that is in the way, with the reason.
    """
    refuse_all((*_faults_of_model(chunks), *_faults_of_optimizer(optimizer)))


def fixed_axes(chunks: Sequence[torch.nn.Module], optimizer: Any) -> Iterator[str]:
    """Yield the axes whose degree has to stay what it is, as far as model and optimizer show it."""
    yield "cp"  # no adapter is proven for another split of sequences
    for chunk in chunks:
        configured = getattr(getattr(unwrap(chunk), "config", None), "__dict__", {})
        yield from (axis for axis, _ in summed_axes(configured, grid.release()))
    for leaf in leaf_optimizers(optimizer):
        # TensorParallelMuon calls it mode up to 0.16 and tp_mode since.
        if BLOCKWISE in (getattr(leaf.optimizer, name, None) for name in ("mode", "tp_mode")):
            yield "tp"
            return


def _faults_of_model(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    for chunk in chunks:
        model = unwrap(chunk)
        yield from _faults_of_configuration(getattr(model, "config", None))
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "device_mesh"):
                yield f"{name} is a DTensor of torch's FSDP or Megatron-FSDP: {FSDP}"
                break


def _faults_of_optimizer(optimizer: Any) -> Iterator[str]:
    yield from _faults_by_name(optimizer)
    for leaf in leaf_optimizers(optimizer):
        yield from _faults_by_name(leaf)
        yield from _faults_of_configuration(getattr(leaf, "ddp_config", None))
        yield from _faults_of_configuration(leaf.config)


def _faults_of_configuration(config: Any) -> Iterator[str]:
    values = getattr(config, "__dict__", {})
    yield from configured_faults(values, allow_untested=allows_untested(os.environ))


def _faults_by_name(optimizer: Any) -> Iterator[str]:
    name = type(optimizer).__name__
    if name in REFUSED_OPTIMIZERS:
        yield f"{name}: {REFUSED_OPTIMIZERS[name]}"
