"""The micro-batches of an epoch in the order of its sampler, on any number of replicas.

So Hugging Face's loaders deal them too (``BatchSamplerShard`` of accelerate/data_loader.py, 1.15):
consecutive samples to a replica, one micro-batch after the other. Differs in: whole global batches
are taken, the last one filled from the beginning of the epoch or dropped, so that each step has the
same samples on any number of replicas.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler

from scalai.core.degrees.batches import Batches, pass_length
from scalai.core.errors import RefusedError

SEEDED = ("SeedableRandomSampler", "SequentialSampler")
"""Samplers whose order follows from seed and epoch alone: Accelerate's, and torch's."""


class EpochBatches(BatchSampler):
    """One replica's micro-batches of an epoch.

    Args:
        sampler: Gives the samples of the epoch, all of them to every replica.
        batches: How a global batch is spread.
        dp_rank: The replica.
        drop_last: Whether the incomplete global batch at the end is dropped.

    Attributes:
        size: Samples of the data set.
        samples: Of an epoch: whole global batches.

    Raises:
        RefusedError: The order is not one of ``SEEDED``, or there is no whole global batch.
    """

    def __init__(self, sampler: Any, batches: Batches, dp_rank: int, *, drop_last: bool) -> None:
        name = type(sampler).__name__
        if name not in SEEDED:
            raise RefusedError(
                f"the order of samples is that of {name}, which does not follow from seed and "
                f"epoch alone. Use one of {', '.join(SEEDED)} (use_seedable_sampler of "
                "Accelerate's DataLoaderConfiguration), or run without --elastic."
            )
        super().__init__(sampler, batches.micro_batch_size, drop_last)
        self._batches, self._dp_rank, self.size = batches, dp_rank, len(sampler)
        self.samples = pass_length(len(sampler), batches.global_batch_size, drop_last=drop_last)
        if not self.samples:
            raise RefusedError(
                f"the data set has {len(sampler)} samples, fewer than a global batch of "
                f"{batches.global_batch_size}, and drop_last drops them. Use a smaller batch."
            )

    def __iter__(self) -> Iterator[list[int]]:
        return self.after(0)

    def __len__(self) -> int:
        return self.samples // (self._batches.micro_batch_size * self._batches.dp)

    def after(self, consumed: int, until: int | None = None) -> Iterator[list[int]]:
        """Yield the micro-batches of an epoch of which so many samples are consumed, up to some."""
        order = np.resize(np.fromiter(self.sampler, dtype=np.int64), self.samples)
        for begin in range(consumed, until or len(order), self._batches.global_batch_size):
            for places in self._batches.samples(begin, self._dp_rank):
                yield order[places % len(order)].tolist()
