"""How far a DeepSpeed checkpoint is, and what a script has said in it."""

import io
import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from scalai.core.errors import LayoutError
from scalai.patches.continuation import choose_source, describe_source
from scalai.patches.deepspeed.checkpoint.model_file import (
    client_state_of,
    read_values,
    saved_step,
)
from scalai.patches.megatron.training_hooks import checkpoint_step, put_progress, take_progress


def arguments(**values: object) -> Namespace:
    counters = {
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "padded_vocab_size": 128,
    }
    return Namespace(**{**counters, **values})


@pytest.mark.parametrize(
    ("generation", "checkpoint", "source"),
    [
        (None, None, "nothing"),
        (None, 100, "checkpoint"),
        (0, None, "generation"),
        (100, 99, "generation"),
        (100, 100, "generation"),
        (100, 101, "checkpoint"),
        (0, 0, "generation"),
    ],
)
def test_the_newer_state_wins_and_the_generation_at_the_same_step(
    generation: int | None, checkpoint: int | None, source: str
) -> None:
    assert choose_source(generation, checkpoint) == source


def test_both_states_are_named_in_the_log() -> None:
    line = describe_source("generation", 120, 100, "/checkpoints")
    assert "step 120" in line
    assert "iteration 100" in line
    assert "/checkpoints" in line


@pytest.mark.parametrize(
    ("tracker", "ckpt_step", "is_finetune", "step"),
    [
        (None, None, False, None),
        (None, 50, False, None),
        ("100", None, False, 100),
        ("100\n", None, False, 100),
        ("100", 50, False, 50),
        ("release", None, False, 0),
        ("100", None, True, 0),
    ],
)
def test_the_iteration_of_a_checkpoint_is_what_megatron_would_count_from(
    tracker: str | None, ckpt_step: int | None, is_finetune: bool, step: int | None
) -> None:
    assert checkpoint_step(tracker, ckpt_step, is_finetune) == step


def test_counters_survive_a_change_of_the_workers() -> None:
    before = arguments(
        consumed_train_samples=96, consumed_valid_samples=24, skipped_train_samples=8
    )
    saved = take_progress(before, iteration=12, flops=3.5e9).to_json()
    after = arguments()
    put_progress(after, saved)
    assert (after.iteration, after.num_floating_point_operations_so_far) == (12, 3.5e9)
    assert take_progress(after, 12, 3.5e9).to_json() == saved


def test_another_padding_of_the_vocabulary_is_refused_with_the_way_out() -> None:
    saved = take_progress(arguments(padded_vocab_size=192), iteration=1, flops=0).to_json()
    with pytest.raises(LayoutError, match=r"192 rows.*128.*make-vocab-size-divisible-by"):
        put_progress(arguments(), saved)


STATES = "mp_rank_00_model_states.pt"


def save(directory: Path, **content: object) -> Path:
    directory.mkdir()
    torch.save({"module": {"w": torch.ones(2)}, "global_steps": 7, **content}, directory / STATES)
    return directory


def test_a_tag_of_deepspeeds_says_the_step_and_any_other_is_looked_into(tmp_path: Path) -> None:
    assert saved_step(tmp_path / "global_step12") == 12
    assert saved_step(save(tmp_path / "epoch3")) == 7
    (tmp_path / "empty").mkdir()
    assert saved_step(tmp_path / "empty") is None


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
