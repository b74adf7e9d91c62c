"""A process group without other processes."""

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def stand_as(rank: int, world: int) -> None:
    """Stand as a rank among others that a fake process group stands for."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
