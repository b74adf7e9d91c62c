"""The process groups of a script, used once before it trains: a library connects a group's ranks at
its first use, which takes seconds for each group on devices."""

import torch
import torch.distributed as dist


def touch_groups() -> None:
    """Add up one number in each group of NCCL or gloo that this rank is in, in the order of their
    making, which is the same on all ranks. Blocks until the ranks have; all of a job's ranks call
    it."""
    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        backend = str(dist.get_backend(group))
        if backend in ("nccl", "gloo"):
            device = torch.cuda.current_device() if backend == "nccl" else "cpu"
            dist.all_reduce(torch.zeros(1, device=device), group=group)
