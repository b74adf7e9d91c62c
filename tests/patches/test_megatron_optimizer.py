"""Optimizers that keep the masters themselves: on the host, or in Transformer Engine's kernels."""

from types import SimpleNamespace
from typing import Any

import torch

from scalai.patches.megatron.optimizer_state import Owned, owned_parameters


class FusedAdam:
    """By the names that Megatron-LM uses of Transformer Engine's."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: dict[torch.Tensor, dict[str, Any]] = {p: {} for p in parameters}
        self.remainders: list[bool] = []

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool) -> None:
        self.remainders.append(store_param_remainders)
        moments = (torch.zeros(parameter.shape, dtype=torch.bfloat16) for _ in range(2))
        self.state[parameter] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))


class Hybrid:
    """HybridDeviceOptimizer (0.16.1): some parameters' masters are updated on the host."""

    def __init__(self, inner: dict[torch.Tensor, torch.Tensor], fused: FusedAdam) -> None:
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        on_host = [copy for copy in inner.values() if copy not in fused.state]
        self.sub_optimizers: tuple[Any, ...] = (torch.optim.AdamW(on_host), fused)
        self._inner = inner

    def _sync_sub_optimizers_state_to_hdo(self) -> None:
        states = {id(p): of for part in self.sub_optimizers for p, of in part.state.items()}
        for parameter, copy in self._inner.items():
            self.state[parameter] = {**states[id(copy)], "master_param": copy}


def test_masters_of_a_hybrid_optimizer_are_those_that_are_updated() -> None:
    model = [torch.ones(6, dtype=torch.bfloat16) * n for n in (1, 2)]
    shards = [parameter[2:5] for parameter in model]
    masters = [shard.float() for shard in shards]
    fused = FusedAdam([masters[1]])
    leaf = SimpleNamespace(
        optimizer=Hybrid(dict(zip(shards, masters, strict=True)), fused),
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
        gbuf_ranges=[],
        model_float16_groups=[model],
        model_fp32_groups=[[]],
        shard_float16_groups=[shards],
        shard_fp32_groups=[[]],
        shard_fp32_from_float16_groups=[[None, None]],
        _get_model_param_range_map=lambda _: {"param": SimpleNamespace(start=2, end=5)},
    )
    first, second = owned_parameters(leaf)
    for owned, shard, master in zip((first, second), shards, masters, strict=True):
        assert isinstance(owned, Owned)
        assert owned.main is shard
        assert owned.master is master
        assert (owned.low, owned.high, owned.is_sharded) == (2, 5, True)
    assert set(first.state) == {"step", "exp_avg", "exp_avg_sq"}
    assert {value.dtype for value in second.state.values()} == {torch.bfloat16}
    assert fused.remainders == [False]
    assert list(owned_parameters(leaf))[1].state.keys() == second.state.keys()  # made once
    assert fused.remainders == [False]
