"""Trainers' directories around checkpoints: the one inside is found, several are listed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import RefusedError
from support.checkpoints import state, write
from support.command import Capsys, run
from support.damage import change_tree

STEP = 3


def saved(at: Path, layout: str = "torch_dist") -> None:
    """Write a checkpoint as a library's own save does: without Megatron's folder and tracker."""
    made = at.parent / "made"
    at.parent.mkdir(parents=True, exist_ok=True)
    directory = write(made, layout, state(STEP)).directory
    shutil.copytree(directory, at)
    shutil.rmtree(made)


def verl(path: Path) -> None:
    for step in (2, STEP):
        saved(path / f"global_step_{step}" / "actor" / "dist_ckpt")
        saved(path / f"global_step_{step}" / "actor" / "huggingface", "safetensors")
    (path / "latest_checkpointed_iteration.txt").write_text(str(STEP))


def skyrl(path: Path) -> None:
    saved(path / f"global_step_{STEP}" / "policy")
    (path / f"global_step_{STEP}" / "policy" / "huggingface").mkdir()
    (path / f"global_step_{STEP}" / "policy" / "huggingface" / "config.json").write_text("{}")
    (path / "latest_ckpt_global_step.txt").write_text(str(STEP))


def swift(path: Path) -> None:
    write(path / f"checkpoint-{STEP}", "torch_dist", state(STEP))


def areal(path: Path) -> None:
    saved(path / "trial" / "default" / "recover_checkpoint", "dcp")


@pytest.mark.parametrize(
    ("make", "inside", "layout"),
    [
        (verl, "global_step_3/actor/dist_ckpt", "torch_dist"),
        (skyrl, "global_step_3/policy", "torch_dist"),
        (swift, "checkpoint-3/iter_0000003", "torch_dist"),
        (areal, "trial/default/recover_checkpoint", "dcp"),
    ],
)
def test_the_checkpoint_inside_is_found(
    tmp_path: Path, make: Callable[[Path], None], inside: str, layout: str
) -> None:
    make(tmp_path / "run")
    found = open_checkpoint(tmp_path / "run")
    assert (found.layout, found.values.step) == (layout, STEP)
    assert str(found.directory.relative_to(tmp_path / "run")) == inside
    assert found.notes[0].startswith(f"found in {tmp_path / 'run'}: ")
    assert run("inspect", tmp_path / "run") == 0
    assert run("verify", tmp_path / "run") == 0


def by_megatron_core_alone(content: Any) -> Any:
    schedule = content.pop("opt_param_scheduler")
    del content["iteration"]
    return content | {"lr_scheduler": schedule}


def test_a_save_by_megatron_core_alone_goes_on(tmp_path: Path, capsys: Capsys) -> None:
    verl(tmp_path / "run")
    inside = tmp_path / "run" / "global_step_3" / "actor" / "dist_ckpt"
    change_tree(inside / "common.pt", by_megatron_core_alone)
    assert run("reshard", tmp_path / "run", tmp_path / "there", "--tp", "2") == 0
    assert "takes the place of the source's own folder" in capsys.readouterr().out
    common: Any = torch.load(tmp_path / "there" / "iter_0000003" / "common.pt", weights_only=False)
    assert common["lr_scheduler"] == {"num_steps": STEP}
    shutil.move(inside, tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="no folder above is named by one"):
        open_checkpoint(tmp_path / "elsewhere")


def test_several_are_listed(tmp_path: Path, capsys: Capsys) -> None:
    verl(tmp_path)
    saved(tmp_path / "global_step_3" / "critic" / "dist_ckpt")
    words = r"2 checkpoints: .*actor/dist_ckpt \(torch_dist\), .*critic/dist_ckpt \(torch_dist\)"
    with pytest.raises(RefusedError, match=words):
        open_checkpoint(tmp_path)
    assert run("inspect", tmp_path) == 3
    assert "critic" in capsys.readouterr().err


def test_shards_of_fsdp_are_called_by_their_name(tmp_path: Path) -> None:
    (tmp_path / "model_world_size_2_rank_0.pt").write_bytes(b"")
    with pytest.raises(RefusedError, match=r"verl\.model_merger"):
        open_checkpoint(tmp_path)
