"""Collectives of the CPU emulation, on several ranks."""

import gc

import torch
import torch.distributed as dist

import support.training.tiny_gpt  # noqa: F401  # CPU emulation is on


def unequal_parts(rank: int, store: dist.Store, sizes: list[int]) -> tuple[list[int], list[int]]:
    """Gather parts of these sizes, and give each rank the sum of its part; return both."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(sizes))
    gathered = list(torch.split(torch.zeros(sum(sizes), 2), sizes))
    dist.all_gather(gathered, torch.full((sizes[rank], 2), rank + 1.0))
    parts = list(torch.split(torch.arange(2.0 * sum(sizes)).view(-1, 2), sizes))
    mine = torch.zeros(sizes[rank], 2)
    dist.reduce_scatter(mine, parts)
    dist.destroy_process_group()
    gc.collect()
    return torch.cat(gathered)[:, 0].int().tolist(), mine.flatten().int().tolist()
