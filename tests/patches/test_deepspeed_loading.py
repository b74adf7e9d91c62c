"""``engine.load_checkpoint`` at other degrees and stages than the checkpoint's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepspeed_jobs import Job
from jobs import mean_losses
from worker_pool import WorkerPool

Run = tuple[list[float], float, list[int]]

FP32, BF16 = 1e-6, 2e-2


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool(size=3, trainer="tiny_deepspeed")
    yield workers
    workers.close()


class Saves:
    """Checkpoints by the job that saved them, each made once."""

    def __init__(self, pool: WorkerPool, directory: Path) -> None:
        self._pool, self._directory = pool, directory
        self._made: dict[str, tuple[Path, Run]] = {}

    def of(self, job: Job) -> tuple[Path, Run]:
        """Return where a job has saved, and how it went on."""
        key = repr(job)
        if key not in self._made:
            path = self._directory / str(len(self._made))
            answers = self._pool.run("loading_worker:save", [(job, str(path))] * job.world)
            self._made[key] = path, united(answers)
        return self._made[key]


@pytest.fixture(scope="module")
def saves(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(pool, tmp_path_factory.mktemp("saves"))


def united(answers: list[Any]) -> Run:
    _, learning_rate, skipped = answers[0]
    return mean_losses([losses for losses, _, _ in answers]), learning_rate, skipped


def ranks(world: int, stage: int, **values: Any) -> Job:
    return Job(world=world, stage=stage, **values)


CASES = [
    ("zero1-2-to-3", ranks(2, 1), ranks(3, 1), FP32),
    ("zero1-to-zero3", ranks(2, 1), ranks(2, 3), FP32),
]


@pytest.mark.parametrize(
    ("before", "after", "tolerance"), [pytest.param(*c[1:], id=c[0]) for c in CASES]
)
def test_a_loaded_job_goes_on_as_the_one_that_saved(
    pool: WorkerPool, saves: Saves, before: Job, after: Job, tolerance: float
) -> None:
    path, (losses, rate, skipped) = saves.of(before)
    answers = pool.run("loading_worker:load", [(after, str(path), {})] * after.world)
    found, found_rate, found_skipped = united(answers)
    differences = [abs(a - b) / abs(a) for a, b in zip(losses, found, strict=True)]
    print(f"largest relative difference of a loss: {max(differences):.1e}")
    assert max(differences) <= tolerance
    assert (rate, skipped) == (found_rate, found_skipped)
