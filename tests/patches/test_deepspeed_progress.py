"""How far a DeepSpeed checkpoint is, and what a script has said in it."""

from pathlib import Path

import torch

from scalai.patches.deepspeed.checkpoint.progress import checkpoint_step, client_state

STATES = "mp_rank_00_model_states.pt"


def save(directory: Path, **content: object) -> Path:
    directory.mkdir()
    torch.save({"module": {"w": torch.ones(2)}, "global_steps": 7, **content}, directory / STATES)
    return directory


def test_a_tag_of_deepspeeds_says_the_step_and_any_other_is_looked_into(tmp_path: Path) -> None:
    assert checkpoint_step(tmp_path / "global_step12") == 12
    assert checkpoint_step(save(tmp_path / "epoch3")) == 7
    (tmp_path / "empty").mkdir()
    assert checkpoint_step(tmp_path / "empty") is None


def test_of_a_scripts_own_values_the_plain_ones_are_told(tmp_path: Path) -> None:
    best = {"best": [1, 2.5, None], "name": "a"}
    directory = save(tmp_path / "epoch3", epoch=3, best=best, rows=torch.ones(2), ds_version="0")
    assert client_state(directory) == {"epoch": 3, "best": best}
