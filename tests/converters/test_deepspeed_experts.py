"""DeepSpeed's experts: checkpoints that were resharded are loaded by DeepSpeed, at other
expert-parallel degrees too, and training goes on."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.checkpoint import WriteOptions
from scalai.converters.consistency import verify
from scalai.converters.deepspeed import experts
from scalai.converters.deepspeed.experts import Name, expert_of
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.core.errors import RefusedError
from scalai.launch import cli
from support.checkpoints import experts_state, write
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
    run_deepspeed: Runner,
    save: Saver,
    tmp_path: Path,
    model: dict[str, Any],
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    tolerance: float,
) -> None:
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
    run_deepspeed: Runner,
    save: Saver,
    tmp_path: Path,
    precision: str,
    before: tuple[int, int, int],
    by: tuple[int, int, int],
    after: tuple[int, int, int],
) -> None:
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
        assert list(differences(*(read(tag / name) for tag in tags))) == []


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (2, 2), (6, 2), (4, 4)])
def test_every_element_survives_any_degrees(tmp_path: Path, stage: int, dp: int, ep: int) -> None:
    there = write(tmp_path / "there", f"deepspeed_zero{stage}", experts_state(), dp=dp, ep=ep)
    assert (there.values.degrees["dp"], there.values.degrees["ep"]) == (dp, ep)
    back = write(tmp_path / "back", f"deepspeed_zero{2 - stage}", there, dp=3, ep=1)
    straight = write(tmp_path / "straight", "scalai", experts_state())
    assert verify(there, 0) == verify(back, 0) == verify(straight, 0)


@pytest.fixture(scope="module")
def spread(save: Saver) -> Path:
    """A checkpoint of two expert-parallel ranks."""
    return save(job(MODEL, (1, 2, 2)))[0]


def lose_an_expert(tag: Path) -> None:
    (tag / "layer_1_expert_3_mp_rank_00_model_states.pt").unlink()


def lose_a_layer(tag: Path) -> None:
    for file in tag.glob("layer_0_expert_*"):
        file.unlink()


def swap_experts(tag: Path) -> None:
    files = [tag / f"layer_1_expert_{n}_mp_rank_00_model_states.pt" for n in (2, 3)]
    shutil.copy(files[0], files[1])


def repeat_a_layer(tag: Path) -> None:
    for file in tag.glob("layer_0_expert_*"):
        shutil.copy(file, tag / file.name.replace("layer_0", "layer_2"))


def add_a_model_parallel_rank(tag: Path) -> None:
    file = tag / "layer_0_expert_0_mp_rank_00_model_states.pt"
    shutil.copy(file, tag / "layer_0_expert_0_mp_rank_01_model_states.pt")


def leave_one_expert_less(tag: Path) -> None:
    (tag / "layer_1_expert_7_mp_rank_00_model_states.pt").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_an_expert, r"has no file of expert \(of layer 1\) 3 \(of 8"),
        (lose_a_layer, r"has no file of layer with experts 0 \(of 2"),
        (swap_experts, "and tensors of expert 3 are expected"),
        (repeat_a_layer, "as layer 2 and as another one"),
        (add_a_model_parallel_rank, "experts of several model-parallel ranks"),
        (leave_one_expert_less, "unequal expert-parallel sizes"),
    ],
)
def test_damaged_experts_are_refused(
    spread: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    shutil.copytree(spread / "global_step3", tmp_path / "global_step3")
    damage(tmp_path / "global_step3")
    with pytest.raises(RefusedError, match=words):
        open_checkpoint(tmp_path / "global_step3")


@pytest.mark.parametrize(
    ("layout", "degrees", "words"),
    [
        ("deepspeed_zero3", {}, "stage 3 at tp=1 pp=1 .* Convert to deepspeed_zero2"),
        ("deepspeed_universal", {}, "has no universal checkpoints"),
        ("deepspeed_zero1", {"ep": 8, "dp": 8}, r"ep=8 does not divide the 4 experts of blocks\.0"),
        ("deepspeed_zero1", {"ep": 4}, "ep=4 does not divide dp=2"),
        ("deepspeed_zero2", {"cp": 2}, "which has dp, tp, pp, ep alone"),
    ],
)
def test_targets_that_experts_do_not_have_are_refused(
    spread: Path, layout: str, degrees: dict[str, int], words: str
) -> None:
    source = open_checkpoint(spread)
    with pytest.raises(RefusedError, match=words):
        layout_named(layout).lay_out(source, WriteOptions(degrees))


def test_the_commands_tell_of_experts(spread: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", str(spread), "--verify"])
    assert not ended.value.code
    assert re.search(r"ep\W+2", capsys.readouterr().out)


def test_large_groups_are_split_where_deepspeed_splits_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [str(Name("moe", number, ".up.weight")) for number in range(5)]
    sizes = dict.fromkeys([*names, "norm"], 10)
    monkeypatch.setattr(experts, "MAX_GROUP_ELEMENTS", 20)
    split, origins = experts.split_groups([["norm"] * 3, names], sizes)
    assert split == [("norm",) * 3, tuple(names[:2]), tuple(names[2:4]), tuple(names[4:])]
    assert origins == [0, 1, 1, 1]
    values = [{"lr": 1, "params": [0]}, *({"lr": 1, "moe": True, "params": [n]} for n in (1, 2, 3))]
    united, kept = experts.unite_groups(split, values, sizes)
    assert united == [("norm",) * 3, tuple(names)]
    assert kept == values[:2]
    # What a smaller limit has made stays as it is.
    assert experts.unite_groups([names[:1], names[1:2]], values[1:3], sizes)[0] == [
        tuple(names[:1]), tuple(names[1:2]),
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["experts", "kinds"])
def test_the_order_of_a_ranks_experts_is_that_of_all(order: str) -> None:
    rests = [".up", ".down"]
    layers = experts.Experts((experts.Layer("a.moe", (".up", ".down"), 4),))

    def names(numbers: range) -> list[str]:
        if order == "experts":
            return [str(Name("a.moe", n, rest)) for n in numbers for rest in rests]
        return [str(Name("a.moe", n, rest)) for rest in rests for n in numbers]

    wide = layers.widen(["x", *names(range(2)), "y"], 2)
    assert list(wide) == ["x", *names(range(4)), "y"]
    mine = [layers.local(name, 2) for name in wide if layers.is_on(name, 2, 1)]
    assert mine == ["x", *names(range(2)), "y"]
    with pytest.raises(RefusedError, match="neither expert by expert nor kind by kind"):
        layers.widen([*names(range(2))[:2], *reversed(names(range(2))[2:])], 2)
