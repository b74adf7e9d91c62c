"""Every layout to every other one, with each optimizer. Long: for the campaign."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from support.training.jobs import Job
from support.training.megatron_layouts import (
    BUCKETS,
    DP2,
    DP3,
    EP2,
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
    TP2,
    TP2DP2,
    TP2PP2,
    TP4,
    UNTIED,
    VPP2,
)
from support.training.resize_case import check, resize
from support.training.worker_pool import WorkerPool

pytestmark = pytest.mark.campaign

LAYOUTS = {
    "one": ONE,
    "dp2": DP2,
    "dp3": DP3,
    "tp2": TP2,
    "tp4": TP4,
    "pp2": PP2,
    "pp4": PP4,
    "vpp2": VPP2,
    "tp2pp2": TP2PP2,
}
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


@pytest.mark.parametrize(
    ("before", "after"), list(permutations((DP2, EP2, PP2), 2)), ids=lambda layout: str(layout)
)
def test_experts_move_between_ranks(
    pool: WorkerPool, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    old, new = (Job(**{**MOE, **BUCKETS, **layout}) for layout in (before, after))
    check(resize(pool, old, new, tmp_path), FP32)


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
