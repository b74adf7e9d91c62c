"""Universal checkpoints are written for every stage, and read as ds_to_universal writes them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.checkpoint import WriteOptions
from scalai.converters.consistency import verify
from scalai.converters.layouts import layout_named, open_checkpoint
from support.training.deepspeed_checks import FP32, HALF, cases, check, convert, make_universal
from support.training.deepspeed_jobs import SAVED_AFTER, Job, Runner, Saver

LOAD = {"checkpoint": {"load_universal": True}}
PLAIN: dict[str, Any] = {"frozen": False, "decay": (0.1, 0.1)}
"""Without what DeepSpeed does not restore: frozen parameters, and in stage 3 unequal groups."""

CASES: list[tuple[Any, ...]] = [
    ("stage-3-dp3-to-stage-2-dp2", {}, (3, 3), (2, 2), FP32),
    ("stage-1-dp2-to-stage-3-dp2", {}, (1, 2), (3, 2), FP32),
]
LONG_CASES = [
    ("stage-1-dp2-to-dp3", {}, (1, 2), (1, 3), FP32),
    ("bf16-optimizer-dp2-to-dp3", {"precision": "bf16-fp32"}, (1, 2), (1, 3), HALF),
    ("fp16-stage-1-dp2-to-stage-3-dp3", {"precision": "fp16"}, (1, 2), (3, 3), HALF),
    ("bf16-stage-0-to-stage-2-dp2", {"precision": "bf16"}, (0, 1), (2, 2), HALF),
    ("fp32-stage-0-to-stage-1-dp2", {}, (0, 1), (1, 2), FP32),
]


@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    cases(CASES, LONG_CASES),
)
def test_a_universal_checkpoint_goes_on_at_other_degrees_and_stages(
    run_deepspeed: Runner,
    save: Saver,
    tmp_path: Path,
    model: dict[str, Any],
    before: tuple[int, int],
    after: tuple[int, int],
    tolerance: float,
) -> None:
    job = Job(stage=before[0], world=before[1], **PLAIN, **model)
    saved, uninterrupted = save(job)
    convert(saved, tmp_path / "out", "deepspeed_universal", after[1])
    loaded = replace(
        job,
        stage=after[0],
        world=after[1],
        load=str(tmp_path / "out"),
        config=LOAD,
        separate_steps=after[0] == 3,
    )
    is_same = (before[0] == 3) == (after[0] == 3)
    resumed = run_deepspeed(loaded)
    check(uninterrupted, resumed, tolerance, has_module=False, has_same_forward=is_same)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("stage", "world", "flags"), [(3, 3, ()), (1, 2, ("--inject_missing_state",))]
)
def test_what_deepspeed_made_universal_is_read(
    save: Saver, tmp_path: Path, stage: int, world: int, flags: tuple[str, ...]
) -> None:
    saved, _ = save(Job(stage=stage, world=world))
    make_universal(saved, tmp_path / "universal", *flags)
    read = open_checkpoint(tmp_path / "universal")
    assert read.layout == "deepspeed_universal"
    assert verify(read, 1) == verify(open_checkpoint(saved), 1)


@pytest.mark.campaign
@pytest.mark.parametrize("is_ours", [False, True], ids=["by-ds-to-universal", "by-us"])
def test_stage_3_counts_the_steps_of_all_sub_groups_in_one_tensor(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, is_ours: bool
) -> None:
    """DeepSpeed's error (0.19.8), with its own files as with ours, and what repairs both."""
    job = Job(stage=3, world=3, **PLAIN)
    saved, uninterrupted = save(job)
    if is_ours:
        convert(saved, tmp_path, "deepspeed_universal", 3)
    else:
        make_universal(saved, tmp_path)
    loaded = replace(job, load=str(tmp_path), config=LOAD)
    wrong = run_deepspeed(loaded)[0]["losses"]
    expected = uninterrupted[0]["losses"][SAVED_AFTER:]
    assert wrong[0] == pytest.approx(expected[0], rel=FP32)
    assert wrong[-1] != pytest.approx(expected[-1], rel=1e-3)
    right = run_deepspeed(replace(loaded, separate_steps=True))
    check(uninterrupted, right, FP32, has_module=False)


@pytest.mark.campaign
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_engine_without_zero_loads_a_universal_checkpoint(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, precision: str
) -> None:
    """DeepSpeed's (0.19.8): a note says what such a job loads instead."""
    job = Job(stage=0, world=2, precision=precision, **PLAIN)
    saved, uninterrupted = save(job)
    source = open_checkpoint(saved)
    target = layout_named("deepspeed_universal").lay_out(source, WriteOptions({"dp": 2}))
    assert any("stage 0 write deepspeed_zero0" in note for note in target.notes)
    convert(saved, tmp_path / "universal", "deepspeed_universal", 2)
    with pytest.raises(AssertionError, match=r"NoneType|update_lp_params"):
        run_deepspeed(replace(job, load=str(tmp_path / "universal"), config=LOAD))
    convert(saved, tmp_path / "own", "deepspeed_zero0", 2)
    resumed = run_deepspeed(replace(job, load=str(tmp_path / "own")))
    check(uninterrupted, resumed, FP32 if precision == "fp32" else HALF)


@pytest.mark.campaign
def test_weights_alone_are_loaded_by_stage_3_from_its_own_layout(
    run_deepspeed: Runner, save: Saver, tmp_path: Path
) -> None:
    """DeepSpeed's (0.19.8): it asks for what a universal checkpoint was made of."""
    job = Job(stage=3, world=2, **PLAIN)
    saved, uninterrupted = save(job)
    convert(saved, tmp_path / "universal", "deepspeed_universal", 2)
    loaded = replace(job, load=str(tmp_path / "universal"), config=LOAD, weights_only=True)
    with pytest.raises(AssertionError, match="Unable to find 'latest' file"):
        run_deepspeed(loaded)
    convert(saved, tmp_path / "own", "deepspeed_zero3", 2)
    resumed = run_deepspeed(replace(job, load=str(tmp_path / "own"), weights_only=True))
    assert resumed[0]["losses"][0] == pytest.approx(uninterrupted[0]["losses"][SAVED_AFTER])
