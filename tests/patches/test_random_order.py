"""The order of Megatron-LM's random sampler over changes, against the sampler itself, as it stands
in megatron/training/datasets/data_samplers.py (0.16)."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalai.core.dataset.order import ShuffledBlocks
from scalai.core.errors import RefusedError
from scalai.patches.megatron.samplers import micro_batches


def theirs(
    samples: int, consumed: int, size: int, rank: int, dp: int, *, is_sharded: bool
) -> Iterator[list[int]]:
    """Yield what the sampler itself draws, over all epochs."""
    block = size * dp
    while True:
        active = samples - samples % block
        epoch, offset = consumed // active, consumed % active
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if is_sharded:
            bucket = samples // block * size
            order = torch.randperm(bucket, generator=generator).tolist()
            drawn = [rank * bucket + x for x in order[offset // dp :]]
        else:
            full = samples // size * size
            order = torch.randperm(full, generator=generator).tolist()
            drawn = order[offset:][rank::dp]
        for begin in range(0, len(drawn) - size + 1, size):
            consumed += block
            yield drawn[begin : begin + size]


def ours(
    first: ShuffledBlocks, consumed: int, size: int, rank: int, dp: int, dataset: Any = None
) -> Iterator[list[int]]:
    sampler = SimpleNamespace(
        dataset=dataset, consumed_samples=consumed, micro_batch_size=size, data_parallel_rank=rank,
        data_parallel_size=dp,
    )  # fmt: skip
    while True:
        yield from micro_batches(sampler, first)


SIZES = [(96, 2, 3), (100, 2, 4), (37, 3, 2), (12, 1, 4), (13, 1, 1)]


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize(("samples", "size", "dp"), SIZES)
def test_at_the_first_degrees_the_order_is_the_samplers_own(
    samples: int, size: int, dp: int, is_sharded: bool
) -> None:
    """But for ends of an epoch where replicas of its own would draw unequally often."""
    first = ShuffledBlocks(samples, size, dp, is_sharded)
    if not is_sharded and samples // size * size != first.length:
        pytest.skip("its replicas part at the end of the first epoch")
    for rank in range(dp):
        expected = islice(theirs(samples, 0, size, rank, dp, is_sharded=is_sharded), 60)
        assert list(islice(ours(first, 0, size, rank, dp), 60)) == list(expected)


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize(("samples", "size", "dp"), SIZES)
def test_a_job_that_changes_draws_what_one_that_does_not_does(
    samples: int, size: int, dp: int, is_sharded: bool
) -> None:
    first, batch, consumed = ShuffledBlocks(samples, size, dp, is_sharded), 24, 0

    def step(each: int, ranks: int) -> Counter[int]:
        """Return the samples of the next step, of all ranks."""
        draws = [ours(first, consumed, each, rank, ranks) for rank in range(ranks)]
        micro = [m for draw in draws for m in islice(draw, batch // (each * ranks))]
        return Counter(sample for each in micro for sample in each)

    degrees = [(size, dp), (1, 4), (2, 3), (4, 1), (1, 2)]
    for now in [each for each in degrees if batch % (each[0] * each[1]) == 0]:
        for _ in range(3):
            assert step(*now) == step(1, 1)
            consumed += batch


@pytest.mark.parametrize("is_sharded", [True, False])
def test_an_epoch_has_each_sample_once(is_sharded: bool) -> None:
    first = ShuffledBlocks(100, 2, 4, is_sharded)
    for epoch in (0, 3):
        drawn = [s for each in islice(ours(first, 96 * epoch, 1, 0, 1), 96) for s in each]
        assert len(set(drawn)) == first.length == 96


def test_data_that_is_seeded_by_epoch_needs_whole_blocks() -> None:
    epochs: list[int] = []
    dataset = type("RandomSeedDataset", (), {"set_epoch": lambda self, n: epochs.append(n)})()
    first = ShuffledBlocks(12, 1, 4, is_sharded=False)
    assert len(list(islice(ours(first, 0, 2, 0, 2, dataset), 6))) == 6 and epochs == [0, 1]
    with pytest.raises(RefusedError, match="an epoch has 12 samples"):
        next(ours(first, 0, 4, 0, 2, dataset))  # before anything is drawn
