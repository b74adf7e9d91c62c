"""What gloo does otherwise than NCCL.

Reduce-scatter, gather and coalescing are left alone: gloo has them in torch 2.13.
"""

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from scalai.patches.megatron.rehearsal.replacement import replace


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
