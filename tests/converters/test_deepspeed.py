"""A DeepSpeed checkpoint that was resharded is loaded by DeepSpeed, and training goes on."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed_jobs import SAVED_AFTER, STEPS, Job

from scalai.converters.checkpoint import WriteOptions
from scalai.converters.engine import Limits, reshard
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.converters.verify import verify
from scalai.core.errors import RefusedError

Runner = Callable[[Job], list[dict[str, Any]]]
Saver = Callable[[Job], tuple[Path, list[dict[str, Any]]]]

FP32 = 1e-6
BF16 = 1e-3
"""Gradients are rounded to bf16 and summed in another order at another degree; measured: up to
3.3e-4."""
LIMITS = Limits(memory_bytes=256 << 20, workers=1)

BF = {"precision": "bf16"}
SMALL = {"zero": {"sub_group_size": 1000}}
ROUND = {"zero": {"round_robin_gradients": True}}
TRAINED = {"frozen": False}
"""Without ZeRO a file does not name what is trained: frozen parameters of equal shapes hide it."""
ALIGNED = {"zero": {"parameter_alignment": True}}

CASES = [
    ("stage-1-dp2-to-dp3", {}, (1, 2), (1, 3), FP32),
    ("stage-1-dp2-to-stage-3-dp3", {}, (1, 2), (3, 3), FP32),
    ("stage-3-dp3-to-stage-2-dp2", {}, (3, 3), (2, 2), FP32),
    ("bf16-stage-3-dp2-to-stage-1-dp3", BF, (3, 2), (1, 3), BF16),
    ("stage-0-dp2-to-stage-1-dp3", TRAINED, (0, 2), (1, 3), FP32),
]
LONG_CASES = [
    ("stage-1-dp2-to-stage-2-dp3", {}, (1, 2), (2, 3), FP32),
    ("stage-2-dp3-to-stage-1-dp1", {}, (2, 3), (1, 1), FP32),
    ("round-robin-stage-2-dp2-to-dp3", ROUND, (2, 2), (2, 3), FP32),
    ("aligned-stage-2-dp2-to-dp3", ALIGNED, (2, 2), (2, 3), FP32),
    ("bf16-stage-2-dp3-to-stage-1-dp2", BF, (2, 3), (1, 2), BF16),
    ("sub-groups-stage-3-dp3-to-dp2", SMALL, (3, 3), (3, 2), FP32),
    ("stage-3-dp3-to-stage-0-dp2", TRAINED, (3, 3), (0, 2), FP32),
    ("bf16-stage-2-dp3-to-stage-0-dp2", {**BF, **TRAINED}, (2, 3), (0, 2), BF16),
    ("bf16-stage-0-dp2-to-stage-3-dp3", {**BF, **TRAINED}, (0, 2), (3, 3), BF16),
]
UNIVERSAL_CASES = [((3, 3), (2, 2)), ((1, 2), (1, 3))]


@pytest.fixture(scope="module")
def save(run_deepspeed: Runner, tmp_path_factory: pytest.TempPathFactory) -> Saver:
    """Train, save, train on; once for equal jobs."""
    done: dict[str, tuple[Path, list[dict[str, Any]]]] = {}

    def run(job: Job) -> tuple[Path, list[dict[str, Any]]]:
        if repr(job) not in done:
            directory = tmp_path_factory.mktemp("saved")
            done[repr(job)] = directory, run_deepspeed(replace(job, save=str(directory)))
        return done[repr(job)]

    return run


@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    [
        *(pytest.param(*values, id=name) for name, *values in CASES),
        *(
            pytest.param(*values, id=name, marks=pytest.mark.campaign)
            for name, *values in LONG_CASES
        ),
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
    saved, uninterrupted = save(Job(stage=before[0], world=before[1], **model))
    convert(saved, tmp_path / "out", f"deepspeed_zero{after[0]}", after[1])
    assert verify(open_checkpoint(saved), 1) == verify(open_checkpoint(tmp_path / "out"), 1)
    job = Job(stage=after[0], world=after[1], load=str(tmp_path / "out"), **model)
    check(uninterrupted, run_deepspeed(job), tolerance)


def convert(source: Path, destination: Path, layout: str, dp: int) -> None:
    checkpoint = open_checkpoint(source)
    target = layout_named(layout).lay_out(checkpoint, WriteOptions({"dp": dp}))
    reshard(checkpoint, target, destination, LIMITS)


def check(before: Any, after: Any, tolerance: float, *, has_buffers: bool = True) -> None:
    """Compare losses, rates, buffers, hyperparameters and what the client saved."""
    expected = before[0]["losses"][SAVED_AFTER:]
    losses = after[0]["losses"]
    difference = max(abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True))
    print(f"largest relative difference of a loss: {difference:.1e}")
    assert len(losses) == STEPS - SAVED_AFTER
    assert difference <= tolerance
    assert after[0]["rates"] == before[0]["rates"][SAVED_AFTER:]
    for rank in after:
        if has_buffers:
            assert rank["loaded"] == before[0]["saved"]
        assert rank["client_state"] == {"text": "kept", "n": 7}


@pytest.mark.campaign
def test_without_zero_ambiguous_names_are_refused(save: Saver) -> None:
    saved, _ = save(Job(stage=0, world=2))
    with pytest.raises(RefusedError, match="more than one assignment"):
        open_checkpoint(saved)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        UNIVERSAL_CASES[0],
        *(pytest.param(*case, marks=pytest.mark.campaign) for case in UNIVERSAL_CASES[1:]),
    ],
)
def test_a_universal_checkpoint_goes_on_at_other_degrees_and_stages(
    run_deepspeed: Runner,
    save: Saver,
    tmp_path: Path,
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    job = Job(stage=before[0], world=before[1], frozen=False, decay=(0.1, 0.1))
    saved, uninterrupted = save(job)
    convert(saved, tmp_path / "out", "deepspeed_universal", after[1])
    assert verify(open_checkpoint(saved), 1) == verify(open_checkpoint(tmp_path / "out"), 1)
    loaded = replace(
        job,
        stage=after[0],
        world=after[1],
        load=str(tmp_path / "out"),
        config={"checkpoint": {"load_universal": True}},
    )
    check(uninterrupted, run_deepspeed(loaded), FP32, has_buffers=False)


@pytest.mark.campaign
def test_what_deepspeed_made_universal_is_read(save: Saver, tmp_path: Path) -> None:
    saved, _ = save(Job(stage=3, world=3))
    universal = tmp_path / "universal" / "global_step3_universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(saved / "global_step3"), "--output_folder", str(universal)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run(command, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    read = open_checkpoint(tmp_path / "universal")
    assert read.layout == "deepspeed_universal"
    assert verify(read, 1) == verify(open_checkpoint(saved), 1)
