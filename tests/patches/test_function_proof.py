"""What a step of a real model computes tells whether another layout computes the same function.

That healthy changes do is checked with each case of ``test_resize``.
"""

from pathlib import Path

import pytest

from scalai.core.function_proof import compare, merged
from support.training.jobs import Job
from support.training.megatron_layouts import DP2, MOE, PP2, TP2, Fields
from support.training.resize_case import resize
from support.training.rounds import play
from support.training.worker_pool import WorkerPool

DROPOUT = "draws random numbers"
TP2SP: Fields = {**TP2, "sequence_parallel": True}
LAYOUT_DEPENDENT: list[tuple[str, Fields, Fields, Fields]] = [
    ("global-balancing-loss", {"router": "global_aux_loss", "balance": 0.1}, DP2, PP2),
    ("capacity", {"capacity": 1.0}, TP2SP, DP2),
    ("sinkhorn", {"router": "sinkhorn", "top_k": 1}, TP2SP, DP2),
]


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [case[1:] for case in LAYOUT_DEPENDENT],
    ids=[case[0] for case in LAYOUT_DEPENDENT],
)
def test_a_model_that_is_a_function_of_its_layout_is_found_by_its_first_step(
    pool: WorkerPool, tmp_path: Path, model: Fields, before: Fields, after: Fields
) -> None:
    job = {**MOE, **model, "is_lawless": True}
    result = resize(pool, Job(**{**job, **before}), Job(**{**job, **after}), tmp_path)
    proof = compare(result.uninterrupted.first, result.resized.first)
    print(proof.text)
    assert proof.is_same is False


def test_a_balancing_loss_of_each_micro_batch_alone_is_the_same_in_any_layout(
    pool: WorkerPool, tmp_path: Path
) -> None:
    job = {**MOE, "balance": 0.1}
    result = resize(pool, Job(**{**job, **TP2SP}), Job(**{**job, **DP2}), tmp_path)
    proof = compare(result.uninterrupted.first, result.resized.first)
    print(proof.text)
    assert proof.is_same


@pytest.mark.parametrize(
    ("stage", "dropout", "is_by_rank", "is_same"),
    [
        (0, 0.0, False, True), (1, 0.0, False, True), (3, 0.0, False, True),
        (1, 0.0, True, False), (1, 0.1, False, None),
    ],
)  # fmt: skip
def test_an_engine_makes_the_step_behind_its_stop_without_its_update_and_leaves(
    rounds_pool: WorkerPool,
    tmp_path: Path,
    stage: int,
    dropout: float,
    is_by_rank: bool,
    is_same: bool | None,
) -> None:
    given = {"stage": stage, "dropout": dropout, "is_by_rank": is_by_rank}
    rounds: list[tuple[int, int | None]] = [(2, 3), (1, 5)]
    old, new = play(rounds_pool, tmp_path, "computes", rounds, {"probes": True}, **given)
    assert [each.ending for each in (*old, *new)] == ["left"] * 3
    assert [line["step"] for line in old[0].notes] == [1, 2, 3], "the script sees no step behind it"
    before = merged(old[0].numbers[-1], old[1].numbers[-1])
    assert before is not None and before.norm is not None and before.loss is not None
    proof = compare(before, new[0].numbers[0])
    print(proof.text)
    assert proof.is_same is is_same
    assert before.framework.startswith("deepspeed ")
    if dropout:
        assert DROPOUT in proof.text
