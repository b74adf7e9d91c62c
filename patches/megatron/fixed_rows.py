"""Rows of Megatron-LM's data sets that follow the layout by themselves: here they are the same at
any layout.

* ``--full-validation``: a rank's share of a validation set, and how often it has each row, follow
  from micro-batch and DP. Here every evaluation begins with the first row and takes all rows.
* ``--fim-data``: one stream of random numbers permutes the samples that a process reads, one after
  the other. Here each sample has its own, as Megatron-LM's masked data sets have it
  (``MaskedWordPieceDataset``): ``seed + place``.

Source: megatron/training, 0.16 to 0.20: ``build_pretraining_data_loader`` of
datasets/data_samplers.py, ``evaluate`` of training.py, ``GPTFIMDataset`` of
datasets/fim_dataset.py.
"""

from collections.abc import Iterator
from itertools import count
from math import gcd
from typing import Any

import numpy as np
import wrapt
from torch.utils.data import DataLoader

from scalai.patches.calls import Args, Call, Kwargs

SEEDS = 2**32
"""Seeds that numpy's ``RandomState`` takes."""
MANY_STEPS = 64
"""Steps within which an evaluation takes rows again until it has each as often as any other."""


class WholePasses:
    """Micro-batches of one replica, for ever, and as its length the steps of one evaluation: the
    fewest that take each row as often as any other; where these are many, those of fewer passes
    over the rows, and the last step is filled with the first rows.

    Args:
        rows: Of the validation set.
        batch: Samples of a step of the evaluation, over all replicas.
        size: Samples of a micro-batch.
    """

    def __init__(self, rows: int, batch: int, size: int, dp: int, dp_rank: int) -> None:
        self._rows, self._batch, self._size = rows, batch, size
        self._first, self._block = dp_rank * size, dp * size

    def __len__(self) -> int:
        passes = min(
            self._batch // gcd(self._rows, self._batch),
            max(1, MANY_STEPS * self._batch // self._rows),
        )
        return -(-passes * self._rows // self._batch)

    def __iter__(self) -> Iterator[list[int]]:
        samples = len(self) * self._batch
        for begin in count(self._first, self._block):
            yield [place % samples % self._rows for place in range(begin, begin + self._size)]


def hook_samplers(samplers: Any) -> None:
    """Hook the module that makes loaders."""

    def build(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        loader, job = wrapped(*args, **kwargs), samplers.get_args()
        if not isinstance(loader, DataLoader) or not _is_whole(loader.dataset, job):
            return loader
        passes = WholePasses(
            len(loader.dataset),  # type: ignore[arg-type]  # Megatron-LM's have a length
            getattr(job, "eval_global_batch_size", None) or job.global_batch_size,
            getattr(job, "eval_micro_batch_size", None) or job.micro_batch_size,
            samplers.mpu.get_data_parallel_world_size(),
            samplers.mpu.get_data_parallel_rank(),
        )
        return DataLoader(
            loader.dataset, batch_sampler=passes, num_workers=loader.num_workers,
            pin_memory=loader.pin_memory, persistent_workers=loader.persistent_workers,
            worker_init_fn=loader.worker_init_fn, collate_fn=loader.collate_fn,
        )  # fmt: skip

    if hasattr(samplers, "build_pretraining_data_loader"):
        wrapt.wrap_function_wrapper(samplers, "build_pretraining_data_loader", build)


def hook_fim(module: Any) -> None:
    """Hook the module of ``--fim-data``."""

    def read(wrapped: Call, dataset: Any, args: Args, kwargs: Kwargs) -> Any:
        place = kwargs["idx"] if "idx" in kwargs else args[0]
        seed = (dataset.config.random_seed + int(place)) % SEEDS
        dataset.np_rng = np.random.RandomState(seed)
        return wrapped(*args, **kwargs)

    name = "GPTFIMDataset._query_document_sample_shuffle_indices"
    wrapt.wrap_function_wrapper(module, name, read)


def _is_whole(dataset: Any, job: Any) -> bool:
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    return bool(getattr(job, "full_validation", False)) and getattr(split, "name", "") == "valid"
