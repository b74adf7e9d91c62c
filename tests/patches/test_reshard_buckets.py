"""Megatron's default form of a save, ``dp_reshardable`` by its fully parallel strategy, of every
kind of model: what is converted goes on as the run that never stopped."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.consistency import compare, verify
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.common_state import COMMON_OBJECT, FORM
from scalai.converters.megatron.dp_reshardable import is_bucket
from scalai.converters.megatron.modules import Naming, in_order, leading_axes, name_at
from scalai.converters.megatron.torch_dist_metadata import read_metadata
from scalai.launch import cli
from support.training.jobs import AFTER, Job
from support.training.megatron_layouts import (
    BF16,
    BUCKETS,
    DP2,
    EP2,
    EP2DP2,
    FP32,
    GATED,
    MOE,
    ONE,
    PP2,
    PP2DP2,
    PP2EP2,
    SPLIT,
    TP2,
    TP2DP2,
    TP2PP2,
)
from support.training.resharded import FLAT, FULL, check, convert, load, save
from support.training.worker_pool import WorkerPool

QK_NORM = {**BUCKETS, **GATED, "has_qk_norm": True, "precision": "bf16"}
SPARSE = {**SPLIT, "experts": 4, "is_gated": True, "is_rotary": True}
DENSE_FIRST = {**SPARSE, "has_expert_bias": True, "expert_layers": (0, 1, 1, 1)}
PREDICTING = {**SPLIT, "predicted": 1, "is_tied": False, "is_rotary": True}
T5 = {**SPLIT, "is_translator": True, "layers": 2}
FROZEN = r"embedding|layers\.[01]\.(mlp|self_attention)|linear_fc1\.bias"
PARTLY = r"input_layernorm|linear_fc1\.weight"

CASES = {
    "qk-norm-tp2dp2-to-pp2dp2": (QK_NORM, TP2DP2, PP2DP2, BF16),
    "dense-first-pp2ep2-to-one": (DENSE_FIRST, PP2EP2, ONE, FP32),
    "dense-first-one-to-ep2": (DENSE_FIRST, ONE, EP2, FP32),
    "dense-last-pp2ep2-to-pp2": ({**DENSE_FIRST, "expert_layers": (1, 1, 1, 0)}, PP2EP2, PP2, FP32),
    "experts-ep2dp2-to-pp2": ({**MOE, **BUCKETS}, EP2DP2, PP2, FP32),
    "predicting-pp2-to-tp2": (PREDICTING, PP2, TP2, FP32),
    "predicting-pp2dp2-to-one": ({**PREDICTING, "overlap": True}, PP2DP2, ONE, FP32),
    "predicting-experts-ep2-to-dp2": ({**PREDICTING, **SPARSE, "layers": 2}, EP2, DP2, FP32),
    "t5-dp2-to-tp2": (T5, DP2, TP2, FP32),
    "t5-tp2dp2-to-one": ({**T5, "overlap": True, "precision": "bf16"}, TP2DP2, ONE, BF16),
    "frozen-dp2-to-tp2": ({**SPLIT, "frozen": FROZEN}, DP2, TP2, FP32),
    "frozen-bf16-tp2pp2-to-dp2": (
        {**BUCKETS, "frozen": PARTLY, "precision": "bf16"}, TP2PP2, DP2, BF16,
    ),
}  # fmt: skip


def test_the_newest_form_of_a_default_save_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    """Norms of queries and keys are of one shape and, in 16 bits, of one content: that each gets
    its own moments rests on the order alone. And there is no common.pt."""
    old = Job(**{**QK_NORM, **DP2})
    runs = save(pool, old, tmp_path / "saved", FLAT, has_file=False)
    directory = tmp_path / "saved" / f"iter_{AFTER.start:07d}"
    keys = [stored.key for stored in read_metadata(directory).tensors]
    names = [
        Naming(is_local=True).to_rank(name_at(key, (0,) * leading_axes(key)), 0, 0)
        for key in keys
        if not is_bucket(key)
    ]
    assert names != sorted(names, key=in_order), "the keys stand in the order of the modules"
    assert open_checkpoint(tmp_path / "saved").values.extra[FORM] == COMMON_OBJECT
    new = Job(**{**QK_NORM, **TP2})
    convert(tmp_path / "saved", tmp_path / "converted", new)
    check(runs, load(pool, new, tmp_path / "converted"), BF16)


def test_dense_layers_and_biases_of_experts_go_on(pool: WorkerPool, tmp_path: Path) -> None:
    old, new = Job(**{**DENSE_FIRST, **EP2}), Job(**{**DENSE_FIRST, **PP2})
    runs = save(pool, old, tmp_path / "saved", FLAT)
    convert(tmp_path / "saved", tmp_path / "converted", new)
    check(runs, load(pool, new, tmp_path / "converted"), FP32)


@pytest.mark.campaign
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_model_goes_on(pool: WorkerPool, tmp_path: Path, case: str) -> None:
    model, before, after, tolerance = CASES[case]
    old, new = Job(**{**model, **before}), Job(**{**model, **after})
    runs = save(pool, old, tmp_path / "saved", FLAT)
    convert(tmp_path / "saved", tmp_path / "converted", new)
    check(runs, load(pool, new, tmp_path / "converted"), tolerance)


MUON: dict[str, Any] = {"optimizer": "muon"}
"""Plain Muon: for matrices, beside Adam for the rest; neither is split over ranks."""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    [
        (MUON, DP2, PP2, FP32),
        ({**MUON, "precision": "bf16"}, PP2, ONE, BF16),
    ],
    ids=["muon", "muon-bf16"],
)
def test_muon_goes_on(
    pool: WorkerPool,
    tmp_path: Path,
    model: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
    tolerance: float,
) -> None:
    old, new = Job(**{**model, **before}), Job(**{**model, **after})
    runs = save(pool, old, tmp_path / "saved", FULL)
    convert(tmp_path / "saved", tmp_path / "converted", new)
    saved, converted = (open_checkpoint(tmp_path / at) for at in ("saved", "converted"))
    assert list(compare(saved, converted, 1)) == []
    check(runs, load(pool, new, tmp_path / "converted"), tolerance)


@pytest.mark.campaign
def test_an_optimizer_that_counts_no_steps_gains_none(pool: WorkerPool, tmp_path: Path) -> None:
    """Megatron itself has no way to load what it saves of SGD in fp32."""
    old, new = Job(optimizer="sgd", **DP2), Job(optimizer="sgd", **TP2)
    save(pool, old, tmp_path / "saved", FULL)
    convert(tmp_path / "saved", tmp_path / "converted", new)
    saved, converted = (open_checkpoint(tmp_path / at) for at in ("saved", "converted"))
    assert list(compare(saved, converted, 1)) == []


@pytest.mark.campaign
def test_muon_of_shards_stays_at_its_tp(
    pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(pool, Job(**MUON, **DP2), tmp_path / "saved", FULL)
    with pytest.raises(SystemExit) as ended:
        cli.main(["reshard", str(tmp_path / "saved"), str(tmp_path / "new"), "--tp", "2"])
    assert ended.value.code == 3
    assert "tp=2 must stay 1: --muon-tp-mode blockwise" in capsys.readouterr().err


LATER = {
    name: Path(os.environ[name]) if name in os.environ else None
    for name in ("MEGATRON_LM_0_19_PATH", "MEGATRON_LM_MAIN_PATH")
}
"""Checkouts of releases that are no packages yet."""


@pytest.fixture(scope="module", params=LATER)
def later_pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Workers with a later megatron-core than the installed one."""
    checkout = LATER[request.param]
    if checkout is None or not (checkout / "megatron" / "core").is_dir():
        pytest.skip(f"{request.param} names no Megatron-LM checkout")
    workers = WorkerPool(4, checkout)
    yield workers
    workers.close()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "before", "after"),
    [({**BUCKETS, **GATED}, DP2, TP2), (DENSE_FIRST, PP2EP2, ONE)],
    ids=["dense", "experts"],
)
def test_a_later_release_saves_and_goes_on(
    later_pool: WorkerPool,
    tmp_path: Path,
    model: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    old, new = Job(**{**model, **before}), Job(**{**model, **after})
    runs = save(later_pool, old, tmp_path / "saved", FLAT)
    source = open_checkpoint(tmp_path / "saved")
    assert source.values.extra[FORM] == COMMON_OBJECT
    verify(source, 1)
    convert(tmp_path / "saved", tmp_path / "converted", new)
    check(runs, load(later_pool, new, tmp_path / "converted"), FP32)
