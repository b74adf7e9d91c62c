"""ZeRO stage 0 names no parameter of its optimizer: states whose owner nothing tells are never
proven to be anybody's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scalai.converters.between.reference import read_reference
from scalai.converters.checkpoint import Checkpoint, ReadOptions
from scalai.converters.layouts import open_checkpoint
from scalai.converters.source_files import SourceFiles
from scalai.core.errors import RefusedError
from scalai.patches.deepspeed.checkpoint.saved_checkpoint import read_saved
from scalai.patches.deepspeed.masters import order_of
from support.checkpoints import carry
from support.command import Capsys, logged, run

pytestmark = pytest.mark.fault

FILE = "mp_rank_00_model_states.pt"
SORTED = ["l.0.weight", "l.1.weight", "l.10.weight", "l.2.weight"]
"""As `sorted(dict(model.named_parameters()))` has them; the module has 10 behind 2."""
GROUP = "[[deepspeed.group]]\nparameters = "


def saved(
    directory: Path,
    *,
    order: Sequence[str] = SORTED,
    shapes: Callable[[int], tuple[int, ...]] = lambda number: (2, 3),
    half: torch.dtype | None = None,
    is_named: bool = False,
    is_equal: bool = False,
) -> Path:
    """Save as stage 0 of DeepSpeed 0.19.8, in 16 bits as its FP16_UnfusedOptimizer; each moment
    is its parameter's number."""
    numbers = [0, 1, 2, 10]
    module = {f"l.{n}.weight": torch.nn.Parameter(torch.full(shapes(n), n + 1.0)) for n in numbers}
    if is_equal:
        module = {name: torch.nn.Parameter(torch.ones_like(p)) for name, p in module.items()}
    names = [(name, module[name]) for name in order]
    optimizer = torch.optim.AdamW(names if is_named else [p for _, p in names], lr=0.1)
    for name, parameter in names:
        parameter.grad = torch.full_like(parameter, float(name.split(".")[1]) + 1)
    optimizer.step()
    tree: Any = optimizer.state_dict()
    weights = {name: p.detach() for name, p in module.items()}
    if half is not None:
        tree = {
            "optimizer_state_dict": tree,
            "fp32_groups": [[p.detach() for _, p in names]],
            "dynamic_loss_scale": False,
        }
        weights = {name: weight.to(half) for name, weight in weights.items()}
    tag = directory / "global_step1"
    tag.mkdir(parents=True)
    torch.save(
        {
            "module": weights, "optimizer": tree, "global_steps": 1, "global_samples": 4,
            "dp_world_size": 2, "mp_world_size": 1, "buffer_names": [], "lr_scheduler": None,
            "skipped_steps": 0, "ds_config": {"bf16": {"enabled": half is not None}},
            "ds_version": "0.19.8", "shared_params": {},
        },
        tag / FILE,
    )  # fmt: skip
    (directory / "latest").write_text("global_step1")
    return directory


