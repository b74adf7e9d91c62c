"""A DeepSpeed job that changes its layout goes on as if it had not."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from support.training.deepspeed_jobs import Job
from support.training.resize_case import Result, resize
from support.training.worker_pool import WorkerPool

FP32 = 1e-6
BF16 = 1e-3
"""Gradients are added up in bf16: 4e-5 to 6e-4 were measured; what is restored is exact."""
FP16 = 1e-3
"""3e-6 to 1.2e-4 were measured."""
EXACT = 0.0

Layout = dict[str, Any]
ROUND_ROBIN = {"zero": {"round_robin_gradients": True}}
SUB_GROUPS = {"zero": {"sub_group_size": 300, "stage3_param_persistence_threshold": 60}}
FROZEN_SHARDS = {"zero": {"stage3_param_persistence_threshold": 0}}
OFFLOADED = {
    "zero": {"offload_optimizer": {"device": "cpu"}},
    "config": {"zero_force_ds_cpu_optimizer": False},
}
FUSED = {"fused": True}
COMPILED = {"zero": {"offload_optimizer": {"device": "cpu"}}, "compiled": "DeepSpeedCPUAdam"}
HOST = {"device": "cpu", "pin_memory": True}
SPILLED = {**OFFLOADED, "zero": {"offload_optimizer": HOST}}
ALL_SPILLED = {**OFFLOADED, "zero": {"offload_optimizer": HOST, "offload_param": HOST}}
UNTIED = {"stage": 1, "tied": False}
UNCLIPPED = {"config": {"gradient_clipping": 0.0}}
"""DeepSpeed clips a pipeline's gradients without ZeRO by the norm of its first stage alone."""


def pipeline(pp: int, dp: int, **values: Any) -> Layout:
    return {"world": pp * dp, "pp": pp, **values}


def cut(tp: int, dp: int, pp: int = 0, **values: Any) -> Layout:
    return {"world": tp * dp * max(pp, 1), "tp": tp, "pp": pp, **values}


def ranks(world: int, stage: int, **values: Any) -> Layout:
    return {"world": world, "stage": stage, **values}


CASES: list[tuple[str, Layout, Layout, Layout, float]] = [
    ("zero1-round-robin-4-to-2", ROUND_ROBIN, ranks(4, 1), ranks(2, 1), FP32),
    ("zero3-sub-groups-2-to-3", SUB_GROUPS, ranks(2, 3), ranks(3, 3), FP32),
    ("zero0-to-zero2", {}, ranks(2, 0), ranks(3, 2), FP32),
    ("bf16-zero3-to-zero1", {"precision": "bf16"}, ranks(3, 3), ranks(2, 1), BF16),
    ("pipeline-2x2-to-1x3", {"stage": 1}, pipeline(2, 2), pipeline(1, 3), FP32),
    ("zero2-to-the-host", {}, ranks(2, 2), ranks(1, 2, **SPILLED), FP32),
    ("all-from-the-host-to-zero3", {}, ranks(1, 3, **ALL_SPILLED), ranks(2, 3), FP32),
]

