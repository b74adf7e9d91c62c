"""Differences of gloo from NCCL.

Gather and coalescing are left alone: gloo has them in torch 2.13.
"""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from scalai.patches.megatron.cpu_emulation.stubs import replace


def install() -> None:
    """Replace the functions on ``torch.distributed`` and on the module behind it.

    Both must be the same objects: ``P2POp`` compares identities.
    """
    replace(
        dist,
        c10d,
        barrier=_barrier(c10d.barrier),
        isend=_isend(c10d.isend),
        all_reduce=_all_reduce(c10d.all_reduce),
        all_to_all_single=_all_to_all_single(c10d.all_to_all_single),
        all_gather=_all_gather(c10d.all_gather),
        reduce_scatter=_reduce_scatter(c10d.reduce_scatter),
    )


def _barrier(original: Any) -> Any:
    @wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)  # gloo refuses device_ids

    return barrier


def _isend(original: Any) -> Any:
    @wraps(original)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # gloo's send keeps the tensor, not its memory, and megatron's deallocate_output_tensor()
        # swaps `.data` while the send is in flight: without an alias the interleaved schedule sends
        # garbage and says nothing.
        return original(tensor.detach(), *args, **kwargs)

    return isend


def _all_reduce(original: Any) -> Any:
    @wraps(original)
    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != dist.ReduceOp.AVG or async_op:
            return original(tensor, op=op, group=group, async_op=async_op)
        original(tensor, op=dist.ReduceOp.SUM, group=group)  # gloo has no average
        tensor.div_(dist.get_world_size(group))
        return None

    return all_reduce


def _all_to_all_single(original: Any) -> Any:
    def as_list(sizes: Any) -> Any:
        return None if sizes is None else [int(size) for size in sizes]

    @wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        # The expert dispatcher passes arrays and tensors as sizes.
        return original(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), group, async_op
        )

    return all_to_all_single


def _all_gather(original: Any) -> Any:
    @wraps(original)
    def all_gather(
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or _are_alike(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        # gloo gathers equal shapes alone; experts under TP and EP get as many tokens as they get.
        for source, place in enumerate(tensor_list):
            if source == dist.get_rank(group):
                place.copy_(tensor)
            if place.numel():
                c10d.broadcast(place, group=group, group_src=source)
        return None

    return all_gather


def _reduce_scatter(original: Any) -> Any:
    @wraps(original)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or _are_alike(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        for target, part in enumerate(input_list):
            total = part.clone()
            if total.numel():
                dist.all_reduce(total, op=op, group=group)
            if target == dist.get_rank(group):
                output.copy_(total)
        return None

    return reduce_scatter


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1
