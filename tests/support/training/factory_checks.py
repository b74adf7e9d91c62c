"""What megatron's sharded state dicts say of a parameter, against what they do with its values."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.ssm.mamba_mixer import _split_tensor_factory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

import support.training.tiny_gpt  # noqa: F401 - turns CPU emulation on
from scalai.core.errors import RefusedError
from scalai.patches.megatron.shapes import global_name, parts_of


def gated(rank: int, store: dist.Store) -> list[str]:
    """Gate and up projection in one buffer: two boxes of one tensor, on the second of two ranks."""
    weight = ShardedTensor.from_rank_offsets(
        "decoder.layers.mlp.linear_fc1.weight",
        torch.randn(6, 4),
        (0, 2, 3),
        (1, 1, 2),
        prepend_axis_num=1,
    )
    return _agree(apply_swiglu_sharded_factory(weight, ((0, 2, 3),)))


def mamba(rank: int, store: dist.Store) -> list[str]:
    """One parameter that is a part of four tensors."""
    weight = ShardedTensor.from_rank_offsets(
        "decoder.layers.mixer.in_proj.weight",
        torch.randn(12, 4),
        (0, 1, 3),
        (1, 1, 2),
        prepend_axis_num=1,
    )
    return _agree(_split_tensor_factory(weight, [4, 4, 2, 2], ["z", "x", "B", "dt"], 0))


def transposed(rank: int, store: dist.Store) -> list[str]:
    """GroupedMLP up to 0.16: [hidden, experts * 2 * ffn], kept as experts of [2 * ffn, hidden]."""
    experts, hidden, ffn, tp, tp_rank = 2, 6, 5, 2, 1

    def build(key: str, values: torch.Tensor, replica: Any, flat: Any) -> list[ShardedTensor]:
        by_expert = values.view(experts, hidden, 2 * ffn).transpose(-1, -2)
        gate, up = torch.chunk(by_expert, 2, -2)
        return [
            ShardedTensor.from_rank_offsets(
                key,
                half.contiguous(),
                (0, 3, 4),
                (1, 0, 2),
                (2, position, tp * 2),
                prepend_axis_num=1,
            )
            for half, position in ((gate, tp_rank), (up, tp + tp_rank))
        ]

    return _agree(_factory(torch.randn(hidden, experts * 2 * ffn), build))


def averaging(rank: int, store: dist.Store) -> str:
    """A factory that is no slice is refused; returns the message."""

    def build(key: str, values: torch.Tensor, replica: Any, flat: Any) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, values.flip(0) * values)]

    try:
        list(parts_of(_factory(torch.randn(4, 3), build)))
    except RefusedError as error:
        return str(error)
    return "not refused"


def names(rank: int, store: dist.Store) -> list[str]:
    """Both of megatron's ways to name a layer, with and without experts."""
    return [
        global_name("decoder.layers.mlp.linear_fc1.weight", [3]),
        global_name("decoder.layers.3.mlp.linear_fc1.weight", []),
        global_name("decoder.layers.mlp.experts.experts.linear_fc1.weight", [3, 1]),
        global_name("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", [1]),
    ]


def _factory(data: torch.Tensor, build: Callable[..., Any]) -> ShardedTensorFactory:
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    return ShardedTensorFactory(key, data, build, lambda shards: None)


def _agree(item: Any) -> list[str]:
    """Compare each piece with what the factory makes of real values; return what was compared."""
    built = {}
    for shard in item.build_fn(item.key, item.data, item.replica_id, None):
        layers = shard.prepend_axis_num
        name = global_name(shard.key, shard.global_offset[:layers])
        built[name, tuple(shard.global_offset[layers:])] = shard.data
    compared = []
    for part in parts_of(item):
        for piece in part.pieces:
            values = built.pop((part.name, piece.box.offset))
            ours = torch.as_strided(item.data, piece.box.shape, piece.stride, piece.start)
            # A leading axis of size 1 may stand for the layer, which is in the name here.
            assert torch.equal(ours, values.reshape(piece.box.shape)), (part.name, piece)
            compared.append(f"{part.name} {list(part.shape)} {list(piece.box.offset)}")
    assert not built, f"not described: {sorted(built)}"
    return compared
