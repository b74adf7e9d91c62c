"""Trainings go on from Megatron-FSDP's checkpoints in Megatron's other layouts, and back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.checkpoint import Checkpoint
from scalai.converters.consistency import compare, verify
from scalai.converters.dcp_metadata import read_metadata
from scalai.converters.layouts import open_checkpoint
from scalai.converters.sense import find_nonsense
from scalai.core.errors import RefusedError
from support.checkpoints import GPT_GROUPS, gpt, lay_out, write
from support.training import resharded
from support.training.jobs import AFTER, Job
from support.training.resharded import LEGACY, WHOLE, check, convert
from support.training.worker_pool import WorkerPool

SIZES: dict[str, Any] = {"layers": 2, "distributed": True}


@pytest.mark.parametrize(
    ("fsdp", "other", "layout", "tolerance"),
    [
        (Job(2, is_fsdp=True, is_gated=True, **SIZES), Job(2, tp=2, is_gated=True, **SIZES),
         "torch_dist", 1e-6),
        pytest.param(
            Job(is_fsdp=True, experts=4, is_gated=True, is_tied=False, **SIZES),
            Job(2, ep=2, experts=4, is_gated=True, is_tied=False, **SIZES),
            "torch_dist", 1e-6, marks=pytest.mark.campaign,
        ),
        pytest.param(
            Job(2, ep=2, is_fsdp=True, experts=4, is_gated=True, **SIZES),
            Job(1, experts=4, is_gated=True, **SIZES),
            "torch_dist", 1e-6, marks=pytest.mark.campaign,
        ),
        pytest.param(
            Job(2, tp=2, is_fsdp=True, is_gated=True, **SIZES), Job(1, is_gated=True, **SIZES),
            "torch", 1e-6, marks=pytest.mark.campaign,
        ),
        pytest.param(
            Job(is_fsdp=True, is_gated=True, is_rotary=True, precision="bf16", **SIZES),
            Job(2, pp=2, is_gated=True, is_rotary=True, precision="bf16", **SIZES),
            "torch", 1e-4, marks=pytest.mark.campaign,
        ),
    ],
)  # fmt: skip
def test_a_training_leaves_megatron_fsdp_and_comes_back(
    pool: WorkerPool, tmp_path: Path, fsdp: Job, other: Job, layout: str, tolerance: float
) -> None:
    pytest.importorskip("einops")  # comes with DeepSpeed
    there, here = tmp_path / "fsdp" / f"iter_{AFTER.start:07d}", tmp_path / "other"
    before = pool.run("megatron_fsdp:train_save_train", [(fsdp, str(there))] * fsdp.world)
    source = open_checkpoint(there)
    assert source.layout == "fsdp_dtensor"
    assert list(find_nonsense(source)) == []
    verify(source, 0)
    convert(there, here, other, layout)
    assert list(compare(source, open_checkpoint(here), 0)) == []
    check(before, resharded.load(pool, other, here, layout), tolerance)

    sharding = LEGACY if layout == LEGACY else WHOLE
    before = resharded.save(pool, other, tmp_path / "saved", sharding)
    back = tmp_path / "back"
    convert(tmp_path / "saved", back, fsdp, "fsdp_dtensor")
    iteration = back / f"iter_{AFTER.start:07d}"
    after = pool.run("megatron_fsdp:load_train", [(fsdp, str(iteration))] * fsdp.world)
    check(before, after, tolerance)


def with_values(**values: Any) -> Checkpoint:
    source = gpt()
    return replace(source, values=replace(source.values, **values))


def test_what_has_no_place_is_refused_or_told() -> None:
    with pytest.raises(RefusedError, match="Give --pp 1"):
        lay_out(gpt(), "fsdp_dtensor", pp=2)
    with pytest.raises(RefusedError, match="keeps no betas and eps"):
        lay_out(with_values(param_groups=({"lr": 0.1},)), "fsdp_dtensor")
    notes = lay_out(with_values(grad_scaler={"scale": 8.0}), "fsdp_dtensor").notes
    assert "left out: grad_scaler, for which Megatron-FSDP keeps no place" in notes


def test_steps_are_counted_where_the_optimizer_counts_them(tmp_path: Path) -> None:
    fused = tuple({**group, "bias_correction": True} for group in GPT_GROUPS)
    for name, groups in (("torch", GPT_GROUPS), ("fused", fused)):
        made = write(tmp_path / name, "fsdp_dtensor", with_values(param_groups=groups), dp=2)
        keys = read_metadata(made.directory)
        assert any(stored.key.endswith(".step") for stored in keys.tensors) == (name == "torch")
        assert any(key.endswith("weight.step") for key in keys.objects) == (name == "fused")
        assert list(compare(gpt(), made, 0)) == []
