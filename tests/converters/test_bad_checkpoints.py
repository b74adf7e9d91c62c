"""What is found in checkpoints that are whole file by file; what is refused of them is in
test_rejects.py."""

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.converters import pickles
from scalai.converters.checkpoint import Checkpoint, ReadOptions
from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import RefusedError
from scalai.launch import cli
from support.checkpoints import state, write

ITERATION = "iter_0000003"


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo run > /tmp/this-must-not-be",)


def test_files_of_two_iterations_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "source", tp=2)
    write(tmp_path / "other", source=replaced_step(state(step=7), 3), tp=2)
    name = f"{ITERATION}/__1_0.distcp"
    shutil.copy(tmp_path / "other" / name, tmp_path / "source" / name)
    (tmp_path / "source" / "scalai.json").unlink()  # as if Megatron had written it
    for command in (["verify"], ["reshard", str(tmp_path / "new")]):
        code, text = run(capsys, command[0], tmp_path / "source", *command[1:])
        assert code == 4
        assert "files of two checkpoints are mixed" in text
    assert not (tmp_path / "new").exists()


def test_a_proof_beside_the_source_that_does_not_hold_stops_the_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "source")
    names = [source.placed.collection.box(row)[0].name for row in range(len(source.placed.file))]
    row = names.index("exp_avg/decoder.final_layernorm.weight")
    path = source.directory / source.placed.files[source.placed.file[row]].path
    data = bytearray(path.read_bytes())
    data[int(source.placed.begin[row])] ^= 1
    path.write_bytes(data)
    code, text = run(capsys, "reshard", tmp_path / "source", tmp_path / "new")
    assert code == 4
    assert "exp_avg/decoder.final_layernorm.weight" in text
    assert not (tmp_path / "new").exists()


def test_a_directory_without_a_checkpoint_says_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stray.txt").write_text("")
    assert run(capsys, "verify", tmp_path)[0] == 3
    code, text = run(capsys, "verify", tmp_path / "nowhere")
    assert code == 2
    assert "does not exist" in text


def test_a_file_of_another_save_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "source", tp=2)
    (tmp_path / "source" / ITERATION / "__7_0.distcp").write_bytes(b"old")
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(tmp_path / "source")])
    assert not ended.value.code
    assert "__7_0.distcp is left over from another save" in capsys.readouterr().out


def test_of_several_iterations_the_tracker_or_the_user_chooses(tmp_path: Path) -> None:
    write(tmp_path / "source", source=state(step=3))
    write(tmp_path / "other", source=state(step=5))
    shutil.move(tmp_path / "other" / "iter_0000005", tmp_path / "source")
    assert open_checkpoint(tmp_path / "source").values.step == 3
    assert open_checkpoint(tmp_path / "source", ReadOptions(iteration=5)).values.step == 5
    with pytest.raises(RefusedError, match="holds no iteration 4"):
        open_checkpoint(tmp_path / "source", ReadOptions(iteration=4))


def test_trusted_classes_stay_stand_ins_and_are_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = pickle.dumps(_Evil())
    value = pickles.loads(data, "file", trust=True)
    assert isinstance(value, pickles.Foreign)
    assert value.path == ("posix", "system")
    assert "class=posix.system" in caplog.text
    assert not Path("/tmp/this-must-not-be").exists()


def replaced_step(checkpoint: Checkpoint, step: int) -> Checkpoint:
    """Return a checkpoint that claims to be of another step."""
    return replace(checkpoint, values=replace(checkpoint.values, step=step))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run ``scalai``; return its exit code and what it said."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return int(ended.value.code or 0), capsys.readouterr().err
