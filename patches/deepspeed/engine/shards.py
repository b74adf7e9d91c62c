"""Global tensors of an engine's parameters and buffers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.core.tensors.region import Piece, row_major, whole
from scalai.patches.deepspeed.engine.fragments import Fragment
from scalai.patches.deepspeed.engine.masters import is_vouched, shard_fragment
from scalai.patches.deepspeed.engine.parallel_ranks import TensorParallel


@dataclass(frozen=True, eq=False, slots=True)
class EngineShard:
    """A parameter or a persistent buffer of this rank.

    Attributes:
        name: The same in every layout.
        shape: Shape of the global tensor.
        data: DeepSpeed's own parameter, or the buffer.
        pieces: Its boxes, as positions in it, flattened; with ZeRO 3, as if gathered.
        memory: Flat memory of the model.
        range: Range of ``data``, and its place in ``memory``.
        is_vouched: True if this rank may vouch for it.
    """

    name: str
    shape: tuple[int, ...]
    data: torch.Tensor
    pieces: tuple[Piece, ...]
    memory: torch.Tensor
    range: Fragment
    is_vouched: bool


def shards_of(
    module: torch.nn.Module, tensor_parallel: TensorParallel, *, is_first_replica: bool
) -> Iterator[EngineShard]:
    """Yield the parameters and persistent buffers of a model, in its order. Shared ones once.

    Buffers may differ between replicas, as running means do: the first one's are vouched for, as
    DeepSpeed's checkpoints keep them.

    Raises:
        RefusedError: Something cannot be carried; the message names it.
    """
    for name, parameter in module.named_parameters():
        yield _parameter_shard(name, parameter, tensor_parallel)
    for name, buffer in persistent_buffers(module):
        yield _buffer_shard(name, buffer, is_first_replica)


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a model's ``state_dict``, with their names."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            raise RefusedError(
                f"{prefix} ({type(part).__name__}) keeps extra state, which need not mean the same "
                "in another layout. Keep this module out of an elastic job."
            )
        for key, buffer in part._buffers.items():
            if buffer is None or key in part._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, buffer


def _parameter_shard(name: str, parameter: Any, tensor_parallel: TensorParallel) -> EngineShard:
    local = tuple(getattr(parameter, "ds_shape", parameter.shape))
    shape, pieces = tensor_parallel.pieces(name, parameter, local)
    # Replicas on tensor-parallel ranks need not be equal to the last bit: the first one's counts.
    may_vouch = is_vouched(parameter) and (tensor_parallel.rank == 0 or shape != local)
    if hasattr(parameter, "ds_tensor"):
        memory = parameter.ds_tensor.detach().view(-1)
        part = shard_fragment(parameter, memory, name)
    else:
        memory, part = _whole(name, parameter)
    return EngineShard(name, shape, parameter, pieces, memory, part, may_vouch)


def _buffer_shard(name: str, buffer: torch.Tensor, is_first_replica: bool) -> EngineShard:
    shape = tuple(buffer.shape)
    memory, part = _whole(name, buffer)
    pieces = (Piece(whole(shape), 0, row_major(shape)),)
    return EngineShard(name, shape, buffer, pieces, memory, part, is_first_replica)


def _whole(name: str, data: torch.Tensor) -> tuple[torch.Tensor, Fragment]:
    if not data.is_contiguous():
        raise RefusedError(
            f"{name} has strides {data.stride()} for shape {list(data.shape)}, so it is not one "
            "run of memory. Make it contiguous before deepspeed.initialize."
        )
    return data.detach().view(-1), Fragment(data, 0, data.numel(), 0)
