"""Megatron-LM's own pretrain_gpt.py, unmodified, changes its layout as if nothing had happened."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import megatron_lm_job
import pytest
from megatron_lm_job import Job, make_dataset

STEPS, BEFORE = 120, 4
"""Steps of a job, and the steps that it has done at least before it is changed. It trains on while
the workers of the change are built."""

pytestmark = [
    pytest.mark.skipif(
        megatron_lm_job.skip_reason() is not None, reason=str(megatron_lm_job.skip_reason())
    ),
    pytest.mark.timeout(1200),
]

Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start jobs that end with the test."""
    jobs: list[Job] = []

    def start_job(name: str, nproc: int, degrees: dict[int, str], flags: Sequence[str]) -> Job:
        jobs.append(Job(tmp_path / name, nproc, degrees, [*flags, "--train-iters", str(STEPS)]))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.stop()


def mock_data(folder: Path) -> list[str]:
    return ["--mock-data", "--vocab-size", "4300"]


def real_text(folder: Path) -> list[str]:
    make_dataset(folder / "text")
    return [
        "--data-path", str(folder / "text"), "--split", "90,5,5", "--vocab-size", "256",
        "--data-cache-path", str(folder / "cache"),
    ]  # fmt: skip


DISTRIBUTED = [
    "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
    "--ddp-bucket-size", "20000",
]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "nproc", "target", "degrees", "flags"),
    [
        (mock_data, 4, 2, {4: "tp2 pp1", 2: "tp1 pp2"}, []),
        (real_text, 3, 2, {3: "tp1 pp1", 2: "tp2 pp1"}, DISTRIBUTED),
    ],
    ids=["mock data, TP2·DP2 to PP2", "real text, DP3 to TP2"],
)
def test_losses_samples_and_rates_are_those_of_the_uninterrupted_run(
    data: Callable[[Path], list[str]],
    nproc: int,
    target: int,
    degrees: dict[int, str],
    flags: list[str],
    tmp_path: Path,
    start: Start,
) -> None:
    flags = [*flags, *data(tmp_path)]
    alone = start("alone", nproc, degrees, flags)
    alone.wait()
    changed = start("changed", nproc, degrees, flags)
    changed.wait_for_step(BEFORE)
    changed.scale(target)
    changed.wait()
    expected, found = alone.ledger(), changed.ledger()
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    assert {entry.round for entry in found.values()} == {0, 1}, changed.log
    for step, entry in found.items():
        assert entry.loss == pytest.approx(expected[step].loss, rel=1e-6), step
        assert entry.samples_hash == expected[step].samples_hash, step
        assert entry.lr == expected[step].lr, step
        assert entry.consumed_samples == expected[step].consumed_samples, step
