"""Local checkpoints: the newest iteration of all ranks, replicas, and what is named where none is
whole. Bad files: ``test_rejects.py``; saves of megatron-core itself: ``test_reshard.py``."""

import os
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.checkpoint import ReadOptions
from scalai.converters.consistency import compare
from scalai.converters.layouts import open_checkpoint
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from support.checkpoints import gpt, state, write
from support.command import Capsys, run
from support.local_files import localise

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
