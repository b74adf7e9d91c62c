"""Megatron-LM's own pretrain_gpt.py with a DP that does not divide the batch: what its steps
consume, learn and count is what one rank's do, evaluations included."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import megatron_lm_job
from support.megatron_lm_job import MODEL, Job, check_same_steps, evaluations, make_dataset

STEPS, BEFORE = 40, 4
"""Steps of a job, and those before it is changed."""
SHARDED = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ddp-bucket-size 20000"
)
BY_SAMPLES = "--rampup-batch-size 8 4 40 --train-samples 200"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
    "--disable-bias-linear --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)

pytestmark = [
    pytest.mark.skipif(
        megatron_lm_job.skip_reason() is not None, reason=str(megatron_lm_job.skip_reason())
    ),
    pytest.mark.timeout(1800),
]


@dataclass(frozen=True, slots=True)
class Case:
    """A job on ``ranks`` ranks, changed to ``target``; ``alone`` are ranks of its first degrees
    without replicas: weights begin by TP, PP and EP."""

    name: str
    batch: int
    ranks: int
    first: str
    target: int
    then: str
    flags: str = ""
    tolerance: float = 1e-6
    ends: str = f"--train-iters {STEPS}"
    alone: int = 1
    is_back: bool = False
    """Whether it changes back once more."""


CASES = [
    Case("DP3 of 8 to DP2", 8, 3, "tp1 pp1", 2, "tp1 pp1"),
    Case("DP3 of 8 to DP2 and back", 8, 3, "tp1 pp1", 2, "tp1 pp1", SHARDED,
         ends="--train-iters 80", is_back=True),
    Case("DP3 of 16 to PP2", 16, 3, "tp1 pp1", 2, "tp1 pp2", "--calculate-per-token-loss"),
    Case("a growing batch", 16, 3, "tp1 pp1", 2, "tp1 pp1", BY_SAMPLES, ends=""),
    Case("in random order", 8, 3, "tp1 pp1", 2, "tp1 pp1",
         "--dataloader-type cyclic --no-data-sharding"),
    Case("DP5 of 8 to DP3 of 8", 8, 5, "tp1 pp1 dp5", 3, "tp1 pp1", SHARDED),
    Case("TP2, DP3 of 8", 8, 6, "tp2 pp1", 4, "tp2 pp1",
         "--sequence-parallel --padded-vocab-size 288", alone=2),
    Case("PP2, DP3 of 16, in virtual stages", 16, 6, "tp1 pp2 vpp2", 3, "tp1 pp1",
         "--num-virtual-stages-per-pipeline-rank 2", alone=2),
    Case("experts over replicas", 16, 6, "tp1 pp1 ep2", 4, "tp1 pp1 ep2", EXPERTS,
         alone=2),
    Case("experts, recomputed, in a pipeline", 8, 6, "tp1 pp2 recompute=full", 3, "tp1 pp1",
         EXPERTS.replace("--expert-model-parallel-size 2", ""), alone=2),
    Case("further tokens", 8, 3, "tp1 pp1", 2, "tp1 pp1",
         "--mtp-num-layers 1 --position-embedding-type rope"),
    Case("7 layers, PP3 to PP2 in virtual stages", 8, 3, "tp1 pp3", 2, "tp1 pp2 vpp2",
         "--num-layers 7", alone=3),
    Case("bf16", 8, 3, "tp1 pp1", 2, "tp1 pp2", "--bf16", 2e-4),
]  # fmt: skip


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Give the list of jobs that end with the test."""
    found: list[Job] = []
    yield found
    for job in found:
        job.stop()


@pytest.mark.campaign
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_job_with_uneven_shares_learns_what_one_rank_does(
    case: Case, tmp_path: Path, jobs: list[Job]
) -> None:
    model = MODEL.replace("--global-batch-size 12", f"--global-batch-size {case.batch}")
    if not case.ends:
        model = model.replace("--lr-decay-iters 100", "--lr-decay-samples 1200")
    make_dataset(tmp_path / "text")
    flags = [
        *case.ends.split(), *case.flags.split(), "--data-path", str(tmp_path / "text"),
        "--split", "90,5,5", "--vocab-size", "256", "--data-cache-path", str(tmp_path / "cache"),
        "--eval-interval", "6",
    ]  # fmt: skip

    def start(name: str, ranks: int, degrees: dict[int, str]) -> Job:
        jobs.append(
            Job(tmp_path / name, ranks, degrees, flags, model=model, settings="standby = 'never'")
        )
        return jobs[-1]

    alone = start("alone", case.alone, {case.alone: case.first.partition(" dp")[0]})
    alone.finish()
    changed = start("changed", case.ranks, {case.ranks: case.first, case.target: case.then})
    changed.wait_for_step(BEFORE)
    changed.scale(case.target)
    if case.is_back:
        changed.wait_until(lambda: changed.log.count("event=resized") == 1, "the change")
        changed.scale(case.ranks)
    changed.finish()
    expected, found = alone.ledger(), changed.ledger()
    assert list(found) == list(expected)
    assert len({entry.round for entry in found.values()}) == 2 + case.is_back, changed.log
    check_same_steps(found, expected, case.tolerance)
    assert changed.verified() == {"is_kept": True, "breaks": [], "notes": []}
    assert evaluations(changed).keys() == evaluations(alone).keys() != set()
    for step, loss in evaluations(changed).items():
        assert loss == pytest.approx(evaluations(alone)[step], rel=case.tolerance), step