MORE: list[tuple[str, Layout, Layout, Layout, float]] = [
    *(
        (f"zero{a}-to-zero{b}", {}, ranks(2, a), ranks(3, b), FP32)
        for a, b in permutations(range(4), 2)
        if (a, b) != (0, 2)  # one of those above
    ),
    *((f"zero{s}-3-to-2", {}, ranks(3, s), ranks(2, s), FP32) for s in range(4)),
    *((f"zero{s}-4-to-3", {}, ranks(4, s), ranks(3, s), FP32) for s in range(4)),
    *((f"zero{s}-2-to-3", {}, ranks(2, s), ranks(3, s), FP32) for s in range(4)),
    *((f"same-zero{s}", {}, ranks(2, s), ranks(2, s), EXACT) for s in range(4)),
    ("zero3-frozen-shards", FROZEN_SHARDS, ranks(4, 3), ranks(3, 3), FP32),
    ("zero2-to-zero1-round-robin", ROUND_ROBIN, ranks(3, 2), ranks(4, 1), FP32),
    *((f"offloaded-zero{s}", OFFLOADED, ranks(3, s), ranks(2, s), FP32) for s in (1, 2, 3)),
    *(
        (f"zero{s}-{way}-the-host", {"precision": p}, *layouts, limit)
        for s, p, limit in (
            (1, "fp32", FP32),
            (2, "bf16", BF16),
            (3, "bf16", BF16),
            (2, "fp16", FP16),
        )
        for way, layouts in (
            ("to", (ranks(3, s), ranks(2, s, **SPILLED))),
            ("from", (ranks(2, s, **SPILLED), ranks(3, s))),
        )
    ),
    (
        "bf16-zero3-all-to-the-host",
        {"precision": "bf16"},
        ranks(2, 3),
        ranks(1, 3, **ALL_SPILLED),
        BF16,
    ),
    (
        "bf16-optimizer-to-the-host",
        {"precision": "bf16-fp32"},
        ranks(2, 1),
        ranks(1, 1, **SPILLED),
        BF16,
    ),
    (
        "fused-to-cpu-adam",
        {"precision": "bf16"},
        ranks(3, 2, **FUSED),
        ranks(2, 2, **COMPILED),
        BF16,
    ),
    (
        "cpu-adam-to-fused",
        {"precision": "bf16"},
        ranks(2, 2, **COMPILED),
        ranks(3, 2, **FUSED),
        BF16,
    ),
    ("pipeline-to-the-host", {"stage": 1}, pipeline(2, 2), pipeline(1, 3, **SPILLED), FP32),
    *(
        (f"bf16-zero{a}-to-zero{b}", {"precision": "bf16"}, ranks(2, a), ranks(3, b), BF16)
        for a, b in ((0, 1), (1, 0), (1, 3), (2, 2), (3, 0))
    ),
    ("bf16-optimizer", {"precision": "bf16-fp32"}, ranks(2, 1), ranks(3, 1), BF16),
    ("bf16-fused-to-zero1", {"precision": "bf16", **FUSED}, ranks(2, 0), ranks(3, 1), BF16),
    *(
        (f"{p}-zero{s}-{a}-to-{b}", {"precision": p}, ranks(a, s), ranks(b, s), limit)
        for p, limit in (("bf16", BF16), ("fp16", FP16))
        for s, (a, b) in ((1, (4, 2)), (2, (2, 3)), (3, (3, 4)), (3, (4, 2)))
    ),
    # Not from ZeRO 0 to another: that is refused (patches/deepspeed/unsupported.py).
    *(
        (f"fp16-zero{a}-to-zero{b}", {"precision": "fp16"}, ranks(2, a), ranks(2, b), FP16)
        for a, b in ((0, 0), (1, 1), (2, 3), (3, 3), (3, 2))
    ),
    *(
        (f"pipeline-zero{a}-{p}x{q}-to-zero{b}-{r}x{s}", UNCLIPPED, x, y, FP32)
        for a, (p, q), b, (r, s) in (
            (0, (2, 2), 0, (1, 3)),
            (0, (1, 3), 1, (4, 1)),
            (1, (4, 1), 1, (2, 2)),
            (1, (2, 2), 0, (4, 1)),
            (1, (1, 2), 1, (2, 2)),
        )
        for x, y in [(pipeline(p, q, stage=a), pipeline(r, s, stage=b))]
    ),
    ("pipeline-untied", UNTIED, pipeline(2, 2), pipeline(1, 3), FP32),
    *(
        (f"pipeline-bf16-zero{a}", {"precision": "bf16"}, x, y, BF16)
        for a in (0, 1)
        for x, y in [(pipeline(2, 2, stage=a), pipeline(1, 3, stage=a))]
    ),
    ("cut-zero1-2x2-to-1x3", {"stage": 1}, cut(2, 2), cut(1, 3), FP32),
    ("cut-zero2-1x2-to-4x1", {"stage": 2}, cut(1, 2), cut(4, 1), FP32),
    ("cut-zero3-2x2-to-4x1", {"stage": 3}, cut(2, 2), cut(4, 1), FP32),
    ("cut-zero0-to-zero1", {}, cut(2, 1, stage=0), cut(2, 2, stage=1), FP32),
    *(
        (f"automatic-zero{a}", {"automatic": True, "stage": a}, cut(2, 2), cut(1, 3), FP32)
        for a in (1, 3)
    ),
    ("cut-pipeline-2x1x2-to-1x2x2", {"stage": 1}, cut(2, 1, 2), cut(1, 2, 2), FP32),
    ("cpu-adam-zero2-to-zero3", COMPILED, ranks(2, 2), ranks(3, 3), FP32),
    ("cpu-adam-bf16-zero3", {**COMPILED, "precision": "bf16"}, ranks(3, 3), ranks(2, 3), BF16),
    ("fp16-static-zero2", {"precision": "fp16-static"}, ranks(3, 2), ranks(2, 2), FP16),
    ("fp16-static-zero0", {"precision": "fp16-static", **FUSED}, ranks(3, 0), ranks(2, 0), FP16),
]

LONG = [pytest.mark.campaign, pytest.mark.turns, pytest.mark.timeout(1800)]  # some compile first


@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    [
        *(pytest.param(*case[1:], id=case[0]) for case in CASES),
        *(pytest.param(*case[1:], id=case[0], marks=LONG) for case in MORE),
    ],
)
def test_a_resized_job_goes_on_as_the_uninterrupted_one(
    deepspeed_pool: WorkerPool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    model: Layout,
    before: Layout,
    after: Layout,
    tolerance: float,
) -> None:
    if "compiled" in {**model, **before, **after}:
        request.getfixturevalue("compiled_cpu_adam")
    old, new = (Job(**{**model, **layout}) for layout in (before, after))
    check(resize(deepspeed_pool, old, new, tmp_path), tolerance)


def check(result: Result, tolerance: float) -> None:
    print(f"largest relative difference of a loss: {result.largest_difference:.1e}")
    assert len(result.uninterrupted.losses) == len(result.resized.losses) > 0
    assert result.largest_difference <= tolerance
    assert result.resized.learning_rate == result.uninterrupted.learning_rate
    assert result.resized.skipped == result.uninterrupted.skipped
