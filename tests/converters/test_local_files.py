"""Local checkpoints: the newest iteration of all ranks, replicas, and what is named where none is
whole. Bad files: ``test_rejects.py``; saves of megatron-core itself: ``test_reshard.py``."""

import os
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest

from scalai.converters import dcp_metadata
from scalai.converters.checkpoint import ReadOptions
from scalai.converters.consistency import compare
from scalai.converters.layouts import open_checkpoint
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from support.checkpoints import gpt, state, write
from support.command import Capsys, run
from support.local_files import localise, rewrite

pytestmark = pytest.mark.fault


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A save of two hosts at steps 3 and 5, of two ranks each, without replicas."""
    for step in (3, 5):
        write(tmp_path / str(step), source=state(step), tp=2)
        localise(tmp_path / str(step), tmp_path / "made", world=4)
    for rank in range(4):
        folder = tmp_path / "saved" / f"host-{rank // 2}" / "s"
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / str(rank)).rename(folder / str(rank))
    return tmp_path / "saved"


def test_the_newest_iteration_of_all_ranks_becomes_any_layout(
    saved: Path, tmp_path: Path, capsys: Capsys
) -> None:
    assert open_checkpoint(saved).notes == ()
    assert run("reshard", saved, tmp_path / "new", "--tp", 1, "--workers", 1) == 0
    new = open_checkpoint(tmp_path / "new")
    assert (new.layout, new.values.step) == ("torch_dist", 5)
    assert list(compare(open_checkpoint(tmp_path / "5"), new, 0)) == []
    assert run("reshard", saved, tmp_path / "no", "--to", "megatron_local") == 2
    assert "is read, and not written" in capsys.readouterr().err


def test_of_a_lost_host_an_older_iteration_is_taken_and_said(saved: Path, capsys: Capsys) -> None:
    (saved / "host-1/s/2/iter_0000005_2_local.pt").unlink()
    dirty = saved / "host-1/s/3/iter_0000005_3_local.pt"
    dirty.rename(dirty.with_name("iter_0000005_3_local.dirty.pt"))
    found = open_checkpoint(saved)
    assert found.values.step == 3
    assert found.notes[0] == "passed over: iteration 5 lacks ranks 2, 3"
    with pytest.raises(RefusedError, match=r"iteration 5 lacks ranks 2, 3 .3, 5 are there"):
        open_checkpoint(saved, ReadOptions(iteration=5))
    (saved / "host-0/s/0/iter_0000003_0_local.pt").unlink()
    assert run("verify", saved) == 3
    text = capsys.readouterr().err
    assert "iteration 5 lacks ranks 2, 3; iteration 3 lacks rank 0" in text
    assert "iter_0000005_3_local.dirty.pt did not end" in text and "replicas" in text


def test_a_replica_in_another_hosts_folder_stands_in(saved: Path) -> None:
    name = "iter_0000005_2_local.pt"
    shutil.copy(saved / "host-1/s/2" / name, saved / "host-0/s/0")
    os.truncate(saved / "host-1/s/2" / name, 100)
    found = open_checkpoint(saved)
    assert len(found.notes) == 1 and f"host-1/s/2/{name} is damaged" in found.notes[0]
    assert list(compare(open_checkpoint(saved.parent / "5"), found, 0)) == []
    shutil.rmtree(saved / "host-1/s/2")
    assert open_checkpoint(saved).notes == ()


def test_a_file_of_another_rank_is_known_by_its_content(saved: Path) -> None:
    name = "iter_0000005_{}_local.pt"
    shutil.copy(saved / "host-1/s/2" / name.format(2), saved / "host-1/s/3" / name.format(3))
    with pytest.raises(RefusedError, match=r"lacks rank 3 .* is of iteration 5 and rank 2"):
        open_checkpoint(saved, ReadOptions(iteration=5))


def test_a_damaged_file_is_named_with_its_replica(
    saved: Path, tmp_path: Path, capsys: Capsys
) -> None:
    name = "iter_0000005_1_local.pt"
    file, copy = saved / "host-0/s/1" / name, saved / "host-1/s/2" / name
    shutil.copy(file, copy)
    placed = open_checkpoint(saved).placed
    piece = next(
        p for p in map(placed.piece, range(1000))
        if saved / p.file == file and p.tensor.name.startswith("exp_avg/")
    )  # fmt: skip
    data = bytearray(file.read_bytes())
    data[piece.begin] ^= 1
    file.write_bytes(data)
    assert run("reshard", saved, tmp_path / "new", "--workers", 1) == 4
    assert f"remove it, and its replica {copy} stands in" in capsys.readouterr().err
    file.unlink()
    assert run("reshard", saved, tmp_path / "new", "--workers", 1) == 0


SAMPLES = 640


@pytest.fixture
def of_bridge(tmp_path: Path) -> Path:
    """A save of Megatron-Bridge, of two stages with a layer each: without arguments, with its
    counters. Unlike layers have keys of their own."""
    shapes = {
        "embedding.word_embeddings.weight": (8, 4),
        "decoder.layers.0.mlp.linear_fc2.weight": (4, 16),
        "decoder.layers.1.mlp.router.weight": (4, 4),
    }
    counters = {"step": 3, "consumed_train_samples": SAMPLES, "consumed_valid_samples": 0}

    def change(common: dict[str, Any], _: object) -> None:
        del common["args"]
        common["train_state_metadata"] = {
            name: NewTensor("I64", (), count.to_bytes(8, "little"))
            for name, count in counters.items()
        }

    write(tmp_path / "a", source=gpt(shapes), pp=2)
    for rank, path in enumerate(localise(tmp_path / "a", tmp_path / "local")):
        other = f"layers.{1 - rank}."

        def keeps(fields: dict[str, Any], rank: int = rank, other: str = other) -> bool:
            is_of_stage = fields["key"] != "rng_state" or fields["global_offset"][0] == rank
            return is_of_stage and other not in fields["key"]

        rewrite(path, change, keeps)
    return tmp_path / "local"


def test_lost_stages_are_known_by_the_grid_of_rng_states(of_bridge: Path) -> None:
    whole = open_checkpoint(of_bridge.parent / "a")
    assert list(compare(whole, open_checkpoint(of_bridge), 0)) == []
    shutil.rmtree(of_bridge / "1")
    with pytest.raises(RefusedError, match=r"1 of the 2 shards of rng_state in a grid of \[2, 1"):
        open_checkpoint(of_bridge)


def test_bridge_gets_its_counters_and_the_settings_beside(
    of_bridge: Path, tmp_path: Path, capsys: Capsys
) -> None:
    import torch

    assert run("reshard", of_bridge, tmp_path / "b", "--pp", 1, "--workers", 1) == 0
    assert "loads the target with a run_config.yaml" in capsys.readouterr().out
    for name in ("iter_0000003/train_state.pt", "latest_train_state.pt"):
        state: Any = torch.load(tmp_path / "b" / name, weights_only=True)
        assert state["consumed_train_samples"].item() == SAMPLES
    again = open_checkpoint(tmp_path / "b").values
    assert again.counters["consumed_train_samples"] == SAMPLES
    config = "model:\n  tensor_model_parallel_size: 1\n  pipeline_model_parallel_size: {}\n"
    (of_bridge / "run_config.yaml").write_text(config.format(2))
    assert run("reshard", of_bridge, tmp_path / "c", "--pp", 1, "--workers", 1) == 0
    assert (tmp_path / "c/iter_0000003/run_config.yaml").read_text() == config.format(1)
    assert {path.name for path in (tmp_path / "c/iter_0000003").iterdir()}.isdisjoint({"0", "1"})


def test_objects_are_bounded_together(of_bridge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_metadata, "MAX_VALUES_BYTES", 1000)
    with pytest.raises(RefusedError, match="bytes of objects that are no tensors, and at most"):
        open_checkpoint(of_bridge)


def test_flat_ranges_of_shards_are_read(tmp_path: Path) -> None:
    """As megatron-core up to 0.15 has them: half of each shard of the optimizer a rank."""

    def flatten(fields: dict[str, Any]) -> None:
        shape, whole, count = fields["local_shape"], fields["global_shape"], 0
        if not fields["key"].startswith("optimizer.") or not shape:
            return
        count = prod(shape)
        fields["axis_fragmentations"] = tuple(a // b for a, b in zip(whole, shape, strict=True))
        fields["flattened_range"] = slice(0, count)
        if fields["data"] is not None:
            fields["data"] = NewTensor("F32", (count,), fields["data"].content)

    write(tmp_path / "a", source=gpt(), tp=2)
    localise(tmp_path / "a", tmp_path / "b", edit=flatten)
    one, two = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert list(compare(one, two, 0)) == []
