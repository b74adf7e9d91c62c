"""What ranks have in common lies in ``common.pt``; from megatron-core 0.19 on in the shards."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from scalai.converters.checkpoint import Checkpoint
from scalai.converters.consistency import compare, verify
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.common_state import COMMON_FILE, COMMON_OBJECT, FORM
from scalai.core.errors import RefusedError
from scalai.launch import cli
from support.checkpoints import newest, write


def run(*arguments: object) -> int:
    """Run ``scalai`` and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return int(ended.value.code or 0)


def write_new(directory: Path, **degrees: Any) -> Checkpoint:
    """Write a state as megatron-core 0.19 and later do."""
    return write(directory, source=newest(), **degrees)


def load_as_megatron(directory: Path) -> Any:
    """Return the common state as ``load_common_state_dict`` of core_v0.19.0 does."""
    loaded: dict[str, Any] = {COMMON_OBJECT: io.BytesIO()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return loaded[COMMON_OBJECT][0]


def test_both_forms_hold_the_same_and_stay_what_they_are(tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", tp=2), write_new(tmp_path / "new", tp=2)
    assert not (new.directory / COMMON_FILE).exists()
    assert (new.values.extra[FORM], old.values.extra[FORM]) == (COMMON_OBJECT, COMMON_FILE)
    assert verify(new, 1) == verify(old, 1)
    assert list(compare(old, new, 1)) == []
    assert new.values.param_groups == old.values.param_groups
    assert new.values.scheduler == old.values.scheduler
    again = write(tmp_path / "again", source=new, tp=1)
    assert again.values.extra[FORM] == COMMON_OBJECT
    assert list(compare(again, old, 1)) == []


def test_torch_finds_the_object_where_megatron_looks_for_it(tmp_path: Path) -> None:
    new = write_new(tmp_path / "new")
    assert load_as_megatron(new.directory)["iteration"] == 3
    marker = json.loads((new.directory / "metadata.json").read_text())
    assert marker == {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    again = write(tmp_path / "again", source=new, tp=2)
    common = load_as_megatron(again.directory)
    assert common["opt_param_scheduler"] == {"num_steps": 3}
    assert common["optimizer"]["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)


def test_an_iteration_without_a_file_is_found_by_its_own_name(tmp_path: Path) -> None:
    new = write_new(tmp_path / "new")
    assert run("verify", new.directory) == 0
    assert run("inspect", new.directory) == 0
    assert run("reshard", new.directory, tmp_path / "named", "--tp", 2) == 0
    assert list(compare(open_checkpoint(tmp_path / "named"), new, 1)) == []


def test_the_form_is_that_of_the_targets_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "old"), write_new(tmp_path / "new")
    for source, reference, form in (("new", "old", COMMON_FILE), ("old", "new", COMMON_OBJECT)):
        target = tmp_path / f"{source}-for-{reference}"
        assert run("reshard", tmp_path / source, target, "--args-from", tmp_path / reference) == 0
        assert open_checkpoint(target).values.extra[FORM] == form
        recorded = "older releases look for common.pt" in capsys.readouterr().out
        assert recorded == (form == COMMON_OBJECT)


def flip_a_bit(directory: Path) -> None:
    path = directory / "__0_0.distcp"
    path.write_bytes(path.read_bytes().replace(b"opt_param_scheduler", b"opt_param_schedulfr", 1))


def rename_the_folder(directory: Path) -> None:
    directory.rename(directory.with_name("iter_0000005"))
    (directory.parent / "latest_checkpointed_iteration.txt").write_text("5")


def lose_the_marker(directory: Path) -> None:
    (directory / "metadata.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_a_bit, "Bad CRC-32"),
        (rename_the_folder, "common_state/shard_0_1 is of iteration 3, not 5"),
        (lose_the_marker, "so the save was interrupted"),
    ],
)
def test_a_damaged_one_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(write_new(tmp_path / "new").directory)
    with pytest.raises(RefusedError, match=words):
        open_checkpoint(tmp_path / "new")
