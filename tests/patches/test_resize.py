"""A job that changes its layout goes on as if it had not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import Job
from resize_case import Result, resize
from worker_pool import WorkerPool

FP32 = 1e-6
"""Layouts differ in the order of additions: 1e-8 to 8e-8 were measured, with no resize too."""
BF16 = 2e-4
"""The masters are exact; activations and gradients round elsewhere: up to 5e-5 were measured."""
FP16 = 1e-4
"""As bf16 with three more bits, as long as DP, and with it the path of the loss scale, stays."""
EXACT = 0.0

GQA = {"query_groups": 2, "is_gated": True}
TEXT = {"padded_vocabulary": 50304, "vocabulary": 50257, "hidden": 16, "heads": 2, "layers": 2}
MOE = {"experts": 4, "is_gated": True, "layers": 2}
UNTIED = {"is_tied": False}
NO_REDUCTIONS = {"is_tied": False, "clip": 0.0}
"""Without tied weights and clipping no sum runs over pipeline stages."""
SPLIT = {"distributed": True}
BUCKETS = {"distributed": True, "overlap": True}
INSTANCES = {"distributed": True, "overlap": True, "instances": 2}
OFFLOADED = {"distributed": True, "precision": "bf16", "is_offloaded": True}
SIX = {"global_batch_size": 6}

OVERFLOWS = {"precision": "fp16", "loss_scale": 2.0**20}
"""Steps 0 and 3 of 6 are skipped: one before the resize and one after it."""

Layout = dict[str, Any]
ONE: Layout = {}
DP2, DP3, DP4 = {"world": 2}, {"world": 3}, {"world": 4}
TP2, TP4 = {"world": 2, "tp": 2}, {"world": 4, "tp": 4}
PP2, PP4 = {"world": 2, "pp": 2}, {"world": 4, "pp": 4}
VPP2 = {"world": 2, "pp": 2, "vpp": 2}
TP2DP2, PP2DP2 = {"world": 4, "tp": 2}, {"world": 4, "pp": 2}
TP2PP2 = {"world": 4, "tp": 2, "pp": 2}
EP2 = {"world": 2, "ep": 2}
TP2EP2 = {"world": 4, "tp": 2, "ep": 2, "sequence_parallel": True}

CASES: list[tuple[str, Layout, Layout, Layout, float]] = [
    ("tp2-to-tp1", {}, TP2, ONE, FP32),
    ("tp1-to-tp4", UNTIED, ONE, TP4, FP32),
    ("pp1-to-pp2", {}, ONE, PP2, FP32),
    ("pp1-to-pp2-untied", NO_REDUCTIONS, ONE, PP2, EXACT),
    ("pp4-to-pp2-untied", NO_REDUCTIONS, PP4, PP2, EXACT),
    ("virtual-stages-to-one", {}, VPP2, ONE, FP32),
    ("pp2-to-virtual-stages", NO_REDUCTIONS, PP2, VPP2, EXACT),
    ("dp2-to-dp3", SIX, DP2, DP3, FP32),
    ("dp2-to-dp3-buckets", {**SIX, **BUCKETS}, DP2, DP3, FP32),
    ("tp2pp2-to-dp3-buckets", {**SIX, **BUCKETS}, TP2PP2, DP3, FP32),
    ("dp2-to-tp2pp2-buckets", BUCKETS, DP2, TP2PP2, FP32),
    ("pp2dp2-tied-split-to-tp2dp2", SPLIT, PP2DP2, TP2DP2, FP32),
    ("tp2-to-pp2dp2-tied-split", SPLIT, TP2, PP2DP2, FP32),
    ("split-to-whole", {}, {**DP2, **BUCKETS}, PP2, FP32),
    ("whole-to-split", {}, TP2, {**TP2DP2, **SPLIT}, FP32),
    ("grouped-queries-tp2-to-tp4", {**GQA, **SPLIT}, TP2, TP4, FP32),
    ("grouped-queries-tp4-to-pp2dp2", {**GQA, **BUCKETS}, TP4, PP2DP2, FP32),
    ("vocabulary-50257-tp2-to-pp2", {**TEXT, **SPLIT}, TP2, PP2, FP32),
    ("sequence-parallel-to-one", {}, {**TP2, "sequence_parallel": True}, ONE, FP32),
    ("bf16-tp2-to-dp2", {"precision": "bf16", **BUCKETS}, TP2, DP2, BF16),
    ("bf16-dp2-to-pp2", {"precision": "bf16"}, DP2, PP2, BF16),
    ("fp16-dp2-to-pp2", {"precision": "fp16"}, DP2, PP2, FP16),
    ("fp16-tp2-to-pp2", {"precision": "fp16"}, TP2, PP2, FP16),
    ("instances-dp4-to-tp2dp2", INSTANCES, DP4, TP2DP2, FP32),
    ("instances-dp4-to-one-of-dp2", BUCKETS, {**DP4, "instances": 2}, DP2, FP32),
    ("offloaded-dp2-to-tp2", OFFLOADED, DP2, TP2, BF16),
    ("offloaded-tp2-to-pp2dp2", OFFLOADED, TP2, PP2DP2, BF16),
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
    pool: WorkerPool, tmp_path: Path, model: Layout, before: Layout, after: Layout, tolerance: float
) -> None:
    result = resize(pool, Job(**{**model, **before}), Job(**{**model, **after}), tmp_path)
    check(result, tolerance)
    if before == after:
        assert result.randomness == "rng=continued"


def test_other_degrees_begin_new_random_streams_and_say_so(
    pool: WorkerPool, tmp_path: Path
) -> None:
    dropout = Job(world=2, tp=2, dropout=0.1)
    result = resize(pool, dropout, replace(dropout, world=1, tp=1), tmp_path)
    assert result.randomness.startswith("rng=reseeded seed=1234 step=3 degrees_before=tp2")


def check(result: Result, tolerance: float) -> None:
    print(f"largest relative difference of a loss: {result.largest_difference:.1e}")
    assert len(result.uninterrupted.losses) == len(result.resized.losses) > 0
    assert result.largest_difference <= tolerance
    assert result.resized.learning_rate == result.uninterrupted.learning_rate
    assert result.resized.skipped == result.uninterrupted.skipped
