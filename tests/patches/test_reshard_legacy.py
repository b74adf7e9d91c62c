"""A legacy ``torch`` checkpoint that was resharded offline is loaded by megatron-core's own model
and optimizer, by order and by place, and training goes on."""

from pathlib import Path
from typing import Any

import pytest

from scalai.converters.consistency import verify
from scalai.converters.describe import describe
from scalai.converters.layouts import open_checkpoint
from support.training import resharded
from support.training.jobs import AFTER, Job
from support.training.megatron_layouts import (
    BF16,
    BUCKETS,
    DP2,
    DP3,
    EP2,
    EP4,
    FP16,
    FP32,
    GATED,
    MOE,
    ONE,
    PP2,
    PP2DP2,
    SPLIT,
    TP2,
    TP2DP2,
    TP2PP2,
    TP4,
    VPP2,
)
from support.training.resharded import FULL, check, convert
from support.training.worker_pool import WorkerPool

CASES = [
    ("split-dp2-to-tp2", {**SPLIT}, DP2, TP2, FP32),
    ("buckets-tp2pp2-to-dp3", {**BUCKETS, "global_batch_size": 6}, TP2PP2, DP3, FP32),
    ("buckets-dp2-to-pp2dp2", {**BUCKETS}, DP2, PP2DP2, FP32),
    ("buckets-bf16-tp2dp2-to-pp2", {**BUCKETS, "precision": "bf16"}, TP2DP2, PP2, BF16),
    ("split-gated-virtual-to-tp2dp2", {**SPLIT, **GATED}, VPP2, TP2DP2, FP32),
    ("split-untied-tp4-to-virtual", {**SPLIT, "is_tied": False}, TP4, VPP2, FP32),
    ("split-fp16-tp2-to-pp2", {**SPLIT, "precision": "fp16"}, TP2, PP2, FP16),
    ("split-experts-ep2-to-dp2", {**MOE, **SPLIT}, EP2, DP2, FP32),
    ("split-experts-dp2-to-ep2", {**MOE, **SPLIT}, DP2, EP2, FP32),
    ("split-experts-ep4-to-ep2dp2", {**MOE, **SPLIT}, EP4, {**EP2, "world": 4}, FP32),
    ("split-experts-ep2dp2-to-ep4", {**MOE, **SPLIT}, {**EP2, "world": 4}, EP4, FP32),
    ("whole-experts-ep4-to-dp2", {**MOE}, EP4, DP2, FP32),
    ("whole-tp2pp2-to-one", {}, TP2PP2, ONE, FP32),
    ("whole-bf16-one-to-tp2pp2", {"precision": "bf16"}, ONE, TP2PP2, BF16),
    ("whole-gated-fp16-pp2-to-tp2", {**GATED, "precision": "fp16"}, PP2, TP2, FP16),
    ("whole-experts-ep2-to-one", {**MOE}, EP2, ONE, FP32),
]

LONG = {
    "split-dp2-to-tp2", "split-experts-dp2-to-ep2", "whole-gated-fp16-pp2-to-tp2",
    "split-experts-ep4-to-ep2dp2", "split-experts-ep2dp2-to-ep4", "whole-experts-ep4-to-dp2",
}  # fmt: skip


@pytest.mark.turns
@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    [
        pytest.param(*case[1:], id=case[0], marks=[pytest.mark.campaign] * (case[0] in LONG))
        for case in CASES
    ],
)
def test_a_resharded_legacy_checkpoint_goes_on_as_the_run_that_never_stopped(
    pool: WorkerPool,
    tmp_path: Path,
    model: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
    tolerance: float,
) -> None:
    old, new = Job(**{**model, **before}), Job(**{**model, **after})
    uninterrupted = save(pool, old, tmp_path / "saved")
    verify(open_checkpoint(tmp_path / "saved"), workers=0)
    convert(tmp_path / "saved", tmp_path / "converted", new, "torch")
    assert facts(tmp_path / "converted") == facts(tmp_path / "saved")
    check(uninterrupted, load(pool, new, tmp_path / "converted"), tolerance)


@pytest.mark.parametrize("model", [{**SPLIT, **GATED}, {"precision": "bf16"}])
def test_a_legacy_checkpoint_becomes_a_distributed_one(
    pool: WorkerPool, tmp_path: Path, model: dict[str, Any]
) -> None:
    old, new = Job(**{**model, **TP2}), Job(**{**model, **PP2})
    uninterrupted = save(pool, old, tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "converted", new, "torch_dist")
    tolerance = BF16 if old.precision == "bf16" else FP32
    check(uninterrupted, resharded.load(pool, new, tmp_path / "converted"), tolerance)


@pytest.mark.parametrize("model", [{**BUCKETS, **GATED}, {"precision": "bf16"}])
def test_a_distributed_checkpoint_becomes_a_legacy_one(
    pool: WorkerPool, tmp_path: Path, model: dict[str, Any]
) -> None:
    old, new = Job(**{**model, **TP2}), Job(**{**model, **PP2DP2})
    uninterrupted = resharded.save(
        pool, old, tmp_path / "saved", "dp_reshardable" if old.distributed else FULL
    )
    convert(tmp_path / "saved", tmp_path / "converted", new, "torch")
    assert names(tmp_path / "converted") == names(tmp_path / "saved")
    tolerance = BF16 if old.precision == "bf16" else FP32
    check(uninterrupted, load(pool, new, tmp_path / "converted"), tolerance)


def save(pool: WorkerPool, job: Job, directory: Path) -> Any:
    """Train, save below ``directory`` as Megatron-LM would, train on; return what each rank saw."""
    iteration = directory / f"iter_{AFTER.start:07d}"
    runs = pool.run("legacy_worker:train_save_train", [(job, str(iteration))] * job.world)
    (directory / "latest_checkpointed_iteration.txt").write_text(str(AFTER.start))
    return runs


def load(pool: WorkerPool, job: Job, directory: Path) -> Any:
    """Load a converted checkpoint into a fresh job with megatron-core, train on."""
    iteration = directory / f"iter_{AFTER.start:07d}"
    return pool.run("legacy_worker:load_train", [(job, str(iteration))] * job.world)


def names(directory: Path) -> dict[str, tuple[str, Any]]:
    """Return the tensors of a checkpoint with dtypes and shapes."""
    tensors = describe(open_checkpoint(directory))["tensors"]
    return {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in tensors}


def facts(directory: Path) -> Any:
    """Return what degrees must not change."""
    values = open_checkpoint(directory).values
    counters = {**values.counters, "flops": values.extra["num_floating_point_operations_so_far"]}
    return names(directory), values.step, counters, values.scheduler, values.is_split
