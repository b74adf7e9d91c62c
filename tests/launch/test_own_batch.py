"""What a job knows of its own global batch, without its script."""

from typing import Any

import pytest

from scalai.core.dataset.table import DatasetTable
from scalai.core.degrees.batches import BatchRamp
from scalai.launch.config.job_spec import own_batch

MEGATRON = ("--micro-batch-size", "2", "--num-attention-heads", "4", "--global-batch-size", "64")


@pytest.mark.parametrize(
    ("args", "stated", "deepspeed", "facts", "batch"),
    [
        (MEGATRON, 12, None, {}, 64),
        ((*MEGATRON, "--rampup-batch-size", "16", "16", "900"), None, None, {},
         BatchRamp(16, 16, 900, 64)),
        ((*MEGATRON, "--step-batch-size-schedule", "0:32 1K:64"), None, None, {}, None),
        ((*MEGATRON, "--rampup-batch-size", "1", "5", "900"), None, None, {}, None),
        (MEGATRON[:4], None, None, {}, None),
        ((*MEGATRON[:5], "many"), None, None, {}, None),
        ((*MEGATRON[:5], str(1 << 40)), None, None, {}, None),
        (("--steps", "3"), 12, {"train_batch_size": 8}, {"global_batch_size": 16}, 12),
        ((), None, {"train_batch_size": 8}, {"global_batch_size": 16}, 8),
        ((), None, {}, {"global_batch_size": 16}, 16),
        ((), None, None, {"global_batch_size": "16"}, None),
        ((), None, None, {}, None),
    ],
)  # fmt: skip
def test_it_is_what_the_job_trains_with_or_not_known(
    args: tuple[str, ...], stated: int | None, deepspeed: Any, facts: Any,
    batch: int | BatchRamp | None,
) -> None:  # fmt: skip
    assert own_batch(args, stated, deepspeed, facts) == DatasetTable.of_batch(batch)
