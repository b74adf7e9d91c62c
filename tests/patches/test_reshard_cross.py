"""Offline conversions of every layout into every other, and of an older megatron-core's form. Long:
for the campaign."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from support.training.jobs import Job
from support.training.megatron_layouts import (
    BF16,
    BUCKETS,
    DP2,
    DP3,
    EP2,
    EP4,
    FP32,
    GATED,
    MOE,
    ONE,
    PP2,
    PP2DP2,
    SIX,
    SPLIT,
    TEXT,
    TP2,
    TP2DP2,
    TP2PP2,
    TP4,
    VPP2,
)
from support.training.resharded import FLAT, FULL, WHOLE, check, convert, load, save
from support.training.worker_pool import WorkerPool

pytestmark = pytest.mark.campaign

LAYOUTS = {
    "one": ONE, "dp2": DP2, "dp3": DP3, "tp2": TP2, "tp4": TP4, "pp2": PP2, "vpp2": VPP2,
    "tp2dp2": TP2DP2, "pp2dp2": PP2DP2, "tp2pp2": TP2PP2,
}  # fmt: skip
FORMS = {"whole": ({}, WHOLE), "full": (SPLIT, FULL), "flat": (BUCKETS, FLAT)}


PAIRS = [
    (before, after, [*FORMS][(here + there) % len(FORMS)])
    for (here, before), (there, after) in permutations(enumerate(LAYOUTS), 2)
]
"""The forms change, so that each is read of every layout, and goes on in every layout."""


@pytest.mark.turns
@pytest.mark.parametrize(("before", "after", "form"), PAIRS)
def test_every_layout_into_every_other(
    pool: WorkerPool, tmp_path: Path, before: str, after: str, form: str
) -> None:
    model, sharding = FORMS[form]
    old = Job(**{**SIX, **model, **LAYOUTS[before]})
    new = Job(**{**SIX, **model, **LAYOUTS[after]})
    if new.vpp or old.vpp:  # micro-batches must be a multiple of the stages
        old, new = (Job(**{**model, **LAYOUTS[at]}) for at in (before, after))
        if "dp3" in (before, after):
            pytest.skip("four samples do not divide by three replicas")
    runs = save(pool, old, tmp_path / "saved", sharding)
    convert(tmp_path / "saved", tmp_path / "converted", new)
    check(runs, load(pool, new, tmp_path / "converted"), FP32)


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ({**TEXT, **SPLIT}, TP2, PP2),
        ({**TEXT, **BUCKETS}, PP2, TP2),
        ({**GATED, **BUCKETS}, TP2PP2, DP2),
        ({**MOE, **BUCKETS}, EP2, ONE),
        ({**MOE, **BUCKETS}, ONE, EP2),
        ({**MOE, **SPLIT}, PP2, EP2),
        ({**MOE, **BUCKETS}, ONE, EP4),
        ({**MOE, **BUCKETS}, EP4, {**DP2}),
        ({**MOE, **SPLIT}, EP4, {**EP2, "world": 4}),
        ({**MOE, **SPLIT}, {**EP2, "world": 4}, EP4),
        ({**BUCKETS, "is_tied": False}, TP2PP2, TP4),
        ({**BUCKETS, "predicted": 1}, DP2, TP2),
        ({**SPLIT, "predicted": 1}, TP2, DP2),
    ],
)
def test_models_that_are_cut_in_their_own_way(
    pool: WorkerPool,
    tmp_path: Path,
    model: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    old, new = Job(**{**model, **before}), Job(**{**model, **after})
    runs = save(pool, old, tmp_path / "saved", FLAT)
    convert(tmp_path / "saved", tmp_path / "converted", new)
    check(runs, load(pool, new, tmp_path / "converted"), FP32)


@pytest.fixture(scope="module")
def pool_of_eight() -> Iterator[WorkerPool]:
    workers = WorkerPool(8)
    yield workers
    workers.close()


def test_eight_ranks_become_eight_others(pool_of_eight: WorkerPool, tmp_path: Path) -> None:
    old = Job(**{**BUCKETS, "world": 8, "tp": 2, "pp": 2})
    new = Job(**{**BUCKETS, "world": 8, "tp": 2, "pp": 1})
    runs = save(pool_of_eight, old, tmp_path / "saved", FLAT)
    convert(tmp_path / "saved", tmp_path / "converted", new)
    check(runs, load(pool_of_eight, new, tmp_path / "converted"), FP32)


@pytest.fixture(scope="module")
def older_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Workers with the last megatron-core that saves ``fully_sharded_model_space``."""
    directory = tmp_path_factory.mktemp("megatron-core")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--target", str(directory), "megatron-core==0.15.0"]
    subprocess.run(command, check=True, timeout=240)
    workers = WorkerPool(4, directory)
    yield workers
    workers.close()


@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    [
        (SPLIT, DP2, TP2, FP32),
        ({**SPLIT, **GATED, "precision": "bf16"}, TP2DP2, PP2, BF16),
        ({**SPLIT, **MOE}, EP2, DP2, FP32),
    ],
)
def test_flat_ranges_of_an_older_megatron_core_go_on_in_the_installed_one(
    older_pool: WorkerPool,
    pool: WorkerPool,
    tmp_path: Path,
    model: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
    tolerance: float,
) -> None:
    old, new = Job(**{**model, **before}), Job(**{**model, **after})
    runs = save(older_pool, old, tmp_path / "saved", "fully_sharded_model_space")
    convert(tmp_path / "saved", tmp_path / "converted", new)
    check(runs, load(pool, new, tmp_path / "converted"), tolerance)
