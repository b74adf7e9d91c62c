"""Every kind of optimizer that DeepSpeed has for fp16, bf16 and offloading is read and written."""

import re
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import RefusedError
from support.training.deepspeed_checks import (
    FP32,
    HALF,
    Reshard,
    cases,
    check,
    convert,
    differences,
    goes_on,
    read,
    reshards,
)
from support.training.deepspeed_jobs import Job, Runner, Saver

FP16 = {"precision": "fp16"}
STATIC = {"precision": "fp16-static"}
UNSCALED = {"precision": "fp16-unscaled"}
"""Without ZeRO, DeepSpeed 0.19.8 divides by a scale by which it has not multiplied."""
BF16 = {"precision": "bf16"}
BF16_OPTIMIZER = {"precision": "bf16-fp32"}
FUSED = {**FP16, "fused": True}
FUSED_UNSCALED = {**UNSCALED, "fused": True}
OFFLOADED = {
    "zero": {"offload_optimizer": {"device": "cpu"}},
    "config": {"zero_force_ds_cpu_optimizer": False},
}
ELASTIC: dict[str, Any] = {"zero": {"elastic_checkpoint": True}}

CASES = [
    ("fp16-stage-1-dp2-to-stage-3-dp3", FP16, (1, 2), (3, 3), HALF),
    ("bf16-optimizer-dp2-to-dp3", BF16_OPTIMIZER, (1, 2), (1, 3), HALF),
]
LONG_CASES = [
    ("static-fp16-stage-2-dp3-to-stage-1-dp2", STATIC, (2, 3), (1, 2), HALF),
    ("bf16-optimizer-dp2-to-stage-3-dp3", BF16_OPTIMIZER, (1, 2), (3, 3), HALF),
    ("stage-2-dp3-to-bf16-optimizer-dp2", BF16_OPTIMIZER, (2, 3), (1, 2), HALF),
    ("bf16-stage-0-dp2-to-stage-2-dp3", BF16, (0, 2), (2, 3), HALF),
    ("bf16-stage-2-dp3-to-stage-0-dp2", BF16, (2, 3), (0, 2), HALF),
    ("fp16-stage-0-dp2-to-stage-3-dp3", UNSCALED, (0, 2), (3, 3), HALF),
    ("fp16-stage-1-dp2-to-stage-0-dp1", UNSCALED, (1, 2), (0, 1), HALF),
    ("dynamic-fp16-stage-0-dp2-to-dp3", FP16, (0, 2), (0, 3), HALF),
    ("fused-fp16-stage-0-dp2-to-stage-2-dp3", FUSED_UNSCALED, (0, 2), (2, 3), HALF),
    ("fused-fp16-stage-0-dp2-to-dp1", FUSED, (0, 2), (0, 1), HALF),
    ("offloaded-stage-1-dp2-to-stage-3-dp3", OFFLOADED, (1, 2), (3, 3), FP32),
    ("offloaded-stage-3-dp3-to-stage-2-dp2", OFFLOADED, (3, 3), (2, 2), FP32),
]


@pytest.mark.parametrize("case", reshards(CASES, LONG_CASES))
def test_a_resharded_checkpoint_goes_on_as_the_run_that_never_stopped(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, case: Reshard
) -> None:
    goes_on(run_deepspeed, save, tmp_path, case)


ROUND_TRIPS = [
    ("fp16-stage-1", FP16, (1, 2), (3, 3)),
    ("bf16-optimizer", BF16_OPTIMIZER, (1, 2), (2, 3)),
]
LONG_ROUND_TRIPS = [
    ("fp32-stage-1", {}, (1, 2), (3, 4)),
    ("fp32-stage-3", {}, (3, 3), (1, 2)),
    ("static-fp16-stage-2", STATIC, (2, 3), (3, 1)),
    ("bf16-stage-0", BF16, (0, 2), (2, 3)),
    ("fp16-stage-0", FP16, (0, 2), (0, 3)),
    ("fused-fp16-stage-0", FUSED, (0, 2), (0, 3)),
    ("offloaded-stage-3", OFFLOADED, (3, 3), (2, 2)),
]


@pytest.mark.parametrize(
    ("model", "here", "there"),
    cases(ROUND_TRIPS, LONG_ROUND_TRIPS),
)
def test_there_and_back_again_is_what_deepspeed_wrote(
    save: Saver,
    tmp_path: Path,
    model: dict[str, Any],
    here: tuple[int, int],
    there: tuple[int, int],
) -> None:
    saved, _ = save(Job(stage=here[0], world=here[1], **model))
    convert(saved, tmp_path / "there", f"deepspeed_zero{there[0]}", there[1])
    convert(tmp_path / "there", tmp_path / "back", f"deepspeed_zero{here[0]}", here[1])
    files = sorted(path.name for path in (saved / "global_step3").glob("*.pt"))
    assert files == sorted(path.name for path in (tmp_path / "back/global_step3").glob("*.pt"))
    for name in files:
        theirs, ours = (read(root / "global_step3" / name) for root in (saved, tmp_path / "back"))
        if here[0] == 3:
            clear_padding(theirs, saved / "global_step3", name)
        assert list(differences(theirs, ours)) == []


def clear_padding(values: Any, tag: Path, name: str) -> None:
    """Write zeros behind a rank's part of each parameter, where stage 3 leaves what was there."""
    model = read(tag / name.replace("optim", "model"))
    rank, dp = int(name.split("_")[3]), model["dp_world_size"]

    def clear(flat: Any, at: int, numel: int, part: int) -> None:
        flat.data[at + min(max(numel - rank * part, 0), part) : at + part] = 0

    if "model" in name:
        for parameter, shape in values["frozen_param_shapes"].items():
            fragment = values["frozen_param_fragments"][parameter]
            clear(fragment, 0, shape.numel(), len(fragment))
        return
    optimizer = values["optimizer_state_dict"]
    for number, shapes in enumerate(model["param_shapes"]):
        kept = optimizer["optimizer_state_dict"]["state"][number]
        flats = optimizer["fp32_flat_groups"][number], kept["exp_avg"], kept["exp_avg_sq"]
        at = 0
        for shape in shapes.values():
            part = -(-shape.numel() // dp)
            for flat in flats:
                clear(flat, at, shape.numel(), part)
            at += part


@pytest.mark.campaign
def test_an_elastic_checkpoint_gets_its_groups_from_another(
    run_deepspeed: Runner, save: Saver, tmp_path: Path
) -> None:
    saved, uninterrupted = save(Job(stage=1, world=2, **ELASTIC))
    of_job, _ = save(Job(stage=1, world=2))
    reference = open_checkpoint(of_job).values
    convert(saved, tmp_path / "out", "deepspeed_zero3", 3, reference)
    after = run_deepspeed(Job(stage=3, world=3, load=str(tmp_path / "out")))
    check(uninterrupted, after, FP32)
    with pytest.raises(RefusedError, match=re.escape("Pass --args-from")):
        convert(saved, tmp_path / "none", "deepspeed_zero3", 3)


@pytest.mark.campaign
def test_an_elastic_checkpoint_remains_one_without_groups(
    run_deepspeed: Runner, save: Saver, tmp_path: Path
) -> None:
    saved, uninterrupted = save(Job(stage=1, world=2, **ELASTIC))
    convert(saved, tmp_path / "out", "deepspeed_zero2", 3)
    job = Job(stage=2, world=3, load=str(tmp_path / "out"), scheduled_rates=True, **ELASTIC)
    check(uninterrupted, run_deepspeed(job), FP32)
