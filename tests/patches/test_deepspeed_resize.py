"""A DeepSpeed job that changes its layout goes on as if it had not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed_jobs import Job
from resize_case import Result, resize
from worker_pool import WorkerPool

FP32 = 1e-6


@pytest.fixture(scope="module")
def deepspeed_pool() -> Iterator[WorkerPool]:
    workers = WorkerPool(size=4, trainer="tiny_deepspeed")
    yield workers
    workers.close()


CASES = [
    ("zero1-4-to-2", Job(world=4, stage=1), Job(world=2, stage=1), FP32),
    ("zero2-to-zero0", Job(world=2, stage=2), Job(world=3, stage=0), FP32),
    ("zero0-to-zero2", Job(world=2, stage=0), Job(world=3, stage=2), FP32),
    ("zero3-2-to-3", Job(world=2, stage=3), Job(world=3, stage=3), FP32),
]


@pytest.mark.parametrize(
    ("before", "after", "tolerance"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_resized_job_goes_on_as_the_uninterrupted_one(
    deepspeed_pool: WorkerPool, tmp_path: Path, before: Job, after: Job, tolerance: float
) -> None:
    check(resize(deepspeed_pool, before, after, tmp_path), tolerance)


def check(result: Result, tolerance: float) -> None:
    print(f"largest relative difference of a loss: {result.largest_difference:.1e}")
    assert len(result.uninterrupted.losses) == len(result.resized.losses) > 0
    assert result.largest_difference <= tolerance
    assert result.resized.learning_rate == result.uninterrupted.learning_rate
    assert result.resized.skipped == result.uninterrupted.skipped
