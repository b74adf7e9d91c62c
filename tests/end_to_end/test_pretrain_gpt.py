"""Megatron-LM's own pretrain_gpt.py, unmodified, changes its layout as if nothing had happened:
while it trains, and by checkpoints that are resharded offline."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from scalai.converters.checkpoint import parameters_of
from scalai.converters.layouts import open_checkpoint
from support import megatron_lm_job
from support.megatron_lm_job import Job, make_dataset

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
        jobs.append(Job(tmp_path / name, nproc, degrees, ["--train-iters", str(STEPS), *flags]))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.stop()


def mock_data(folder: Path) -> list[str]:
    return ["--mock-data", "--vocab-size", "4300"]


def padded_vocabulary(saved: Path) -> int:
    """Return how many rows the embedding of a checkpoint has: releases differ in whether they count
    an end-of-document token."""
    return parameters_of(open_checkpoint(saved))["embedding.word_embeddings.weight"].shape[0]


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
        pytest.param(
            real_text,
            4,
            2,
            {4: "tp1 pp1", 2: "tp1 pp2"},
            ["--dataloader-type", "cyclic"],
            marks=pytest.mark.campaign,
        ),
        (real_text, 4, 2, {4: "tp2 pp1 mbs2", 2: "tp2 pp1 mbs1 recompute=full"}, DISTRIBUTED),
    ],
    ids=[
        "mock data, TP2·DP2 to PP2",
        "real text, DP3 to TP2",
        "each its own part, TP2·DP2 to PP2",
        "other passes, TP2·DP2 to TP2",
    ],
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
    alone.finish()
    changed = start("changed", nproc, degrees, flags)
    changed.wait_for_step(BEFORE)
    changed.scale(target)
    changed.finish()
    check_as_uninterrupted(alone, changed)


def test_other_passes_at_the_same_degrees_change_nothing_but_themselves(
    tmp_path: Path, start: Start
) -> None:
    flags, degrees = mock_data(tmp_path), {2: "tp1 pp2"}
    alone = start("alone", 2, degrees, flags)
    alone.finish()
    changed = start("changed", 2, degrees, flags)
    changed.wait_for_step(BEFORE)
    assert changed.status()["micro_batch_size"] == 1
    changed.scale(2, "tp1 pp2 mbs3 recompute=full")
    changed.wait_until(lambda: changed.status()["recompute"] == "full", "recomputation")
    changed.finish()
    assert "micro-batch 1 -> 3, recompute none -> full, as requested" in changed.log
    assert "event=resized" in changed.log
    check_as_uninterrupted(alone, changed)


def check_as_uninterrupted(alone: Job, changed: Job) -> None:
    """Compare what two jobs have consumed and learned, one of which was changed once."""
    expected, found = alone.ledger(), changed.ledger()
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    assert len({entry.round for entry in found.values()}) == 2, changed.log
    for step, entry in found.items():
        assert entry.loss == pytest.approx(expected[step].loss, rel=1e-6), step
        assert entry.samples_hash == expected[step].samples_hash, step
        assert entry.lr == expected[step].lr, step
        assert entry.consumed_samples == expected[step].consumed_samples, step
    assert changed.verified() == {"is_kept": True, "breaks": [], "notes": []}


@pytest.mark.parametrize(
    ("saved", "written", "degrees", "flags"),
    [
        ("torch", "torch", "tp2 pp1", DISTRIBUTED),
        ("torch", "torch_dist", "tp1 pp2", DISTRIBUTED),
        ("torch_dist", "torch", "tp1 pp2", []),
        ("torch_dist", "torch_dist", "tp2 pp1", DISTRIBUTED),
    ],
)
def test_a_resharded_checkpoint_goes_on_as_the_job_that_never_stopped(
    saved: str, written: str, degrees: str, flags: list[str], tmp_path: Path, start: Start
) -> None:
    flags = [*flags, *real_text(tmp_path), "--train-iters", "16"]
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "8", "--ckpt-format", saved]
    alone = start("alone", 2, {2: "tp1 pp1"}, [*flags, *saving])
    alone.finish()
    tp, pp = degrees[2], degrees[-1]
    reshard = ["reshard", str(tmp_path / "saved"), str(tmp_path / "new"), "--iteration", "8"]
    reshard += ["--tp", tp, "--pp", pp, "--dp", "1", "--to", written]
    subprocess.run([sys.executable, "-m", "scalai.launch.cli", *reshard], check=True, timeout=120)
    loading = ["--load", str(tmp_path / "new"), "--ckpt-format", written]
    divisor = padded_vocabulary(tmp_path / "saved" / "iter_0000008") // int(tp)
    loading += ["--make-vocab-size-divisible-by", str(divisor)]  # as it is told
    resumed = start("resumed", 2, {2: degrees}, [*flags, *loading])
    resumed.finish()
    expected, found = alone.ledger(), resumed.ledger()
    assert list(found) == list(range(9, 17)), resumed.log
    for step, entry in found.items():
        assert entry.loss == pytest.approx(expected[step].loss, rel=1e-6), step
        assert entry.samples_hash == expected[step].samples_hash, step
        assert entry.lr == expected[step].lr, step
