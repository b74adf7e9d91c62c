"""A job that changes its layout goes on as if it had not. The cross of all layouts is long: for the
campaign."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.consistency import verify
from scalai.converters.layouts import open_checkpoint
from scalai.store.host import HostStore
from support.training.jobs import Job
from support.training.megatron_layouts import (
    AGAIN,
    BF16,
    BUCKETS,
    DP2,
    DP3,
    DP4,
    EIGHT,
    EP2,
    EXACT,
    FP16,
    FP32,
    GATED,
    MOE,
    ONE,
    OVERFLOWS,
    PP2,
    PP2DP2,
    PP4,
    SIX,
    SPLIT,
    TEXT,
    TP2,
    TP2DP2,
    TP2EP2,
    TP2PP2,
    TP4,
    UNTIED,
    VPP2,
    Fields,
)
from support.training.resize_case import check, resize, train_and_snapshot
from support.training.worker_pool import WorkerPool

NO_REDUCTIONS = {"is_tied": False, "clip": 0.0}
"""Without tied weights and clipping no sum runs over pipeline stages."""
INSTANCES = {"distributed": True, "overlap": True, "instances": 2}
TWICE = {**TP2DP2, "micro_batch_size": 2}
SPLIT16 = {"distributed": True, "precision": "bf16"}
FUSED16 = {**SPLIT16, "is_fused": True}
HALF, SPILLED = {"offloaded": 0.5}, {"offloaded": 1.0}

CASES: list[tuple[str, Fields, Fields, Fields, float]] = [
    ("tp2-to-tp1", {}, TP2, ONE, FP32),
    ("tp1-to-tp4", UNTIED, ONE, TP4, FP32),
    ("pp1-to-pp2", {}, ONE, PP2, FP32),
    ("pp1-to-pp2-untied", NO_REDUCTIONS, ONE, PP2, EXACT),
    ("pp4-to-pp2-untied", NO_REDUCTIONS, PP4, PP2, EXACT),
    ("virtual-stages-to-one", {}, VPP2, ONE, FP32),
    ("pp2-to-virtual-stages", NO_REDUCTIONS, PP2, VPP2, EXACT),
    ("recompute-none-to-full", {}, DP2, {**DP2, **AGAIN}, EXACT),
    ("recompute-full-to-selective", {}, {**TP2, **AGAIN}, {**TP2, "recompute": "selective"}, EXACT),
    ("recompute-with-dropout", {"dropout": 0.1}, TP2DP2, {**TP2DP2, **AGAIN}, EXACT),
    ("recompute-of-experts", {**MOE, **SPLIT}, EP2, {**EP2, **AGAIN}, EXACT),
    ("recompute-with-fewer-ranks", BUCKETS, TP2DP2, {**TP2, **AGAIN}, FP32),
    ("micro-batch-4-to-1", {**EIGHT, **SPLIT}, {**DP2, "micro_batch_size": 4}, DP2, FP32),
    ("micro-batch-1-to-2-of-stages", EIGHT, VPP2, {**VPP2, "micro_batch_size": 2}, FP32),
    ("micro-batch-and-recompute-of-fewer", {**EIGHT, **SPLIT}, TWICE, {**TP2, **AGAIN}, FP32),
    ("micro-batch-bf16", {**EIGHT, "precision": "bf16"}, TWICE, {**PP2, **AGAIN}, BF16),
    ("dp2-to-dp3", SIX, DP2, DP3, FP32),
    ("dp2-to-dp3-buckets", {**SIX, **BUCKETS}, DP2, DP3, FP32),
    ("tp2pp2-to-dp3-buckets", {**SIX, **BUCKETS}, TP2PP2, DP3, FP32),
    ("dp2-to-tp2pp2-buckets", BUCKETS, DP2, TP2PP2, FP32),
    ("pp2dp2-tied-split-to-tp2dp2", SPLIT, PP2DP2, TP2DP2, FP32),
    ("tp2-to-pp2dp2-tied-split", SPLIT, TP2, PP2DP2, FP32),
    ("split-to-whole", {}, {**DP2, **BUCKETS}, PP2, FP32),
    ("whole-to-split", {}, TP2, {**TP2DP2, **SPLIT}, FP32),
    ("grouped-queries-tp2-to-tp4", {**GATED, **SPLIT}, TP2, TP4, FP32),
    ("grouped-queries-tp4-to-pp2dp2", {**GATED, **BUCKETS}, TP4, PP2DP2, FP32),
    ("vocabulary-50257-tp2-to-pp2", {**TEXT, **SPLIT}, TP2, PP2, FP32),
    ("sequence-parallel-to-one", {}, {**TP2, "sequence_parallel": True}, ONE, FP32),
    ("bf16-tp2-to-dp2", {"precision": "bf16", **BUCKETS}, TP2, DP2, BF16),
    ("bf16-dp2-to-pp2", {"precision": "bf16"}, DP2, PP2, BF16),
    ("fp16-dp2-to-pp2", {"precision": "fp16"}, DP2, PP2, FP16),
    ("fp16-tp2-to-pp2", {"precision": "fp16"}, TP2, PP2, FP16),
    ("instances-dp4-to-tp2dp2", INSTANCES, DP4, TP2DP2, FP32),
    ("instances-dp4-to-one-of-dp2", BUCKETS, {**DP4, "instances": 2}, DP2, FP32),
    ("offloaded-dp2-to-tp2", {**SPLIT16, **HALF}, DP2, TP2, BF16),
    ("offloaded-tp2-to-pp2dp2", {**SPLIT16, **HALF}, TP2, PP2DP2, BF16),
    ("spilled-fewer-ranks", SPLIT16, TP2DP2, {**TP2, **SPILLED}, BF16),
    ("back-from-the-host", SPLIT16, {**TP2, **SPILLED}, TP2DP2, BF16),
    ("half-to-all-spilled", SPLIT16, {**DP2, **HALF}, {**DP2, **SPILLED}, BF16),
    ("spilled-fp16", {**SPLIT, "precision": "fp16"}, DP2, {**ONE, **SPILLED}, FP16),
    ("spilled-fused", FUSED16, DP2, {**ONE, **SPILLED}, BF16),
    ("half-spilled-fused", FUSED16, DP2, {**ONE, **HALF}, BF16),
    ("back-from-the-host-fused", FUSED16, {**ONE, **HALF}, DP2, BF16),
    ("spilled-experts", {**MOE, **SPLIT16}, EP2, {**EP2, **SPILLED}, BF16),
    ("experts-ep2-to-dp2", {**MOE, **SPLIT}, EP2, DP2, FP32),
    ("experts-dp2-to-ep2", {**MOE, **BUCKETS}, DP2, EP2, FP32),
    ("experts-ep2-to-tp2ep2", {**MOE, **SPLIT}, {**DP4, "ep": 2}, TP2EP2, FP32),
    ("same-tp2dp2-dropout", {"dropout": 0.1, **BUCKETS}, TP2DP2, TP2DP2, EXACT),
    ("same-fp16-overflow", {**OVERFLOWS, **SPLIT}, DP2, DP2, EXACT),
]


@pytest.mark.turns
@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_a_resized_job_goes_on_as_the_uninterrupted_one(
    pool: WorkerPool, tmp_path: Path, model: Fields, before: Fields, after: Fields, tolerance: float
) -> None:
    result = resize(pool, Job(**{**model, **before}), Job(**{**model, **after}), tmp_path)
    check(result, tolerance)
    if before == after:
        assert result.randomness == "rng=continued"


UNSTORED = {
    "tp2-to-tp1", "pp2-to-virtual-stages", "tp2pp2-to-dp3-buckets", "whole-to-split",
    "grouped-queries-tp2-to-tp4", "bf16-tp2-to-dp2", "fp16-dp2-to-pp2", "instances-dp4-to-tp2dp2",
    "half-to-all-spilled", "experts-ep2-to-tp2ep2", "same-tp2dp2-dropout",
}  # fmt: skip
"""Cases of each kind of optimizer, buffer and precision."""


@pytest.mark.turns
@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    [case[1:] for case in CASES if case[0] in UNSTORED],
    ids=[case[0] for case in CASES if case[0] in UNSTORED],
)
def test_a_job_built_without_storage_goes_on_as_the_uninterrupted_one(
    pool: WorkerPool, tmp_path: Path, model: Fields, before: Fields, after: Fields, tolerance: float
) -> None:
    old, new = (Job(**{**model, **layout}) for layout in (before, after))
    check(resize(pool, old, new, tmp_path, "unstored"), tolerance)


def test_masters_in_host_memory_round_to_the_weights_and_verify_looks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    with HostStore("case", "here", tmp_path) as store:
        train_and_snapshot(pool, Job(**{**SPLIT16, **HALF, **DP2}), store)
        found = verify(open_checkpoint(store.generation_directory(1)), 0)
        assert "main/decoder.final_layernorm.weight" in found


def test_other_degrees_begin_new_random_streams_and_say_so(
    pool: WorkerPool, tmp_path: Path
) -> None:
    dropout = Job(world=2, tp=2, dropout=0.1)
    result = resize(pool, dropout, replace(dropout, world=1, tp=1), tmp_path)
    assert result.randomness.startswith("rng=reseeded seed=1234 step=3 degrees_before=tp2")


# ------------------------------------------------------------------ every layout to every other

LAYOUTS = {
    "one": ONE, "dp2": DP2, "dp3": DP3, "tp2": TP2, "tp4": TP4, "pp2": PP2, "pp4": PP4,
    "vpp2": VPP2, "tp2pp2": TP2PP2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tied-whole": {},
    "untied-split": {**UNTIED, **SPLIT},
    "gated-buckets": {**GATED, **BUCKETS},
}

PAIRS = [
    (before, after, [*MODELS][(here + there) % len(MODELS)])
    for (here, before), (there, after) in permutations(enumerate(LAYOUTS), 2)
]
"""The models change, so that each leaves every layout, and goes on in every layout."""


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize(("before", "after", "model"), PAIRS)
def test_every_layout_becomes_every_other(
    pool: WorkerPool, tmp_path: Path, before: str, after: str, model: str
) -> None:
    shared = {**SIX, **MODELS[model]}
    result = resize(
        pool, Job(**{**shared, **LAYOUTS[before]}), Job(**{**shared, **LAYOUTS[after]}), tmp_path
    )
    check(result, FP32)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("before", "after"), list(permutations((DP2, EP2, PP2), 2)), ids=lambda layout: str(layout)
)
def test_experts_move_between_ranks(
    pool: WorkerPool, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    old, new = (Job(**{**MOE, **BUCKETS, **layout}) for layout in (before, after))
    check(resize(pool, old, new, tmp_path), FP32)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("before", "after"), list(permutations((TP2DP2, PP2DP2, TP2PP2), 2)), ids=lambda x: str(x)
)
def test_state_is_exact_where_another_dp_forks_the_loss_scale(
    pool: WorkerPool, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    # Gradients are divided by the number of micro-batches before they are scaled, so with another
    # DP they overflow at other steps. What is restored is exact: `resize` proves every tensor.
    old, new = (Job(**{**OVERFLOWS, **SPLIT, **layout}) for layout in (before, after))
    result = resize(pool, old, new, tmp_path)
    print(f"largest relative difference of a loss: {result.largest_difference:.1e}")
