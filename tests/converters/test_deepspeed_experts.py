"""DeepSpeed's experts: checkpoints that were resharded are loaded by DeepSpeed, at other
expert-parallel degrees too, and training goes on."""

import re
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.consistency import verify
from scalai.converters.deepspeed.experts import Name, expert_of
from support.checkpoints import experts_state, write
from support.command import Capsys, logged
from support.training.deepspeed_checks import FP32, HALF, cases, check, convert, differences, read
from support.training.deepspeed_jobs import Job, Runner, Saver

MODEL: dict[str, Any] = {"experts": (4, 8), "config": {"gradient_clipping": 0.0}}
"""DeepSpeed clips by a norm that is taken otherwise at another degree."""
TRAINED = {**MODEL, "frozen": False}
ROUND = {**MODEL, "zero": {"round_robin_gradients": True}}

CASES = [
    ("stage-1-dp2-ep2-to-stage-2-dp2", MODEL, (1, 2, 2), (2, 2, 1), FP32),
    ("stage-0-dp2-to-ep2", TRAINED, (0, 2, 1), (0, 2, 2), FP32),
]
LONG_CASES = [
    ("stage-1-dp4-ep2-to-ep4", MODEL, (1, 4, 2), (1, 4, 4), FP32),
    ("stage-2-dp4-ep4-to-dp2-ep1", MODEL, (2, 4, 4), (2, 2, 1), FP32),
    ("stage-2-one-to-dp4-ep2", MODEL, (2, 1, 1), (2, 4, 2), FP32),
    ("stage-1-ep2-to-stage-0-dp4-ep4", TRAINED, (1, 2, 2), (0, 4, 4), FP32),
    ("stage-0-dp4-ep4-to-stage-2-ep2", TRAINED, (0, 4, 4), (2, 2, 2), FP32),
    ("round-robin-dp4-ep2-to-ep4", ROUND, (2, 4, 2), (2, 4, 4), FP32),
]
DETOURS = [
    ("bf16", (1, 2, 2), (2, 4, 4), (2, 2, 2)),
    ("bf16-fp32", (1, 2, 2), (2, 4, 1), (1, 2, 2)),
    ("bf16", (0, 2, 2), (1, 4, 4), (2, 2, 2)),
    ("fp16", (1, 2, 1), (2, 4, 2), (2, 2, 1)),
]
"""In 16 bits the way back to the same degrees: at others, a token between two experts may go to the
other one, and losses differ by a percent."""


def job(model: dict[str, Any], shape: tuple[int, int, int], **more: Any) -> Job:
    stage, dp, ep = shape
    return Job(**{**model, "stage": stage, "world": dp, "ep": ep, **more})


@pytest.mark.parametrize(("model", "before", "after", "tolerance"), cases(CASES, LONG_CASES))
def test_a_resharded_checkpoint_goes_on_as_the_run_that_never_stopped(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, model: dict[str, Any],
    before: tuple[int, int, int], after: tuple[int, int, int], tolerance: float,
) -> None:  # fmt: skip
    saved, uninterrupted = save(job(model, before))
    convert(saved, tmp_path / "out", f"deepspeed_zero{after[0]}", after[1], ep=after[2])
    loaded = run_deepspeed(job(model, after, load=str(tmp_path / "out")))
    check(uninterrupted, loaded, tolerance, has_module=False)
    for kind in ("frozen", "buffers"):
        reported = by_whole_name([seen["saved"][kind] for seen in uninterrupted], before[2])
        assert reported or (kind == "frozen" and not model.get("frozen", True))
        assert by_whole_name([seen["loaded"][kind] for seen in loaded], after[2]) == reported


@pytest.mark.campaign
@pytest.mark.parametrize(("precision", "before", "by", "after"), DETOURS, ids=str)
def test_a_detour_in_16_bits_loses_nothing(
    run_deepspeed: Runner, save: Saver, tmp_path: Path, precision: str,
    before: tuple[int, int, int], by: tuple[int, int, int], after: tuple[int, int, int],
) -> None:  # fmt: skip
    model = {**TRAINED, "precision": precision}
    saved, uninterrupted = save(job(model, before))
    for number, (stage, dp, ep) in enumerate((by, after)):
        convert(saved, tmp_path / str(number), f"deepspeed_zero{stage}", dp, ep=ep)
        saved = tmp_path / str(number)
    loaded = run_deepspeed(job(model, after, load=str(saved)))
    check(uninterrupted, loaded, HALF, has_module=False)


def by_whole_name(ranks: list[dict[str, Any]], ep: int) -> dict[str, Any]:
    """Return values of all ranks under the names of the whole model, which all agree about."""
    found: dict[str, Any] = {}
    for rank, values in enumerate(ranks):
        for name, value in values.items():
            expert = expert_of(name)
            if expert is not None:
                each = MODEL["experts"][int(expert.layer.split(".")[1])] // ep
                name = str(Name(expert.layer, expert.number + rank % ep * each, expert.rest))
            assert found.setdefault(name, value) == value
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 4, 2), (0, 2, 2)], ids=str)
def test_there_and_back_again_is_what_deepspeed_wrote(
    save: Saver, tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    saved, _ = save(job(TRAINED, shape))
    convert(saved, tmp_path / "there", "deepspeed_zero1", 4, ep=4)
    stage, dp, ep = shape
    convert(tmp_path / "there", tmp_path / "back", f"deepspeed_zero{stage}", dp, ep=ep)
    tags = saved / "global_step3", tmp_path / "back" / "global_step3"
    files = [sorted(path.name for path in tag.glob("*.pt")) for tag in tags]
    assert files[0] == files[1]
    for name in files[0]:
        # Stage 1 does not say whether it has all frozen parameters: none are stated behind it.
        entries = ("frozen_param_fragments", "frozen_param_shapes") if stage > 1 else ()
        unstated = [f"/{entry}: OrderedDict and NoneType" for entry in entries]
        found = sorted(differences(*(read(tag / name) for tag in tags)))
        assert found == unstated * name.startswith("mp_rank")


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (2, 2), (6, 2), (4, 4)])
def test_every_element_survives_any_degrees(tmp_path: Path, stage: int, dp: int, ep: int) -> None:
    there = write(tmp_path / "there", f"deepspeed_zero{stage}", experts_state(), dp=dp, ep=ep)
    assert (there.values.degrees["dp"], there.values.degrees["ep"]) == (dp, ep)
    back = write(tmp_path / "back", f"deepspeed_zero{2 - stage}", there, dp=3, ep=1)
    straight = write(tmp_path / "straight", "scalai", experts_state())
    assert verify(there, 0) == verify(back, 0) == verify(straight, 0)


def test_the_commands_tell_of_experts(tmp_path: Path, capsys: Capsys) -> None:
    write(tmp_path / "spread", "deepspeed_zero1", experts_state(), dp=2, ep=2)
    code, said = logged(capsys, "inspect", tmp_path / "spread", "--verify")
    assert code == 0 and re.search(r"ep\W+2", said)
