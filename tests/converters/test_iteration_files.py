"""Files beside the tensors of Megatron's iterations: Bridge's, a tokenizer, places in the data."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import RefusedError
from support.checkpoints import state, write
from support.command import Capsys, run

STEP = 3
MODEL: dict[str, Any] = {
    "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 2,
    "sequence_parallel": True,
    "microbatch_group_size_per_vp_stage": 2,
    "pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "loss"]],
    "params_dtype": {"_call_": False, "_target_": "torch.bfloat16"},
    "note": "of two\nlines: tensor_model_parallel_size: 9",
}
CONFIG: dict[str, Any] = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "checkpoint": {"ckpt_format": "torch_dist", "save_optim": True, "save_rng": True},
    "dist": {"distributed_backend": "gloo"},
    "model": MODEL,
    "rng": {"seed": 77, "data_parallel_random_init": False},
}


def train_state(step: int = STEP) -> dict[str, torch.Tensor]:
    return {
        "step": torch.tensor(step),
        "consumed_train_samples": torch.tensor(24),
        "skipped_train_samples": torch.tensor(0),
        "consumed_valid_samples": torch.tensor(2),
        "floating_point_operations_so_far": torch.tensor(1.5),
        "do_train": torch.tensor(True),
        "do_valid": torch.tensor(False),
        "do_test": torch.tensor(False),
    }


def bridge(path: Path, layout: str = "torch_dist", step: int = STEP) -> Path:
    """Write a checkpoint as Megatron-Bridge leaves one; return the iteration's directory."""
    directory = write(path, layout, state(STEP)).directory
    (directory / "run_config.yaml").write_text(yaml.safe_dump(CONFIG))
    torch.save(train_state(step), directory / "train_state.pt")
    return directory


def tokenizer(directory: Path) -> None:
    (directory / "tokenizer" / "more").mkdir(parents=True)
    (directory / "tokenizer" / "tokenizer.json").write_text("{}")
    (directory / "tokenizer" / "more" / "merges.txt").write_text("a b")


def carried(directory: Path, there: Path, *words: str) -> Path:
    """Convert by the command; return the target's iteration."""
    assert run("reshard", directory, there, *words) == 0
    return there / f"iter_{STEP:07d}"


@pytest.mark.parametrize("to", ["torch_dist", "fsdp_dtensor"])
def test_bridge_goes_on_at_the_new_degrees(tmp_path: Path, to: str) -> None:
    source = open_checkpoint(bridge(tmp_path / "a"))
    assert source.values.degrees["tp"] == source.values.degrees["pp"] == 2
    assert source.values.counters["consumed_train_samples"] == 24
    words = ("--to", to, "--tp", "1", "--pp", "1")
    there = carried(tmp_path / "a", tmp_path / "b", *words)
    config = yaml.safe_load((there / "run_config.yaml").read_text())
    expected = MODEL | {
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1, "sequence_parallel": False,
        "microbatch_group_size_per_vp_stage": 1, "pipeline_model_parallel_layout": None,
    }  # fmt: skip
    assert config["model"] == expected
    assert config["checkpoint"] == CONFIG["checkpoint"] | {"ckpt_format": to}
    for path in (there / "train_state.pt", tmp_path / "b" / "latest_train_state.pt"):
        read: Any = torch.load(path, weights_only=True)
        assert read == train_state()
    assert (tmp_path / "b" / "latest_checkpointed_iteration.txt").read_text() == str(STEP)
    again = open_checkpoint(tmp_path / "b")
    assert again.values.degrees["tp"] == 1 and not any("arguments: give" in n for n in again.notes)
    assert run("verify", tmp_path / "b") == 0


def test_the_same_degrees_leave_bridges_settings_as_they_are(tmp_path: Path) -> None:
    bridge(tmp_path / "a")
    there = carried(tmp_path / "a", tmp_path / "b")
    assert yaml.safe_load((there / "run_config.yaml").read_text()) == CONFIG


def test_new_rng_states_are_there_for_the_degrees_that_bridge_compares(
    tmp_path: Path, capsys: Capsys
) -> None:
    bridge(tmp_path / "a")
    carried(tmp_path / "a", tmp_path / "b", "--tp", "4", "--pp", "1")
    assert "from seed 80 (seed + iteration)" in capsys.readouterr().out
    objects = open_checkpoint(tmp_path / "b").values.extra["objects"]
    shards = [key for key in objects if key.startswith("rng_state/")]
    assert sorted(shards) == [f"rng_state/shard_0.{rank}_1.4" for rank in range(4)]


