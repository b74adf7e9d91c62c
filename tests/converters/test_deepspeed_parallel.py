"""DeepSpeed checkpoints of pipelines and of tensor-parallel ranks, at other degrees."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scalai.converters.checkpoint import Checkpoint, ReadOptions
from scalai.converters.consistency import check_samples, verify
from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import ProofError, RefusedError
from support.checkpoints import carry, lay_out
from support.command import run
from support.damage import Damage
from support.training.deepspeed_checks import FP32, HALF, LIMITS, cases, check, make_universal
from support.training.deepspeed_jobs import INFO, Job, Runner, Saver

CUTS = r"""
[[cut]]
parameters = '.*\.gate_up'
dimension = 0
parts = 2

[[cut]]
parameters = '.*\d\.bias'
dimension = 0

[[cut]]
parameters = '.*\.down'
dimension = 1

[[cut]]
parameters = '.*norm\..*|.*down_bias|.*embed.*|\d+\.(weight|places)'
"""
PIPE_INFO = {**INFO, "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed"]}


def at(tp: int = 0, pp: int = 0, dp: int = 1, **more: Any) -> Job:
    return Job(world=max(tp, 1) * max(pp, 1) * dp, tp=tp, pp=pp, **more)


AUTO: dict[str, Any] = {"automatic": True, "info": {}}
MIXED: dict[str, Any] = {"precision": "bf16-fp32"}
UNTIED: dict[str, Any] = {"tied": False}
FP16: dict[str, Any] = {
    "precision": "fp16-unscaled",
    "config": {"gradient_clipping": 0.0},
    **UNTIED,
}
NO_CLIP: dict[str, Any] = {"config": {"gradient_clipping": 0.0}, **UNTIED}
"""Without ZeRO DeepSpeed's clipping leaves out parameters of later stages that are not cut."""

CASES = [
    ("tp2-pp2-to-dp2", at(tp=2, pp=2, info=PIPE_INFO), at(pp=1, dp=2)),
    ("stage-3-tp2-to-stage-1-dp3", at(tp=2, stage=3), at(tp=1, dp=3)),
]
LONG_CASES = [
    ("pp1-to-pp3", at(pp=1), at(pp=3)),
    ("untied-pp2-dp2-to-pp3", at(pp=2, dp=2, **UNTIED), at(pp=3, **UNTIED)),
    ("by-type-pp1-to-pp3", at(pp=1, partition="type:block"), at(pp=3, partition="type:block")),
    ("stage-1-pp2-dp2-to-stage-0-pp1", at(pp=2, dp=2), at(pp=1, stage=0)),
    ("uniform-pp3-to-pp2", at(pp=3, partition="uniform"), at(pp=2, partition="uniform")),
    ("stage-0-tp2-pp2-to-stage-1-pp1", at(tp=2, pp=2, stage=0, **NO_CLIP), at(pp=1, **NO_CLIP)),
    ("pp1-to-tp2-pp2", at(pp=1), at(tp=2, pp=2)),
    ("tp1-dp2-to-stage-2-tp2", at(tp=1, dp=2), at(tp=2, stage=2)),
    ("tp2-dp2-to-stage-3-tp4", at(tp=2, dp=2, info=INFO), at(tp=4, stage=3)),
    ("stage-2-tp2-to-stage-0-tp1", at(tp=2, stage=2, info=INFO), at(tp=1, stage=0)),
    ("autotp-tp2-to-dp2", at(tp=2, **AUTO), at(tp=1, dp=2, **AUTO)),
    ("stage-3-autotp-tp2-to-tp3", at(tp=2, stage=3, **AUTO), at(tp=3, stage=1, **AUTO)),
    ("bf16-optimizer-pp2-to-dp2", at(pp=2, **MIXED), at(pp=1, dp=2, **MIXED)),
    ("fp16-stage-0-pp2-to-pp1", at(pp=2, stage=0, **FP16), at(pp=1, stage=0, **FP16)),
]


