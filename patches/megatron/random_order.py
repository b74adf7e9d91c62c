"""Megatron-LM's random sampler, in the order that it has at the job's first degrees.

It draws by the number of replicas and by the micro-batch: with data sharding each replica has its
own part of the data, and where an epoch ends follows from both. Here each replica draws its share
of the order of the first degrees instead; at those, that is what the sampler itself draws.

Source: megatron/training/datasets/data_samplers.py (0.16).
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import torch

from scalai.core.dataset.order import Places, ShuffledBlocks, share_of
from scalai.core.errors import RefusedError

KEPT_PASSES = 2
"""Permutations that are kept: a micro-batch may lie in two passes."""


def micro_batches(sampler: Any, first: ShuffledBlocks) -> Iterator[list[int]]:
    """Yield a replica's micro-batches of the pass under way, and count what was consumed as the
    sampler does: the loader asks it again at the end of each pass.

    Args:
        sampler: A ``MegatronPretrainingRandomSampler``.
        first: The order of the first degrees.

    Raises:
        RefusedError: By ``refuse_two_seeds``.
    """
    size, dp = sampler.micro_batch_size, sampler.data_parallel_size
    begins, epoch = sampler.consumed_samples, sampler.consumed_samples // first.length
    sampler.epoch = epoch
    if _has_seeds(sampler):
        refuse_two_seeds(sampler, first)
        sampler.dataset.set_epoch(epoch)
    for number in count():
        at = begins + number * size * dp
        if at // first.length != epoch:
            return
        places = share_of(begins, number, size, dp, sampler.data_parallel_rank)
        sampler.consumed_samples += size * dp
        yield _samples_at(places, first)


def refuse_two_seeds(sampler: Any, first: ShuffledBlocks) -> None:
    """Check that no micro-batch will be of two passes, where each pass makes its samples with other
    seeds.

    Raises:
        RefusedError: One would be, at the end of this pass or of a later one.
    """
    block = sampler.micro_batch_size * sampler.data_parallel_size
    left = first.length - sampler.consumed_samples % first.length
    if _has_seeds(sampler) and (left % block or first.length % block):
        raise RefusedError(
            f"--dataloader-type cyclic: an epoch has {first.length} samples, of which {left} are "
            f"left, and {sampler.data_parallel_size} replicas draw {block} at once, which does not "
            "divide both; the data set makes each epoch's samples with other seeds. Use a DP and a "
            "micro-batch that do, or --dataloader-type single."
        )


def refuse_too_few(sampler: Any) -> None:
    """Check that the data set fills one micro-batch of every replica: else a pass is empty, and the
    sampler divides by its length.

    Raises:
        RefusedError: It does not.
    """
    each, replicas = sampler.micro_batch_size, sampler.data_parallel_size
    if sampler.total_samples < each * replicas:
        raise RefusedError(
            f"--dataloader-type cyclic: a data set has {sampler.total_samples} samples, and "
            f"{replicas} replicas with micro-batches of {each} draw {each * replicas} at once. Use "
            "a smaller DP or micro-batch, or more data."
        )


def _has_seeds(sampler: Any) -> bool:
    return type(sampler.dataset).__name__ == "RandomSeedDataset"


def _samples_at(places: Places, first: ShuffledBlocks) -> list[int]:
    """Return the samples at places over all passes."""
    epochs, within = np.divmod(places, first.length)
    found = np.empty_like(within)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        found[chosen] = first.samples_at(within[chosen], _permutation(first.shuffled, epoch))
    samples: list[int] = found.tolist()
    return samples


@lru_cache(maxsize=KEPT_PASSES)
def _permutation(samples: int, epoch: int) -> Places:
    generator = torch.Generator()
    generator.manual_seed(epoch)
    permutation: Places = torch.randperm(samples, generator=generator).numpy()
    return permutation
