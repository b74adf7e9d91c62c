"""What the tiny job draws where it draws samples: a blend, in global batches that grow."""

from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import scalai

ORDER = scalai.Blend((scalai.Shuffled(40, 1, "wiki"), scalai.Shuffled(15, 2, "code", 4)), (3, 1))
RAMP = scalai.BatchRamp(4, 4, 64, 12)


class Numbers(Dataset[int]):
    """A data set whose samples are their numbers."""

    def __len__(self) -> int:
        return 55

    def __getitem__(self, index: int) -> int:
        return index


class Samples:
    """The loader of one rank, on which all ranks of a replica draw the same."""

    def __init__(self, job: scalai.Session) -> None:
        self._job = job
        self.batches = scalai.OrderedBatches(
            job, ORDER, RAMP, micro_batch_size=2, dp_rank=job.rank // job.tp
        )
        self._drawn: Any = iter(DataLoader(Numbers(), batch_sampler=self.batches, num_workers=1))

    def draw(self) -> list[int]:
        """Return what all replicas draw for the step under way, one replica after the other."""
        count = self.batches.now.num_micro_batches
        mine = [sample for _ in range(count) for sample in next(self._drawn).tolist()]
        of_ranks: list[Any] = [None] * self._job.world_size
        dist.all_gather_object(of_ranks, mine)
        return [sample for drawn in of_ranks[:: self._job.tp] for sample in drawn]