@pytest.mark.parametrize(
    ("before", "after"),
    cases(CASES, LONG_CASES),
)
def test_a_resharded_checkpoint_goes_on_as_the_run_that_never_stopped(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, before: Job, after: Job
) -> None:
    saved, uninterrupted = save(before)
    cuts = cuts_file(tmp_path, before, after)
    convert(saved, tmp_path / "out", f"deepspeed_zero{after.stage}", after, cuts)
    assert prints(tmp_path / "out", cuts) == prints(saved, cuts)
    resumed = run_deepspeed(replace(after, load=str(tmp_path / "out")))
    tolerance = FP32 if after.precision == "fp32" else HALF
    check(uninterrupted, resumed, tolerance, has_module=False)
    assert buffers(resumed, "loaded") == buffers(uninterrupted, "saved")


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("before", "after"),
    [(at(tp=2, pp=2, info=PIPE_INFO), at(pp=1, dp=2)), (at(tp=2, stage=3), at(tp=4, stage=2))],
    ids=["tp2-pp2-to-dp2", "stage-3-tp2-to-stage-2-tp4"],
)
def test_a_universal_checkpoint_goes_on_at_other_degrees(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, before: Job, after: Job
) -> None:
    saved, uninterrupted = save(before)
    cuts = cuts_file(tmp_path, before)
    convert(saved, tmp_path / "out", "deepspeed_universal", after, cuts)
    if not before.pp:
        assert prints(tmp_path / "out", cuts) == prints(saved, cuts)
    config = {"checkpoint": {"load_universal": True}}
    resumed = run_deepspeed(replace(after, load=str(tmp_path / "out"), config=config))
    check(uninterrupted, resumed, FP32, has_module=False)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "job",
    [
        at(tp=2, pp=2, info=PIPE_INFO, has_buffer=False),
        at(tp=2, dp=2, info=INFO),
    ],
    ids=["tp2-pp2", "tp2-dp2"],
)
def test_what_deepspeed_made_universal_is_read(save: Saver, tmp_path: Path, job: Job) -> None:
    saved, _ = save(job)
    make_universal(saved, tmp_path)
    assert prints(tmp_path) == prints(saved)


@pytest.mark.campaign
def test_padding_that_deepspeed_cut_off_is_zero(save: Saver, tmp_path: Path) -> None:
    words = {"vocabulary_parameter_patterns": [r".*embed.*weight"], "original_vocab_size": 28}
    saved, _ = save(at(tp=2, info=INFO | words))
    make_universal(saved, tmp_path)
    found = open_checkpoint(tmp_path)
    assert any("cut 3 rows of padding off embedding.weight" in note for note in found.notes)
    expected = prints(saved)
    differing = {name for name, value in verify(found, 1).items() if value != expected[name]}
    assert differing == {f"{kind}/embedding.weight" for kind in ("param", "exp_avg", "exp_avg_sq")}


@pytest.fixture(scope="module")
def grid(save: Saver) -> Path:
    """A checkpoint of 2 stages of 2 tensor-parallel ranks, which says how it is cut."""
    return save(at(tp=2, pp=2, info=PIPE_INFO))[0]


def remove(pattern: str) -> Damage:
    def damage(tag: Path) -> None:
        for path in tag.glob(pattern):
            path.unlink()

    return damage


def mix_stages(tag: Path) -> None:
    name = "mp_rank_03_model_states.pt"
    shutil.copy(tag.parent / "global_step6" / name, tag / name)


def forget_the_cuts(tag: Path) -> None:
    for path in tag.glob("mp_rank_*"):
        state = torch.load(path, weights_only=False)  # this test's own DeepSpeed wrote it
        del state["universal_checkpoint_info"]
        torch.save(state, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove("layer_02-model_01*"), r"rank 1 has not those of rank 0 \(layers \[2\]\)"),
        (remove("*mp_rank_01*"), "no file of model-parallel rank 1"),
        (remove("layer_*"), "a pipeline engine whose layer_.* are missing"),
        (mix_stages, r"mp_rank_03_model_states\.pt is of step 6"),
        (forget_the_cuts, r"nothing says .* cut .*tied_modules\.embed\.weight"),
    ],
    ids=["layer", "rank", "layers", "stages", "cuts"],
)
def test_damaged_grids_are_refused(grid: Path, tmp_path: Path, damage: Damage, words: str) -> None:
    shutil.copytree(grid, tmp_path / "damaged")
    damage(tmp_path / "damaged" / "global_step3")
    with pytest.raises(RefusedError, match=words):
        open_checkpoint(tmp_path / "damaged")


def test_another_checkpoint_says_stages_and_cuts(grid: Path, tmp_path: Path) -> None:
    convert(grid, tmp_path / "one", "deepspeed_zero1", at(pp=1), None)
    forget_the_cuts(tmp_path / "one" / "global_step3")
    source = open_checkpoint(tmp_path / "one")
    with pytest.raises(RefusedError, match="nothing says"):
        lay_out(source, "deepspeed_zero1", tp=2, pp=2)
    of_grid: dict[str, Any] = {"tp": 2, "pp": 2, "reference": open_checkpoint(grid).values}
    notes = lay_out(source, "deepspeed_zero1", **of_grid).notes
    assert any("the checkpoint of --args-from" in note for note in notes)
    carry(source, tmp_path / "two", "deepspeed_zero1", **of_grid)
    assert prints(tmp_path / "two", cuts_file(tmp_path, at())) == prints(grid)


def test_copies_that_differ_are_refused(grid: Path, tmp_path: Path) -> None:
    shutil.copytree(grid, tmp_path / "damaged")
    path = tmp_path / "damaged" / "global_step3" / "layer_01-model_01-model_states.pt"
    state = torch.load(path, weights_only=False)  # this test's own DeepSpeed wrote it
    state["norm.weight"][3] += 1
    torch.save(state, path)
    with pytest.raises(ProofError, match=r"param/1\.norm\.weight\[3:4\]: 1 elements differ"):
        check_samples(open_checkpoint(tmp_path / "damaged"))


