"""Checkpoints of DeepSpeed's data-parallel jobs, of every stage and kind of optimizer, resharded:
loaded by DeepSpeed, training goes on."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.consistency import verify
from scalai.converters.layouts import open_checkpoint
from scalai.converters.source_files import read_steps
from scalai.core.errors import RefusedError
from support.checkpoints import lay_out
from support.training.deepspeed_checks import (
    FP32,
    HALF,
    cases,
    check,
    convert,
    differences,
    make_universal,
    read,
)
from support.training.deepspeed_jobs import SAVED_AFTER, Job, Runner, Saver

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
SMALL = {"zero": {"sub_group_size": 1000}}
ROUND = {"zero": {"round_robin_gradients": True}}
ALIGNED = {"zero": {"parameter_alignment": True}}
TRAINED = {"frozen": False}
"""Without ZeRO a file does not name what is trained: frozen parameters of equal shapes hide it."""
EMPTY = {"empty": True}
"""Stage 3 of DeepSpeed 0.19.8 ends where it gathers a parameter without elements."""
CPU_ADAM: dict[str, Any] = {"compiled": "DeepSpeedCPUAdam", "frozen": False}
"""DeepSpeed's own Adam for the CPU, which counts steps in whole numbers."""
COMPILED_OFFLOADED = {**CPU_ADAM, "zero": {"offload_optimizer": {"device": "cpu"}}}
COMPILES = [
    pytest.mark.campaign,
    pytest.mark.timeout(1800),  # the first one compiles, for some 50 s
    pytest.mark.skipif(
        not (shutil.which("g++") and shutil.which("ninja")), reason="g++ and ninja are needed"
    ),
]

CASES = [
    ("stage-1-dp2-to-dp3", {}, (1, 2), (1, 3), FP32),
    ("stage-1-dp2-to-stage-3-dp3", {}, (1, 2), (3, 3), FP32),
    ("stage-3-dp3-to-stage-2-dp2", {}, (3, 3), (2, 2), FP32),
    ("bf16-stage-3-dp2-to-stage-1-dp3", BF16, (3, 2), (1, 3), HALF),
    ("stage-0-dp2-to-stage-1-dp3", TRAINED, (0, 2), (1, 3), FP32),
    ("fp16-stage-1-dp2-to-stage-3-dp3", FP16, (1, 2), (3, 3), HALF),
    ("bf16-optimizer-dp2-to-dp3", BF16_OPTIMIZER, (1, 2), (1, 3), HALF),
]
LONG_CASES = [
    ("stage-1-dp2-to-stage-2-dp4", {}, (1, 2), (2, 4), FP32),
    ("stage-2-dp3-to-stage-1-dp1", {}, (2, 3), (1, 1), FP32),
    ("stage-3-dp3-to-dp4", {}, (3, 3), (3, 4), FP32),
    ("round-robin-stage-2-dp2-to-dp3", ROUND, (2, 2), (2, 3), FP32),
    ("aligned-stage-2-dp2-to-dp3", ALIGNED, (2, 2), (2, 3), FP32),
    ("bf16-stage-2-dp3-to-stage-1-dp2", BF16, (2, 3), (1, 2), HALF),
    ("sub-groups-stage-3-dp3-to-dp2", SMALL, (3, 3), (3, 2), FP32),
    ("no-elements-stage-1-dp2-to-stage-2-dp3", EMPTY, (1, 2), (2, 3), FP32),
    ("stage-3-dp3-to-stage-0-dp2", TRAINED, (3, 3), (0, 2), FP32),
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
COMPILED_CASES = [
    ("cpu-adam-stage-1-dp2-to-stage-2-dp3", CPU_ADAM, (1, 2), (2, 3), FP32),
    ("cpu-adam-stage-3-dp2-to-stage-1-dp3", CPU_ADAM, (3, 2), (1, 3), FP32),
    ("cpu-adam-stage-0-to-stage-1", CPU_ADAM, (0, 2), (1, 1), FP32),
    ("cpu-adam-offloaded-stage-2", COMPILED_OFFLOADED, (2, 2), (2, 3), FP32),
]


@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"),
    [
        *cases(CASES, LONG_CASES),
        *(pytest.param(*of, id=name, marks=COMPILES) for name, *of in COMPILED_CASES),
    ],
)
def test_a_resharded_checkpoint_goes_on_as_the_run_that_never_stopped(
    request: pytest.FixtureRequest, run_deepspeed: Runner, save: Saver, tmp_path: Path,
    model: dict[str, Any], before: tuple[int, int], after: tuple[int, int], tolerance: float,
) -> None:  # fmt: skip
    if "compiled" in model:
        request.getfixturevalue("compiled_cpu_adam")
    (stage, dp), (new_stage, new_dp) = before, after
    saved, uninterrupted = save(Job(stage=stage, world=dp, **model))
    convert(saved, tmp_path / "out", f"deepspeed_zero{new_stage}", new_dp)
    job = Job(stage=new_stage, world=new_dp, load=str(tmp_path / "out"), **model)
    is_same = (stage == 3) == (new_stage == 3)
    check(uninterrupted, run_deepspeed(job), tolerance, has_same_forward=is_same)


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
    [
        *cases(ROUND_TRIPS, LONG_ROUND_TRIPS),
        pytest.param(CPU_ADAM, (1, 2), (3, 3), id="cpu-adam-stage-1", marks=COMPILES),
    ],
)
def test_there_and_back_again_is_what_deepspeed_wrote(
    request: pytest.FixtureRequest, save: Saver, tmp_path: Path, model: dict[str, Any],
    here: tuple[int, int], there: tuple[int, int],
) -> None:  # fmt: skip
    if "compiled" in model:
        request.getfixturevalue("compiled_cpu_adam")
    saved, _ = save(Job(stage=here[0], world=here[1], **model))
    if model is CPU_ADAM:
        assert read_steps(open_checkpoint(saved)) == 3
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


