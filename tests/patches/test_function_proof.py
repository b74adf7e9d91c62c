"""What a step of a real model computes tells whether another layout computes the same function.

That healthy changes do is checked with each case of ``test_resize``.
"""

from pathlib import Path

import pytest

from scalai.core.job.function_proof import compare, merged
from support.training.jobs import Job
from support.training.megatron_layouts import (
    AGAIN,
    BUCKETS,
    DP2,
    DP4,
    EP2,
    MOE,
    PP2,
    SPLIT,
    TP2,
    TP2DP2,
    VPP2,
    Fields,
)
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


RANDOM: list[tuple[str, Fields, Fields, Fields, bool]] = [
    ("dp2-to-tp2", BUCKETS, DP2, TP2, True),
    ("pp2-to-virtual-stages", {}, PP2, VPP2, True),
    ("experts-with-jitter", {**MOE, "jitter": 0.1, "balance": 0.1}, EP2, {**EP2, **DP4}, True),
    (
        "global-balancing-loss",
        {**LAYOUT_DEPENDENT[0][1], **MOE, "router": "global_aux_loss"},
        DP2,
        PP2,
        False,
    ),
]


@pytest.mark.parametrize(
    ("model", "before", "after", "is_same"),
    [case[1:] for case in RANDOM],
    ids=[case[0] for case in RANDOM],
)
def test_with_dropout_a_further_pass_without_it_tells_whether_the_function_is_the_same(
    pool: WorkerPool, tmp_path: Path, model: Fields, before: Fields, after: Fields, *, is_same: bool
) -> None:
    job = {**model, "dropout": 0.1, "proves": True, "is_lawless": True}
    result = resize(pool, Job(**{**job, **before}), Job(**{**job, **after}), tmp_path)
    proof = compare(result.uninterrupted.bare, result.resized.bare)
    print(proof.text)
    assert proof.is_same is is_same
    assert compare(result.uninterrupted.first, result.resized.first).is_same is False, "dropout"


@pytest.mark.parametrize(
    "job",
    [
        {**TP2DP2, **BUCKETS},
        {**VPP2},
        {**EP2, **MOE, "jitter": 0.1, "balance": 0.1, "has_expert_bias": True},
        {**DP2, **MOE, "router": "global_aux_loss", "balance": 0.1, "predicted": 1},
        {**DP2, "precision": "fp16", "loss_scale": 2.0**20, **SPLIT},
        pytest.param({**DP2, "precision": "bf16", **AGAIN}, marks=pytest.mark.campaign),
    ],
)
def test_the_further_pass_leaves_no_trace(pool: WorkerPool, tmp_path: Path, job: Fields) -> None:
    given = {"dropout": 0.1, "is_lawless": True, **job}
    result = resize(pool, Job(**given), Job(**given, proves=True), tmp_path)
    assert result.randomness == "rng=continued" and result.resized.bare is not None
    assert not result.resized.bare.obstacle
    assert result.resized.losses == result.uninterrupted.losses
    assert result.resized.norms == result.uninterrupted.norms
    assert result.resized.skipped == result.uninterrupted.skipped
    assert result.resized.ends == result.uninterrupted.ends


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
    old, new = play(rounds_pool, tmp_path, "computes", rounds, {"proves": True}, **given)
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


STAGES = {"proves": True, "compares": True, "stages": [2, 1]}


@pytest.mark.parametrize(
    ("dropout", "is_by_rank", "is_same"),
    [(0.0, False, True), (0.1, False, True), (0.1, True, False)],
)
def test_a_pipeline_with_dropout_makes_a_further_pass_without_it_on_both_sides(
    rounds_pool: WorkerPool, tmp_path: Path, dropout: float, is_by_rank: bool, is_same: bool
) -> None:
    given = {"dropout": dropout, "is_by_rank": is_by_rank}
    rounds: list[tuple[int, int | None]] = [(2, 3), (1, 5)]
    made = play(rounds_pool, tmp_path, "computes_in_stages", rounds, STAGES, **given)
    assert [each.ending for ranks in made for each in ranks] == ["left"] * 3
    old, new = made
    assert [line["step"] for line in old[0].notes] == [1, 2, 3], "the script sees no step behind it"
    before = merged(old[0].numbers[-1], old[1].numbers[-1])
    proof = compare(before, new[0].numbers[0])
    print(proof.text)
    assert proof.is_same is is_same
    assert new[0].numbers[0].is_random is bool(dropout)


def test_the_further_pass_of_a_pipeline_leaves_no_trace(
    rounds_pool: WorkerPool, tmp_path: Path
) -> None:
    rounds: list[tuple[int, int | None]] = [(2, 3), (2, None)]
    given = {"dropout": 0.1, "is_by_rank": False}
    seen = []
    for compares in (True, False):
        settings = {"compares": compares, "stages": [2, 2]}
        folder = tmp_path / str(compares)
        made = play(rounds_pool, folder, "computes_in_stages", rounds, settings, **given)
        assert [each.ending for ranks in made for each in ranks] == [
            "left",
            "left",
            *["finished"] * 2,
        ]
        assert made[1][0].numbers[0].obstacle == (
            "" if compares else made[1][0].numbers[0].obstacle
        )
        seen.append([each.notes for ranks in made for each in ranks])
    assert seen[0] == seen[1]
