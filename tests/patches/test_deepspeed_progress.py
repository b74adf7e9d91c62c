"""How far a DeepSpeed checkpoint is, and what a script has said in it."""

import io
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

from scalai.patches.deepspeed.checkpoint.model_file import (
    checkpoint_step,
    client_state_of,
    read_values,
)

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
    assert client_state_of(directory) == {"epoch": 3, "best": best}


def test_a_script_is_given_what_it_saved_and_not_what_stood_in_for_it(tmp_path: Path) -> None:
    mine = OrderedDict(scores=np.arange(3.0), best=np.float64(0.5), raw=io.BytesIO(b"ab"))
    values = read_values(save(tmp_path / "epoch3", mine=mine) / STATES)["mine"]
    assert type(values) is OrderedDict and type(values["best"]) is np.float64
    assert values["scores"].tolist() == [0.0, 1.0, 2.0] and values["raw"].getvalue() == b"ab"
    assert list(pickle.loads(pickle.dumps(values))) == list(mine)
