"""What megatron's optimizers keep for each model parameter on this rank.

Taken from the optimizers' own parallel lists and range maps, which are the same from 0.14 to 0.20.
Not through their ``sharded_state_dict``: its ``fully_reshardable`` form is silently wrong with
several buckets (0.15.3 to 0.19.0), and not through ``model_param_group_index_map``, which counts in
another order than ``param_groups`` where a group mixes fp32 and 16-bit parameters.
"""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.patches.first_step import torch_state

_MASTER = "master_param"
"""What FusedAdam and HybridDeviceOptimizer call the masters that they keep among their state."""
_KEEPS_MASTERS = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""Of an OptimizerConfig: whether the inner optimizer keeps the masters."""
_NO_STATE = (
    "the state of {} does not exist before its first step, and megatron has no function to make "
    "it. Use --optimizer adam or sgd."
)


@dataclass(frozen=True, eq=False, slots=True)
class Owned:
    """Elements ``[low, high)`` of a flattened model parameter, which this rank's optimizer updates.

    ``main`` is what the inner optimizer works on: [high - low] fp32 masters, a view of the
    parameter, or the parameter itself. ``state`` is the inner optimizer's own dict for it, without
    its ``master``: the elements that a precision-aware optimizer keeps itself, in a dtype of its
    own, or None. ``is_sharded``: other data-parallel ranks own the other elements (the distributed
    optimizer).
    """

    parameter: torch.Tensor
    main: torch.Tensor
    low: int
    high: int
    is_sharded: bool
    state: dict[str, Any]
    master: torch.Tensor | None = None


def leaf_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that own parameters, in order, from inside megatron's chains."""
    if hasattr(optimizer, "chained_optimizers"):
        for link in optimizer.chained_optimizers:
            yield from leaf_optimizers(link)
    elif optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False):
        if optimizer.optimizer is not None:
            yield optimizer


def owned_parameters(optimizer: Any) -> Iterator[Owned]:
    """Yield what this rank's optimizers own, with the state that a fresh optimizer lacks yet."""
    for leaf in leaf_optimizers(optimizer):
        _ensure_state(leaf)
        for parameter, main, low, high in _parameters(leaf):
            state = dict(leaf.optimizer.state[main])
            master = state.pop(_MASTER, None)
            yield Owned(parameter, main, low, high, is_distributed(leaf), state, master)


def is_distributed(leaf: Any) -> bool:
    """Whether this is the optimizer that splits its state over data-parallel ranks."""
    return hasattr(leaf, "gbuf_ranges")


def _parameters(leaf: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Yield (model parameter, what the inner optimizer updates, low, high) of one leaf."""
    if is_distributed(leaf):
        models = _flat(leaf.model_float16_groups), _flat(leaf.model_fp32_groups)
        # A precision-aware optimizer works on the 16-bit shards, and keeps their masters itself.
        keeps_masters = getattr(leaf.config, _KEEPS_MASTERS, False)
        halves = leaf.shard_float16_groups if keeps_masters else leaf.shard_fp32_from_float16_groups
        mains = _flat(halves), _flat(leaf.shard_fp32_groups)
        for model, main in zip(chain(*models), chain(*mains), strict=True):
            owned = leaf._get_model_param_range_map(model)["param"]
            yield model, main, owned.start, owned.end
    elif hasattr(leaf, "fp32_from_float16_groups"):  # Float16OptimizerWithFloat16Params
        full = list(_flat(leaf.fp32_from_fp32_groups))
        models = _flat(leaf.float16_groups), iter(full)
        mains = _flat(leaf.fp32_from_float16_groups), iter(full)
        for model, main in zip(chain(*models), chain(*mains), strict=True):
            yield model, main, 0, model.numel()
    elif type(leaf).__name__ == "FP32Optimizer":
        for model in _flat(group["params"] for group in leaf.optimizer.param_groups):
            yield model, model, 0, model.numel()
    else:
        raise RefusedError(
            f"the optimizer {type(leaf).__name__} is not known. Use --optimizer adam or sgd, with "
            "or without --use-distributed-optimizer."
        )


def _flat(groups: Iterable[Iterable[torch.Tensor]]) -> Iterator[torch.Tensor]:
    return chain.from_iterable(groups)


def _ensure_state(leaf: Any) -> None:
    """Give a fresh inner optimizer the state of a job that has made no step yet.

    Torch makes it in the first step. Megatron's own ``init_state_fn`` leaves out torch Adam's
    ``step``, so that the first step then fails.
    """
    inner = leaf.optimizer
    if hasattr(inner, "sub_optimizers"):  # HybridDeviceOptimizer: copies of parameters on the host
        for part in inner.sub_optimizers:
            if not _make_state(part) and not _make_fused_state(part):
                raise RefusedError(_NO_STATE.format(type(part).__name__))
        inner._sync_sub_optimizers_state_to_hdo()
    elif not _make_state(inner):
        _let_megatron_make_state(leaf)


def _make_state(inner: Any) -> bool:
    """Give an optimizer the state that its first step would make; False: nobody knows it here."""
    for group in inner.param_groups:
        for parameter in group["params"]:
            if inner.state[parameter]:
                continue
            state = torch_state(inner, parameter, group)
            if state is None:
                return False
            inner.state[parameter].update(state)
    return True


def _make_fused_state(inner: Any) -> bool:
    """Let Transformer Engine's FusedAdam make its state; False: it is another optimizer."""
    if not hasattr(inner, "initialize_state"):
        return False
    takes = inspect.signature(inner.initialize_state).parameters
    remainders = {"store_param_remainders": False} if "store_param_remainders" in takes else {}
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state[parameter]:
                inner.initialize_state(parameter, **remainders)
    return True


def _let_megatron_make_state(leaf: Any) -> None:
    if leaf.init_state_fn is None:
        raise RefusedError(_NO_STATE.format(type(leaf.optimizer).__name__))
    leaf.init_state_fn(leaf.optimizer, leaf.config)
