"""A DeepSpeed checkpoint that was resharded is loaded by DeepSpeed, and training goes on."""

from pathlib import Path

import pytest

from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import RefusedError
from support.training.deepspeed_checks import FP32, HALF, Reshard, check, convert, goes_on, reshards
from support.training.deepspeed_jobs import Job, Runner, Saver

BF = {"precision": "bf16"}
SMALL = {"zero": {"sub_group_size": 1000}}
ROUND = {"zero": {"round_robin_gradients": True}}
TRAINED = {"frozen": False}
"""Without ZeRO a file does not name what is trained: frozen parameters of equal shapes hide it."""
ALIGNED = {"zero": {"parameter_alignment": True}}

EMPTY = {"empty": True}
"""Stage 3 of DeepSpeed 0.19.8 ends where it gathers a parameter without elements."""

CASES = [
    ("stage-1-dp2-to-dp3", {}, (1, 2), (1, 3), FP32),
    ("stage-1-dp2-to-stage-3-dp3", {}, (1, 2), (3, 3), FP32),
    ("stage-3-dp3-to-stage-2-dp2", {}, (3, 3), (2, 2), FP32),
    ("bf16-stage-3-dp2-to-stage-1-dp3", BF, (3, 2), (1, 3), HALF),
    ("stage-0-dp2-to-stage-1-dp3", TRAINED, (0, 2), (1, 3), FP32),
]
LONG_CASES = [
    ("stage-1-dp2-to-stage-2-dp4", {}, (1, 2), (2, 4), FP32),
    ("stage-2-dp3-to-stage-1-dp1", {}, (2, 3), (1, 1), FP32),
    ("stage-3-dp3-to-dp4", {}, (3, 3), (3, 4), FP32),
    ("round-robin-stage-2-dp2-to-dp3", ROUND, (2, 2), (2, 3), FP32),
    ("aligned-stage-2-dp2-to-dp3", ALIGNED, (2, 2), (2, 3), FP32),
    ("bf16-stage-2-dp3-to-stage-1-dp2", BF, (2, 3), (1, 2), HALF),
    ("sub-groups-stage-3-dp3-to-dp2", SMALL, (3, 3), (3, 2), FP32),
    ("no-elements-stage-1-dp2-to-stage-2-dp3", EMPTY, (1, 2), (2, 3), FP32),
    ("stage-3-dp3-to-stage-0-dp2", TRAINED, (3, 3), (0, 2), FP32),
]


@pytest.mark.parametrize("case", reshards(CASES, LONG_CASES))
def test_a_resharded_checkpoint_goes_on_as_the_run_that_never_stopped(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, case: Reshard
) -> None:
    goes_on(run_deepspeed, save, tmp_path, case)


CHAIN = [(2, 4), (3, 1), (1, 3), (3, 4)]


def test_a_chain_of_stages_and_degrees_loses_nothing(
    run_deepspeed: Runner, save: Saver, tmp_path: Path
) -> None:
    source, uninterrupted = save(Job(stage=1, world=2))
    for number, (stage, dp) in enumerate(CHAIN):
        convert(source, tmp_path / str(number), f"deepspeed_zero{stage}", dp)
        source = tmp_path / str(number)
    stage, dp = CHAIN[-1]
    check(uninterrupted, run_deepspeed(Job(stage=stage, world=dp, load=str(source))), FP32)


@pytest.mark.campaign
def test_without_zero_and_masters_ambiguous_names_are_refused(save: Saver) -> None:
    saved, _ = save(Job(stage=0, world=2))
    with pytest.raises(RefusedError, match="more than one assignment"):
        open_checkpoint(saved)