LOAD = {"checkpoint": {"load_universal": True}}
PLAIN: dict[str, Any] = {"frozen": False, "decay": (0.1, 0.1)}
"""Without what DeepSpeed does not restore from universal checkpoints: frozen parameters, and in
stage 3 unequal groups."""

UNIVERSAL: list[tuple[Any, ...]] = [
    ("stage-3-dp3-to-stage-2-dp2", {}, (3, 3), (2, 2), FP32),
    ("stage-1-dp2-to-stage-3-dp2", {}, (1, 2), (3, 2), FP32),
]
LONG_UNIVERSAL = [
    ("stage-1-dp2-to-dp3", {}, (1, 2), (1, 3), FP32),
    ("bf16-optimizer-dp2-to-dp3", BF16_OPTIMIZER, (1, 2), (1, 3), HALF),
    ("fp16-stage-1-dp2-to-stage-3-dp3", FP16, (1, 2), (3, 3), HALF),
    ("bf16-stage-0-to-stage-2-dp2", BF16, (0, 1), (2, 2), HALF),
    ("fp32-stage-0-to-stage-1-dp2", {}, (0, 1), (1, 2), FP32),
]


@pytest.mark.parametrize(
    ("model", "before", "after", "tolerance"), cases(UNIVERSAL, LONG_UNIVERSAL)
)
def test_a_universal_checkpoint_goes_on_at_other_degrees_and_stages(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, model: dict[str, Any],
    before: tuple[int, int], after: tuple[int, int], tolerance: float,
) -> None:  # fmt: skip
    (stage, dp), (new_stage, new_dp) = before, after
    job = Job(stage=stage, world=dp, **PLAIN, **model)
    saved, uninterrupted = save(job)
    convert(saved, tmp_path / "out", "deepspeed_universal", new_dp)
    resumed = run_deepspeed(
        replace(
            job, stage=new_stage, world=new_dp, load=str(tmp_path / "out"), config=LOAD,
            separate_steps=new_stage == 3,
        )
    )  # fmt: skip
    is_same = (stage == 3) == (new_stage == 3)
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
    target = lay_out(source, "deepspeed_universal", dp=2)
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