def moments(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the first moment of each parameter, of which all elements are one number."""
    files, found = SourceFiles(checkpoint.directory), {}
    for row in range(len(checkpoint.placed.collection)):
        tensor, box = checkpoint.placed.collection.box(row)
        if tensor.name.startswith("exp_avg/"):
            values = files.view(checkpoint.placed, row, box).view("f4")
            found[tensor.name.removeprefix("exp_avg/")] = round(float(values.ravel()[0]) * 10, 3)
    return found


RIGHT = {name: float(name.split(".")[1]) + 1 for name in SORTED}


@pytest.mark.parametrize("layout", ["deepspeed_zero1", "deepspeed_universal", "scalai"])
def test_a_state_that_could_be_anothers_is_not_proven_to_be_one_parameters(
    tmp_path: Path, layout: str
) -> None:
    source = open_checkpoint(saved(tmp_path / "a"))
    assert moments(source) != RIGHT
    with pytest.raises(RefusedError, match=r"l\.0\.weight and l\.1\.weight.*--args-from"):
        carry(source, tmp_path / "b", layout, dp=2)
    assert not (tmp_path / "b").exists()


def test_nothing_is_loaded_into_an_engine_as_another_parameters(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    with pytest.raises(RefusedError, match=r"l\.0\.weight and l\.1\.weight.*--args-from"):
        read_saved(tmp_path / "a/global_step1")
    assert read_saved(tmp_path / "a/global_step1", is_whole=False)
    order = order_of([([SORTED], False)])
    assert read_saved(tmp_path / "a/global_step1", order=order).steps.keys() == {*SORTED}


def test_stages_tell_the_order_of_what_one_has_or_in_the_modules() -> None:
    one, other = [["1.w", "0.w"], ["0.b"]], [["2.w"], ["2.b"]]
    stages = order_of([(one, False), (other, True)])
    assert stages(["0.w", "0.b", "1.w", "frozen"]) == one
    assert stages(["2.w", "2.b"]) == other
    assert stages(["0.w", "0.b", "1.w", "2.w", "2.b"]) is None
    ordered = order_of([([["0.w", "1.w"], ["0.b"]], True), (other, True)])
    assert ordered(["0.w", "0.b", "1.w", "2.w", "2.b"]) == [["0.w", "1.w", "2.w"], ["0.b", "2.b"]]
    uneven = order_of([([["0.w"]], True), (other, True)])
    assert uneven(["0.w", "2.w", "2.b"]) is None


def test_without_the_moments_or_in_the_same_order_it_does_not_matter_whose_they_are(
    tmp_path: Path,
) -> None:
    source = open_checkpoint(saved(tmp_path / "a"))
    for layout in ("deepspeed_zero0", "safetensors"):
        assert carry(source, tmp_path / layout, layout, dp=3)
    kept = torch.load(tmp_path / "deepspeed_zero0/global_step1" / FILE)["optimizer"]["state"]
    was = torch.load(tmp_path / "a/global_step1" / FILE)["optimizer"]["state"]
    assert all(torch.equal(kept[n]["exp_avg"], was[n]["exp_avg"]) for n in range(4))


@pytest.mark.parametrize(
    ("listed", "is_right"), [(str(SORTED), True), ('["*"]', False), (str(SORTED[::-1]), False)]
)
def test_the_order_may_be_said_in_a_file(tmp_path: Path, listed: str, is_right: bool) -> None:
    (tmp_path / "job.toml").write_text(GROUP + listed.replace("'", '"'))
    source, target = saved(tmp_path / "a"), tmp_path / "b"
    options = "--to", "deepspeed_zero1", "--args-from", tmp_path / "job.toml"
    assert run("reshard", source, target, *options) == 0
    assert (moments(open_checkpoint(target)) == RIGHT) is is_right


def test_a_file_that_says_the_order_leaves_frozen_parameters_out(tmp_path: Path) -> None:
    trained = SORTED[1:]
    (tmp_path / "job.toml").write_text(GROUP + str(trained).replace("'", '"'))
    saved(tmp_path / "a", order=trained)
    order = read_reference(tmp_path / "job.toml", ReadOptions()).order
    source = open_checkpoint(tmp_path / "a", ReadOptions(order=order))
    assert moments(source) == {name: RIGHT[name] for name in trained} and not source.guessed


def test_an_order_of_other_shapes_or_other_parameters_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a", shapes=lambda number: (2, number + 1))
    wrong = ReadOptions(order=lambda _: [SORTED[::-1]])
    with pytest.raises(RefusedError, match=r"place 0 of group 0 is not of l\.2\.weight"):
        open_checkpoint(tmp_path / "a", wrong)
    with pytest.raises(RefusedError, match=r"groups of \[4\] places.*of \[3\]"):
        open_checkpoint(tmp_path / "a", ReadOptions(order=lambda _: [SORTED[:3]]))


def test_names_that_torch_was_given_are_believed(tmp_path: Path) -> None:
    source = open_checkpoint(saved(tmp_path / "a", is_named=True))
    assert moments(source) == RIGHT and not source.guessed


@pytest.mark.parametrize("kind", ["unequal shapes", "unequal weights in bf16"])
def test_what_shapes_or_masters_tell_needs_no_order(tmp_path: Path, kind: str) -> None:
    order = ["l.0.weight", "l.1.weight", "l.2.weight", "l.10.weight"]
    if kind == "unequal shapes":
        saved(tmp_path / "a", order=order, shapes=lambda number: (2, number + 1))
    else:
        saved(tmp_path / "a", order=order, half=torch.bfloat16)
    source = open_checkpoint(tmp_path / "a")
    assert moments(source) == RIGHT and not source.guessed


def test_masters_of_equal_weights_tell_nothing(tmp_path: Path) -> None:
    source = open_checkpoint(saved(tmp_path / "a", half=torch.float16, is_equal=True))
    assert len(source.guessed) == 4


@pytest.mark.parametrize("config", [{}, {"gradient_clipping": 0.5}])
def test_a_limit_of_the_gradient_that_nobody_states_is_left_to_the_engine(
    tmp_path: Path, config: dict[str, float]
) -> None:
    """DeepSpeed 0.19 clips at 1.0 by default, older ones do not; a 0 in a file would win."""
    saved(tmp_path / "a", is_named=True)
    file = tmp_path / "a/global_step1" / FILE
    torch.save({**torch.load(file, weights_only=False), "ds_config": config}, file)
    source = open_checkpoint(tmp_path / "a")
    carry(source, tmp_path / "b", "deepspeed_zero1", dp=1)
    made = next((tmp_path / "b").rglob("*optim_states.pt"))
    state = torch.load(made, weights_only=False)["optimizer_state_dict"]
    assert state.get("clip_grad") == config.get("gradient_clipping")


def test_verify_says_what_no_bytes_prove(tmp_path: Path, capsys: Capsys) -> None:
    source = str(saved(tmp_path / "a"))
    for paths in ([source], [source, source]):
        _, said = logged(capsys, "verify", *paths)
        assert "warning: " in said and "nothing proves" in said