@pytest.mark.campaign
def test_what_deepspeed_does_not_keep_or_load_of_pipelines_is_refused(
    save: Saver, tmp_path: Path
) -> None:
    saved, _ = save(at(pp=2, dp=2))
    convert(saved, tmp_path / "universal", "deepspeed_universal", at(), None)
    with pytest.raises(RefusedError, match=r"with buffers .* Convert the checkpoint that it was"):
        open_checkpoint(tmp_path / "universal")
    bf16 = {"precision": "bf16", **UNTIED}
    plain, _ = save(at(pp=2, stage=0, **bf16))
    with pytest.raises(RefusedError, match=r"bf16 pipeline without ZeRO, .* ZeRO stage 1"):
        open_checkpoint(plain)
    split, _ = save(at(pp=2, stage=1, **bf16))
    with pytest.raises(RefusedError, match="stage 0 is asked of a bf16 pipeline"):
        lay_out(open_checkpoint(split), "deepspeed_zero0")


@pytest.mark.parametrize(
    ("layout", "degrees", "words"),
    [
        ("deepspeed_zero2", {}, "for which DeepSpeed has stages 0 and 1 alone"),
        ("deepspeed_zero1", {"pp": 6}, "would have no parameter of group"),
    ],
)
def test_targets_that_deepspeed_does_not_have_are_refused(
    grid: Path, layout: str, degrees: dict[str, int], words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        lay_out(open_checkpoint(grid), layout, **degrees)


def test_the_commands_take_a_file_of_cuts(save: Saver, tmp_path: Path) -> None:
    saved, _ = save(at(tp=2, stage=3))
    cuts, out = str(cuts_file(tmp_path, at())), str(tmp_path / "out")
    commands = [
        ["reshard", str(saved), out, "--tp", "3", "--dp", "2", "--to", "deepspeed_zero2"],
        ["verify", str(saved), out],
        ["inspect", out],
    ]
    for command in commands:
        assert run(*command, "--cuts", cuts) == 0


def test_a_module_of_nested_dictionaries_stays_one(save: Saver, tmp_path: Path) -> None:
    saved, _ = save(at(tp=2, stage=3))
    cuts = cuts_file(tmp_path, at())
    shutil.copytree(saved, tmp_path / "nested")
    for path in (tmp_path / "nested" / "global_step3").glob("*model_states.pt"):
        state = torch.load(path, weights_only=False)  # this test's own DeepSpeed wrote it
        inner = {name.removeprefix("norm."): value for name, value in state["module"].items()}
        norm = {name: inner.pop(name) for name in ("norm.weight", "norm.bias", "calls")}
        state["module"] = {**inner, "norm": norm, "others": {}}
        torch.save(state, path)
    assert prints(tmp_path / "nested", cuts) == prints(saved, cuts)
    convert(tmp_path / "nested", tmp_path / "out", "deepspeed_zero1", at(tp=1), cuts)
    path = tmp_path / "out" / "global_step3" / "mp_rank_00_model_states.pt"
    module = torch.load(path, weights_only=False)["module"]
    assert list(module["norm"]) == ["norm.weight", "norm.bias", "calls"]
    assert module["norm"]["calls"] == 3 and module["others"] == {}
    assert module["blocks.0.down"].shape == (8, 12)


def cuts_file(folder: Path, *jobs: Job) -> Path:
    """Return a file that says what the checkpoints of these jobs do not."""
    text = "" if jobs[0].info is not None else CUTS
    if jobs[0].pp:
        text += "[pipeline]\n"
    if jobs[0].partition == "type:block":
        text += 'partition_method = "type"\n'
    if any(job.pp and job.tied and not job.stage for job in jobs):
        text += "tied = {embed = [0, 5]}\n"
    path = folder / "cuts.toml"
    path.write_text(text)
    return path


def read(path: Path, cuts: Path | None) -> Checkpoint:
    return open_checkpoint(path, ReadOptions(cuts=cuts, order=in_groups))


def in_groups(names: Sequence[str]) -> list[list[str]]:
    """Return the parameters of the job's two optimizer groups: matrices, and the rest."""
    groups: list[list[str]] = [[], []]
    for name in names:
        groups[bool(re.search(r"bias$|norm\.", name))].append(name)
    return groups


def prints(path: Path, cuts: Path | None = None) -> Any:
    """Return the fingerprints of a checkpoint that agrees with itself."""
    return verify(read(path, cuts), 1)


def convert(source: Path, target: Path, layout: str, job: Job, cuts: Path | None) -> None:
    tp, pp = max(job.tp, 1), max(job.pp, 1)
    degrees: dict[str, Any] = {"tp": tp, "pp": pp, "dp": job.world // tp // pp}
    carry(read(source, cuts), target, layout, limits=LIMITS, cuts=cuts, **degrees)


def buffers(ranks: Any, when: str) -> dict[str, Any]:
    """Return the buffers of all stages."""
    return {name: value for rank in ranks for name, value in rank[when]["buffers"].items()}
