"""Global tensors of a model's parameters, and this rank's boxes of them.

Source: ``sharded_state_dict`` of megatron-core (0.14 to 0.19) for its checkpoints. Differs in: no
data is touched and nothing is gathered. Factories, which cut a parameter into several shards, are
run on a tensor without memory.
"""

import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from scalai.converters.megatron.rules import ALLOW_UNTESTED, allows_untested
from scalai.core.errors import LayoutError, RefusedError
from scalai.core.tensors.region import Box, Piece, row_major

_CONTAINERS = ("layers", "experts.experts")
"""Modules with an index as leading axis of the tensor, the outermost first."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A local parameter's boxes of one global tensor.

    ``name`` is the same in every layout. ``pieces`` count positions in the flattened local
    parameter.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False, slots=True)
class ModelShard:
    """A parameter or persistent buffer: the framework's own object, and its parts of global
    tensors."""

    data: torch.Tensor
    parts: tuple[TensorPart, ...]


def shards_of(chunks: Sequence[torch.nn.Module]) -> list[ModelShard]:
    """Describe all parameters and persistent buffers of this rank, in the model's order.

    No communication, no copy.

    Raises:
        RefusedError: Something cannot be carried: megatron does not describe a parameter, describes
            a copy of it or cuts it otherwise than in slices; or a module keeps extra state.
    """
    return [shard for chunk in chunks for shard in _shards_of_chunk(unwrap(chunk))]


def unwrap(chunk: Any) -> Any:
    """Return the model inside megatron's wrappers (DistributedDataParallel, Float16Module)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _shards_of_chunk(model: Any) -> Iterator[ModelShard]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "dp_cp_group": group,
    }
    missing = {id(p): name for name, p in model.named_parameters()}
    live = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    duplicated = _duplicated(model)
    for item in _leaves(model.sharded_state_dict(metadata=metadata)):
        if not _is_sharded_tensor(item) and not _is_factory(item):
            _refuse_extra_state(item, getattr(model, "config", None))
            continue
        missing.pop(id(item.data), None)
        if item.data.untyped_storage()._cdata not in live or not item.data.is_contiguous():
            raise RefusedError(
                f"{item.key}: its sharded_state_dict describes a copy of the parameter or a view "
                "with gaps, so that a restore would not reach the model. Keep this module out of "
                "an elastic job."
            )
        parts = tuple(parts_of(item))
        if id(item.data) not in duplicated:
            _refuse_uncut(item.key, item.data, parts)
        yield ModelShard(item.data, parts)
    if missing:
        raise RefusedError(
            f"sharded_state_dict does not describe these parameters: {sorted(missing.values())}. "
            "Add them to their module's sharded_state_dict, as megatron's checkpoints need them "
            "there too."
        )


def parts_of(item: Any) -> Iterator[TensorPart]:
    """Yield the global tensors of one ``ShardedTensor`` or ``ShardedTensorFactory``.

    Raises:
        LayoutError: The pieces do not make up the local parameter exactly once, by count of
        elements. RefusedError: A factory does more than to slice and to transpose.
    """
    found: dict[str, tuple[tuple[int, ...], list[Piece]]] = {}
    for shard, start, stride in _strided_shards(item):
        layers = shard.prepend_axis_num
        name = global_name(shard.key, shard.global_offset[:layers])
        box = Box(tuple(shard.global_offset[layers:]), tuple(shard.local_shape))
        shape = tuple(shard.global_shape[layers:])
        found.setdefault(name, (shape, []))[1].append(Piece(box, start, stride))
    numel = sum(piece.box.numel for _, pieces in found.values() for piece in pieces)
    if numel != item.data.numel():
        raise LayoutError(
            f"{item.key}: its shards have {numel} elements, the parameter {item.data.numel()}."
        )
    for name, (shape, pieces) in found.items():
        yield TensorPart(name, shape, tuple(pieces))


def global_name(key: str, index: Iterable[int]) -> str:
    """Write the index on megatron's leading axes into the key.

    ``decoder.layers.mlp.experts.experts.w`` at [3, 1] is
    ``decoder.layers.3.mlp.experts.experts.1.w``. Keys with the layer in them keep it, so both of
    megatron's ways to name layers give the same.
    """
    for position in index:
        for container in _CONTAINERS:
            pattern = rf"(?:^|\.){re.escape(container)}\.(?!\d)"
            key, count = re.subn(pattern, rf"\g<0>{position}.", key, count=1)
            if count:
                break
        else:
            key += f"#{position}"
    return key


