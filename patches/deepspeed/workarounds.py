"""What is mended in versions of DeepSpeed that are known, so that their jobs train at all."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import wrapt


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
