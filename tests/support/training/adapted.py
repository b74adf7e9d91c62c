"""Low-rank adapters of parallel layers, with Megatron-Bridge's names and cuts:
``<layer>.adapter.linear_in`` and ``linear_out``."""

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory


class Adapter(torch.nn.Module):
    """B @ A beside a layer. The first is cut as the layer's input is, or by rank; the second by
    rows, a gated layer's by those of both its parts. An expert's adapter is the expert's own."""

    def __init__(self, config: Any, layer: Any, rank: int) -> None:
        super().__init__()
        more = {
            "config": config, "init_method": config.init_method, "bias": False,
            "skip_bias_add": True, "is_expert": layer.is_expert,
        }  # fmt: skip
        is_row = isinstance(layer, RowParallelLinear)
        if is_row:
            self.linear_in: Any = RowParallelLinear(
                layer.input_size, rank, input_is_parallel=True, **more
            )
        else:
            self.linear_in = ColumnParallelLinear(
                layer.input_size, rank, gather_output=True, **more
            )
        self.linear_out: Any = ColumnParallelLinear(
            rank, layer.output_size, gather_output=is_row, **more
        )

    def forward(self, x: Any) -> Any:
        return self.linear_out(self.linear_in(x)[0])[0]


class Adapted:
    """Beside a layer's class: it has an adapter, which says itself how it is cut."""

    adapter: Adapter
    has_gate: bool
    """Its output is cut in two: a gate, and the values that pass it."""

    def forward(self, x: Any, *rest: Any, **more: Any) -> Any:
        output, bias = super().forward(x, *rest, **more)  # type: ignore[misc]
        return output + self.adapter(x), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        whole = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        below = f"{prefix}adapter."
        own = {key: value for key, value in whole.items() if not key.startswith(below)}
        for name, layer in self.adapter.named_children():
            of: Any = layer
            own |= of.sharded_state_dict(f"{below}{name}.", sharded_offsets, metadata)
        if self.has_gate:
            rows = f"{below}linear_out.weight"
            own[rows] = apply_swiglu_sharded_factory(own[rows], sharded_offsets)
        return own


class AdaptedColumn(Adapted, ColumnParallelLinear):
    pass


class AdaptedRow(Adapted, RowParallelLinear):
    pass


def add_adapters(model: Any, config: Any, rank: int) -> None:
    """Give each linear layer of the blocks an adapter."""
    for name, layer in [*model.decoder.named_modules()]:
        kind = {ColumnParallelLinear: AdaptedColumn, RowParallelLinear: AdaptedRow}.get(type(layer))
        if kind is not None:
            layer.adapter = Adapter(config, layer, rank)
            layer.has_gate = config.gated_linear_unit and name.endswith(".linear_fc1")
            layer.__class__ = kind
