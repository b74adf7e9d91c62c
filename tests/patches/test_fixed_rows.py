"""Rows that follow the layout in Megatron-LM are the same at any layout, on classes that give what
its own do."""

from collections import Counter
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from scalai.patches.megatron.samplers import MANY_STEPS, hook_fim, hook_samplers

BATCH = 12


class Rows(Dataset[int]):
    """A validation set of so many rows, of which each is its own number."""

    def __init__(self, size: int, split: str = "valid") -> None:
        self.size, self.index_split = size, SimpleNamespace(name=split)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> int:
        return row


def samplers(dp: int, rank: int, micro: int, **flags: Any) -> Any:
    """Return the module of loaders, hooked: megatron/training/datasets/data_samplers.py (0.16)."""
    job = SimpleNamespace(global_batch_size=BATCH, micro_batch_size=micro, **flags)

    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        size = len(dataset) - len(dataset) % (micro * dp)
        dealt = [
            [*range(begin + rank * micro, begin + (rank + 1) * micro)]
            for begin in range(consumed_samples, size, micro * dp)
        ]
        return DataLoader(dataset, batch_sampler=dealt)

    module = SimpleNamespace(
        build_pretraining_data_loader=build_pretraining_data_loader, get_args=lambda: job,
        mpu=SimpleNamespace(
            get_data_parallel_world_size=lambda: dp, get_data_parallel_rank=lambda: rank
        ),
    )  # fmt: skip
    hook_samplers(module)
    return module


def evaluated(rows: int, dp: int, micro: int, evaluations: int) -> list[Counter[int]]:
    """Return how often each row is in each of some evaluations."""
    loaders = [
        samplers(dp, rank, micro, full_validation=True).build_pretraining_data_loader(Rows(rows), 0)
        for rank in range(dp)
    ]
    drawn, steps = [iter(loader) for loader in loaders], {len(loader) for loader in loaders}
    assert len(steps) == 1, "ranks make equally many steps"
    passes = steps.pop() * BATCH // (micro * dp)
    return [
        Counter(chain.from_iterable(next(it).tolist() for it in drawn for _ in range(passes)))
        for _ in range(evaluations)
    ]


@pytest.mark.parametrize("rows", [1, 5, 10, 12, 24, 36])
def test_a_whole_validation_has_each_row_equally_often_at_any_layout(rows: int) -> None:
    for dp, micro in ((1, 1), (2, 1), (3, 2), (4, 3), (12, 1)):
        for found in evaluated(rows, dp, micro, evaluations=3):
            assert set(found) == set(range(rows))
            assert len(set(found.values())) == 1


def test_a_whole_validation_of_many_rows_takes_few_passes_and_is_the_same_at_any_layout() -> None:
    rows = MANY_STEPS * BATCH + 1
    first, *others = [
        found
        for dp, micro in ((1, 1), (3, 2), (12, 1))
        for found in evaluated(rows, dp, micro, evaluations=2)
    ]
    assert set(first) == set(range(rows)) and first.total() < rows + BATCH
    assert all(found == first for found in others)


def test_other_data_is_dealt_as_megatron_does() -> None:
    module = samplers(3, 0, 1, full_validation=True)
    assert len(module.build_pretraining_data_loader(Rows(10, "train"), 0)) == 3
    module = samplers(3, 0, 1, full_validation=False)
    assert len(module.build_pretraining_data_loader(Rows(10), 0)) == 3


def test_a_sample_of_fim_is_permuted_alike_in_any_order_of_accesses() -> None:
    class GPTFIMDataset:
        def __init__(self) -> None:
            self.config = SimpleNamespace(random_seed=2**32 - 3)
            self.np_rng = np.random.RandomState(seed=1)

        def _query_document_sample_shuffle_indices(self, idx: int) -> list[int]:
            return [idx, *self.np_rng.randint(0, 2**30, 4).tolist()]

    module = SimpleNamespace(GPTFIMDataset=GPTFIMDataset)
    hook_fim(module)
    one, other = GPTFIMDataset(), GPTFIMDataset()
    forwards = {i: one._query_document_sample_shuffle_indices(i) for i in range(8)}
    backwards = {i: other._query_document_sample_shuffle_indices(idx=i) for i in range(7, -1, -1)}
    assert forwards == backwards
    assert len({tuple(found[1:]) for found in forwards.values()}) == 8
