"""DeepSpeed's own Adam for the CPU, which counts steps in whole numbers. It is compiled when it is
first used, for some 50 s, so this is for the campaign."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.layouts import open_checkpoint
from scalai.converters.source_files import read_steps
from support.training.deepspeed_checks import (
    FP32,
    Reshard,
    convert,
    differences,
    goes_on,
    read,
    reshards,
)
from support.training.deepspeed_jobs import Job, Runner, Saver

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(1800),  # the first one compiles
    pytest.mark.usefixtures("compiled_cpu_adam"),
    pytest.mark.skipif(
        not (shutil.which("g++") and shutil.which("ninja")), reason="g++ and ninja are needed"
    ),
]

CPU_ADAM: dict[str, Any] = {"compiled": "DeepSpeedCPUAdam", "frozen": False}
OFFLOADED = {**CPU_ADAM, "zero": {"offload_optimizer": {"device": "cpu"}}}

CASES = [
    ("cpu-adam-stage-1-dp2-to-stage-2-dp3", CPU_ADAM, (1, 2), (2, 3), FP32),
    ("cpu-adam-stage-3-dp2-to-stage-1-dp3", CPU_ADAM, (3, 2), (1, 3), FP32),
    ("cpu-adam-stage-0-to-stage-1", CPU_ADAM, (0, 2), (1, 1), FP32),
    ("cpu-adam-offloaded-stage-2", OFFLOADED, (2, 2), (2, 3), FP32),
]


@pytest.mark.parametrize("case", reshards(CASES, ()))
def test_a_resharded_checkpoint_goes_on_as_the_run_that_never_stopped(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, case: Reshard
) -> None:
    goes_on(run_deepspeed, save, tmp_path, case)


def test_there_and_back_again_is_what_deepspeed_wrote(save: Saver, tmp_path: Path) -> None:
    saved, _ = save(Job(stage=1, world=2, **CPU_ADAM))
    assert read_steps(open_checkpoint(saved)) == 3
    convert(saved, tmp_path / "there", "deepspeed_zero3", 3)
    convert(tmp_path / "there", tmp_path / "back", "deepspeed_zero1", 2)
    tags = saved / "global_step3", tmp_path / "back" / "global_step3"
    for file in sorted(path.name for path in tags[0].glob("*.pt")):
        assert list(differences(*(read(tag / file) for tag in tags))) == []
