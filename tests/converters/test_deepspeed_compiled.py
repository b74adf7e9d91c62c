"""DeepSpeed's own optimizers, which count steps in whole numbers. They are compiled when they are
first used, for some 50 s each, so this is for the campaign."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from deepspeed_checks import FP32, HALF, check, convert, goes_on
from deepspeed_jobs import Job, Runner, Saver
from test_deepspeed_precision import differences, read

from scalai.converters.layouts import open_checkpoint
from scalai.converters.scalars import read_steps

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(
        not (shutil.which("g++") and shutil.which("ninja")), reason="g++ and ninja are needed"
    ),
]

CPU_ADAM: dict[str, Any] = {"compiled": "DeepSpeedCPUAdam", "frozen": False}
OFFLOADED = {**CPU_ADAM, "zero": {"offload_optimizer": {"device": "cpu"}}}
FUSED: dict[str, Any] = {"compiled": "FusedAdam", "frozen": False}
FUSED_FP16 = {**FUSED, "precision": "fp16-unscaled"}


@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    [
        pytest.param(CPU_ADAM, (1, 2), (2, 3), FP32, id="cpu-adam-stage-1-dp2-to-stage-2-dp3"),
        pytest.param(CPU_ADAM, (3, 2), (1, 3), FP32, id="cpu-adam-stage-3-dp2-to-stage-1-dp3"),
        pytest.param(CPU_ADAM, (0, 2), (1, 1), FP32, id="cpu-adam-stage-0-to-stage-1"),
        pytest.param(OFFLOADED, (2, 2), (2, 3), FP32, id="cpu-adam-offloaded-stage-2"),
        pytest.param(FUSED, (1, 2), (2, 3), FP32, id="fused-adam-stage-1-dp2-to-stage-2-dp3"),
        pytest.param(FUSED, (0, 2), (1, 3), FP32, id="fused-adam-stage-0-to-stage-1"),
        pytest.param(FUSED, (1, 2), (0, 2), FP32, id="fused-adam-stage-1-to-stage-0"),
        pytest.param(FUSED, (3, 2), (3, 3), FP32, id="fused-adam-stage-3-dp2-to-dp3"),
        pytest.param(FUSED_FP16, (0, 2), (1, 2), HALF, id="fused-adam-fp16-stage-0-to-stage-1"),
    ],
)
def test_a_resharded_checkpoint_goes_on_as_the_run_that_never_stopped(
    run_deepspeed: Runner,
    save: Saver,
    tmp_path: Path,
    model: dict[str, Any],
    before: tuple[int, int],
    after: tuple[int, int],
    tolerance: float,
) -> None:
    goes_on(run_deepspeed, save, tmp_path, model, before, after, tolerance)


@pytest.mark.parametrize("model", [CPU_ADAM, FUSED], ids=["cpu-adam", "fused-adam"])
def test_there_and_back_again_is_what_deepspeed_wrote(
    save: Saver, tmp_path: Path, model: dict[str, Any]
) -> None:
    saved, _ = save(Job(stage=1, world=2, **model))
    assert read_steps(open_checkpoint(saved)) == 3
    convert(saved, tmp_path / "there", "deepspeed_zero3", 3)
    convert(tmp_path / "there", tmp_path / "back", "deepspeed_zero1", 2)
    tags = saved / "global_step3", tmp_path / "back" / "global_step3"
    for file in sorted(path.name for path in tags[0].glob("*.pt")):
        assert list(differences(*(read(tag / file) for tag in tags))) == []


def test_an_elastic_checkpoint_of_its_own_optimizer_goes_on(
    run_deepspeed: Runner, save: Saver, tmp_path: Path
) -> None:
    model = {**FUSED, "zero": {"elastic_checkpoint": True}}
    saved, uninterrupted = save(Job(stage=1, world=2, **model))
    convert(saved, tmp_path / "out", "deepspeed_zero2", 3)
    after = Job(stage=2, world=3, load=str(tmp_path / "out"), scheduled_rates=True, **model)
    check(uninterrupted, run_deepspeed(after), FP32)
