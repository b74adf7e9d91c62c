"""A tiny model for DeepSpeed with tensor-parallel layers, as a pipeline or as a plain module.

Its parameters do not depend on the degrees: each rank draws the whole ones and keeps its shards.
"""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import nn

VOCABULARY, LENGTH, HIDDEN, INNER, LAYERS = 31, 5, 8, 12, 3

group: Any = None
"""The tensor-parallel group; None: no such ranks."""


class _Spread(torch.autograd.Function):
    """Gives ranks the same input; adds up their gradients."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=group)
        return total


class _Sum(torch.autograd.Function):
    """Adds up what ranks have; gives them the same gradient."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


def cut(whole: torch.Tensor, dim: int, parts: int = 1) -> Any:
    """Return this rank's shard: of each of the parts that lie one behind the other."""
    if group is None:
        return nn.Parameter(whole)
    tp, rank = dist.get_world_size(group), dist.get_rank(group)
    shards = [part.chunk(tp, dim)[rank] for part in whole.chunk(parts, dim)]
    parameter: Any = nn.Parameter(torch.cat(shards, dim).contiguous())
    parameter.tensor_model_parallel = True  # DeepSpeed adds up its norm over the ranks
    parameter.partition_dim, parameter.partition_stride = dim, parts  # as Megatron's layers
    return parameter


class Embedding(nn.Module):
    """Of tokens and places; where it is tied, the head leaves the places alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN))
        self.places = nn.Parameter(torch.randn(LENGTH, HIDDEN))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens] + self.places


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate_up = cut(torch.randn(2 * INNER, HIDDEN) / 3, 0, parts=2)
        self.bias = cut(torch.randn(INNER) / 3, 0)
        self.down = cut(torch.randn(HIDDEN, INNER) / 3, 1)
        self.down_bias = nn.Parameter(torch.randn(HIDDEN) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = self.norm(x)
        if group is not None:
            inputs = _Spread.apply(inputs)
        gate, up = (inputs @ self.gate_up.t()).chunk(2, -1)
        inner = (nn.functional.silu(gate) * up + self.bias) @ self.down.t()
        return x + (inner if group is None else _Sum.apply(inner)) + self.down_bias


class Norm(nn.Module):
    def __init__(self, has_buffer: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        if has_buffer:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for buffer in self.buffers():
            buffer += 1
        return self.norm(x)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class Plain(nn.Module):
    """The same layers one after the other, and the loss."""

    def __init__(self, has_buffer: bool) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = Norm(has_buffer)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.norm(x) @ self.embedding.weight.t(), labels)


class Automatic(nn.Module):
    """Plain layers, which DeepSpeed's AutoTP cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER + 1)
        self.down = nn.Linear(INNER + 1, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(nn.functional.silu(self.up(x)))
        return loss_of(self.head(x), labels)


def automatic_config(tp: int) -> dict[str, Any]:
    """Return what AutoTP is to do: ``up`` has an odd number of rows."""
    layers = [
        {"patterns": [r".*up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*down\.weight$"], "partition_type": "row"},
    ]
    partition = {"use_default_specs": False, "layer_specs": layers}
    return {"tensor_parallel": {"autotp_size": tp, "partition_config": partition}}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def make_parallel_model(job: Any) -> Any:
    """Return a job's model and DeepSpeed's ``mpu`` for it; ``pp`` 0: no pipeline."""
    global group
    pp, tp, world = job.pp, max(job.tp, 1), job.world
    topology = PipeModelDataParallelTopology(max(pp, 1), tp, world // max(pp, 1) // tp)
    grid = PipelineParallelGrid(topology=topology, process_group=dist.group.WORLD)
    group = grid.get_slice_parallel_group() if tp > 1 else None
    if not pp:
        return Plain(job.has_buffer), grid
    blocks = [LayerSpec(Block) for _ in range(LAYERS)]
    if job.tied:
        first = TiedLayerSpec("embed", Embedding)
        last = TiedLayerSpec("embed", Embedding, forward_fn=lambda layer, x: x @ layer.weight.t())
    else:
        first, last = LayerSpec(Embedding), LayerSpec(Head)
    model = PipelineModule(
        layers=[first, *blocks, LayerSpec(Norm, job.has_buffer), last],
        topology=topology,
        loss_fn=loss_of,
        partition_method=job.partition,
    )
    return model, None