def _strided_shards(item: Any) -> Iterator[tuple[Any, int, tuple[int, ...]]]:
    """Yield the shards of an item, each with start and strides in the flat parameter."""
    if _is_sharded_tensor(item):
        yield item, 0, row_major(item.local_shape)
        return
    probe = torch.empty(item.data.shape, dtype=item.data.dtype, device="meta")
    storage = probe.untyped_storage()._cdata
    shards = list(_leaves(item.build_fn(item.key, probe, item.replica_id, None)))
    if all(shard.data.untyped_storage()._cdata == storage for shard in shards):
        for shard in shards:
            yield shard, int(shard.data.storage_offset()), tuple(shard.data.stride())
        return
    # The factory copies (GroupedMLP up to 0.16 transposes and makes it contiguous): let it copy
    # positions.
    positions = torch.arange(item.data.numel(), device="cpu").view(item.data.shape)
    for shard in _leaves(item.build_fn(item.key, positions, item.replica_id, None)):
        yield shard, *_affine(shard.data, item.key)


def _affine(positions: torch.Tensor, key: str) -> tuple[int, tuple[int, ...]]:
    """Return start and strides of a tensor of positions, a strided view in disguise."""
    start = int(positions.flatten()[0])
    stride = tuple(
        int(positions.select(axis, 1).flatten()[0]) - start if size > 1 else 0
        for axis, size in enumerate(positions.shape)
    )
    expected = torch.full(positions.shape, start)
    for axis, (size, step) in enumerate(zip(positions.shape, stride, strict=True)):
        along = [-1 if other == axis else 1 for other in range(positions.ndim)]
        expected = expected + (torch.arange(size) * step).view(along)
    if not torch.equal(positions, expected):
        raise RefusedError(
            f"{key}: its ShardedTensorFactory does more than to slice and to transpose the "
            "parameter. Keep this module out of an elastic job."
        )
    return start, stride


def _duplicated(model: torch.nn.Module) -> set[int]:
    """Return the identities of parameters equal on all tensor-parallel ranks, whatever their
    attributes say: Transformer Engine marks each weight as cut, also in uncut modules, and
    Megatron-LM takes the mark away from 0.17 on alone (``TELinear``)."""
    return {
        id(parameter)
        for module in model.modules()
        if getattr(module, "parallel_mode", "") is None
        for parameter in module.parameters(recurse=False)
    }


def _refuse_uncut(key: str, data: torch.Tensor, parts: Sequence[TensorPart]) -> None:
    """Refuse a parameter cut by tensor parallelism, but whole by its sharded state: one rank's part
    would be taken for all."""
    from megatron.core import parallel_state

    is_expert = ".experts." in key or not getattr(data, "allreduce", True)
    tp = (
        parallel_state.get_expert_tensor_parallel_world_size()
        if is_expert
        else parallel_state.get_tensor_model_parallel_world_size()
    )
    is_whole = sum(prod(part.shape) for part in parts) == data.numel()
    if getattr(data, "tensor_model_parallel", False) and tp > 1 and is_whole and data.numel():
        raise RefusedError(
            f"{key} {list(data.shape)}: the parameter says that tensor parallelism cuts it along "
            f"axis {getattr(data, 'partition_dim', '?')} (tensor_model_parallel), its "
            "sharded_state_dict that all tensor-parallel ranks have the same. Give its module a "
            "sharded_state_dict that cuts it (make_sharded_tensors_for_checkpoint, with the axis "
            "by the parameter's name), as megatron's checkpoints need it too; or, where all ranks "
            "do have the same, leave the attribute out."
        )


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        yield tree
        return
    for branch in tree:
        yield from _leaves(branch)


def _is_sharded_tensor(item: Any) -> bool:
    return hasattr(item, "prepend_axis_num")


def _is_factory(item: Any) -> bool:
    return hasattr(item, "build_fn")


def _refuse_extra_state(item: Any, config: Any) -> None:
    data = getattr(item, "data", None)
    if isinstance(data, torch.Tensor):
        is_empty = data.numel() == 0
    elif isinstance(data, io.BytesIO):
        is_empty = not data.getbuffer()
    else:
        is_empty = data is None
    begins_anew = bool(getattr(config, "fp8", None)) and allows_untested(os.environ)
    if not is_empty and not begins_anew:
        raise RefusedError(
            f"{getattr(item, 'key', item)}: this module keeps extra state (as Transformer Engine "
            "does for FP8 with delayed scaling), which has no meaning in another layout. Train in "
            f"bf16, or with an FP8 recipe that keeps no history. {ALLOW_UNTESTED}=1 lets the state "
            "of FP8 begin anew at each change, which no test has tried."
        )