def test_counters_of_another_step_are_refused(tmp_path: Path) -> None:
    directory = bridge(tmp_path, step=STEP + 1)
    with pytest.raises(RefusedError, match=r"train_state.pt is of step 4, and the tensors are of"):
        open_checkpoint(directory)


def damaged_state(directory: Path) -> None:
    torch.save({"step": "3"}, directory / "train_state.pt")


def hostile_state(directory: Path) -> None:
    torch.save({"step": os.getcwd}, directory / "train_state.pt")


def twice(directory: Path) -> None:
    with open(directory / "run_config.yaml", "a") as file:
        file.write("model:\n  context_parallel_size: 2\n")


def endless(directory: Path) -> None:
    (directory / "run_config.yaml").unlink()
    os.mkfifo(directory / "run_config.yaml")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damaged_state, "has no step"),
        (hostile_state, "getcwd"),
        (twice, "model.context_parallel_size twice"),
        (endless, "not a regular file"),
    ],
)
def test_damaged_files_of_bridge_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(bridge(tmp_path))
    with pytest.raises(RefusedError, match=words):
        open_checkpoint(tmp_path)


def test_folders_beside_the_tensors_go_along(tmp_path: Path, capsys: Capsys) -> None:
    tokenizer(write(tmp_path / "a").directory)
    there = carried(tmp_path / "a", tmp_path / "b")
    assert (there / "tokenizer" / "more" / "merges.txt").read_text() == "a b"
    assert run("verify", tmp_path / "b") == 0
    (there / "tokenizer" / "tokenizer.json").write_text("[]")
    assert run("verify", tmp_path / "b") == 4
    carried(tmp_path / "a", tmp_path / "c", "--to", "scalai")
    assert "left out tokenizer, beside the tensors" in capsys.readouterr().out


def test_hashes_of_the_sources_files_stay_there(tmp_path: Path, capsys: Capsys) -> None:
    directory = write(tmp_path / "a").directory
    (directory / "integrity.json").write_text("{}")
    there = carried(tmp_path / "a", tmp_path / "b")
    assert "left out integrity.json" in capsys.readouterr().out
    assert not (there / "integrity.json").exists()


def linked(directory: Path) -> None:
    (directory / "tokenizer" / "link").symlink_to("/etc/passwd")


def sharded(directory: Path) -> None:
    (directory / "tokenizer" / "__0_0.distcp").write_bytes(b"")


def huge(directory: Path) -> None:
    with open(directory / "tokenizer" / "huge.json", "wb") as file:
        file.truncate(1 << 30)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (linked, "link is a link"),
        (sharded, "of a checkpoint of its own"),
        (huge, "copied up to 256 MB"),
    ],
)
def test_folders_that_are_not_copied_are_named(
    tmp_path: Path, capsys: Capsys, change: Callable[[Path], None], words: str
) -> None:
    directory = write(tmp_path / "a").directory
    tokenizer(directory)
    change(directory)
    there = carried(tmp_path / "a", tmp_path / "b")
    out = capsys.readouterr().out
    assert "left out tokenizer" in out and words in out
    assert not (there / "tokenizer").exists()


def test_the_tokenizer_goes_to_hugging_face(tmp_path: Path) -> None:
    tokenizer(write(tmp_path / "a").directory)
    assert run("reshard", tmp_path / "a", tmp_path / "b", "--to", "safetensors") == 0
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
    assert run("verify", tmp_path / "b") == 0


def places(path: Path, folder: str, ranks: int) -> None:
    (path / folder).mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        torch.save({"at": rank}, path / folder / f"train_dataloader_dprank{rank:03d}.pt")


@pytest.mark.parametrize("folder", ["energon/iter_0000003", "iter_0000003/mp_rank_00"])
def test_places_in_the_data_belong_to_their_number_of_ranks(
    tmp_path: Path, capsys: Capsys, folder: str
) -> None:
    bridge(tmp_path / "a")
    places(tmp_path / "a", folder, 2)
    assert run("reshard", tmp_path / "a", tmp_path / "b", "--dp", "2") == 0
    at_rank = "train_dataloader_dprank001.pt"
    assert torch.load(tmp_path / "b" / folder / at_rank) == {"at": 1}
    assert "dprank" not in capsys.readouterr().out
    assert run("reshard", tmp_path / "a", tmp_path / "c", "--dp", "4") == 0
    assert f"left out {folder}/train_dataloader_dprank*.pt of 2" in capsys.readouterr().out
    assert not (tmp_path / "c" / folder / at_rank).exists()
