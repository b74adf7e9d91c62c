"""What is refused: each kind of bad input has a file that provokes it, an exit code and words."""

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import state, write

from scalai.converters import pickles
from scalai.converters.checkpoint import Checkpoint, ReadOptions
from scalai.converters.layouts import open_checkpoint
from scalai.converters.torch_dist_metadata import StoredKey, read_metadata, write_metadata
from scalai.core.errors import RefusedError
from scalai.core.region import Box
from scalai.launch import cli

ITERATION = "iter_0000003"


def truncate(directory: Path) -> None:
    file = directory / ITERATION / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 1)


def lose_a_file(directory: Path) -> None:
    (directory / ITERATION / "__1_0.distcp").unlink()


def lose_the_common_part(directory: Path) -> None:
    (directory / ITERATION / "common.pt").write_bytes(b"PK\x03\x04")


def interrupt_the_save(directory: Path) -> None:
    (directory / ITERATION / "metadata.json").unlink()


def lose_the_metadata(directory: Path) -> None:
    (directory / ITERATION / ".metadata").unlink()


def cut_the_metadata(directory: Path) -> None:
    path = directory / ITERATION / ".metadata"
    path.write_bytes(path.read_bytes()[:-200])


def change_embedding(directory: Path, change: Callable[[StoredKey], StoredKey]) -> None:
    """Write the metadata again with another entry of the embedding, which has two chunks."""
    path = directory / ITERATION
    metadata = read_metadata(path)
    key = "embedding.word_embeddings.weight"
    tensors = [change(tensor) if tensor.key == key else tensor for tensor in metadata.tensors]
    (path / ".metadata").write_bytes(write_metadata(tensors, metadata.objects))


def leave_a_hole(directory: Path) -> None:
    change_embedding(directory, lambda tensor: replace(tensor, chunks=tensor.chunks[1:]))


def overlap(directory: Path) -> None:
    def shift(tensor: StoredKey) -> StoredKey:
        first, second = tensor.chunks
        low = second.box.offset[0] - 1
        return replace(tensor, chunks=(first, replace(second, box=Box((low, 0), (4, 4)))))

    change_embedding(directory, shift)


def point_outside(directory: Path) -> None:
    path = directory / ITERATION
    metadata = read_metadata(path)
    first, *others = metadata.tensors
    shutil.copy(path / first.chunks[0].extent.file, directory / "stolen")
    chunks = tuple(
        replace(chunk, extent=replace(chunk.extent, file="../stolen")) for chunk in first.chunks
    )
    (path / ".metadata").write_bytes(
        write_metadata([replace(first, chunks=chunks), *others], metadata.objects)
    )


def link_outside(directory: Path) -> None:
    file = directory / ITERATION / "__1_0.distcp"
    shutil.move(file, directory.parent / "elsewhere")
    file.symlink_to(directory.parent / "elsewhere")


def mix_two_shapes(directory: Path) -> None:
    """Exchange the archives of two chunks."""
    path = directory / ITERATION
    metadata = read_metadata(path)
    by_key = {tensor.key: tensor for tensor in metadata.tensors}
    one = by_key["decoder.layers.mlp.linear_fc2.bias"]
    two = by_key["decoder.final_layernorm.weight"]
    moved = replace(one.chunks[0], extent=two.chunks[0].extent)
    by_key[one.key] = replace(one, chunks=(moved, *one.chunks[1:]))
    (path / ".metadata").write_bytes(write_metadata(by_key.values(), metadata.objects))


class _Evil:
    def __reduce__(self) -> object:
        return os.system, ("echo run > /tmp/this-must-not-be",)


def hide_a_command_in_the_metadata(directory: Path) -> None:
    (directory / ITERATION / ".metadata").write_bytes(pickle.dumps(_Evil()))


def hide_a_command_in_the_common_part(directory: Path) -> None:
    with zipfile.ZipFile(directory / ITERATION / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"iteration": _Evil()}))


def compress(directory: Path) -> None:
    path = directory / ITERATION / "common.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"iteration": 3}))


BAD: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "__1_0.distcp is truncated: it has"),
    (lose_a_file, "__1_0.distcp is missing"),
    (lose_the_common_part, "common.pt is damaged or truncated"),
    (interrupt_the_save, "Megatron writes it last, so the save was interrupted"),
    (lose_the_metadata, ".metadata cannot be read"),
    (cut_the_metadata, ".metadata holds a damaged pickle"),
    (leave_a_hole, "nobody holds 16 of the 32 elements of embedding.word_embeddings.weight"),
    (overlap, "nobody holds [7:8, 0:4]"),
    (point_outside, "outside of the checkpoint"),
    (link_outside, "is a link to outside of the checkpoint"),
    (mix_two_shapes, "Files of two checkpoints are mixed"),
    (hide_a_command_in_the_metadata, "posix.system, which no checkpoint"),
    (hide_a_command_in_the_common_part, "posix.system, which no checkpoint"),
    (compress, "is compressed; torch stores plainly"),
]


@pytest.mark.parametrize(("damage", "words"), BAD, ids=[damage.__name__ for damage, _ in BAD])
def test_a_damaged_checkpoint_is_refused_by_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    words: str,
) -> None:
    write(tmp_path / "source", tp=2)
    damage(tmp_path / "source")
    before = sorted(path for path in tmp_path.rglob("*"))
    for command in (["verify"], ["reshard", str(tmp_path / "new"), "--tp", "1"]):
        code, text = run(capsys, command[0], tmp_path / "source", *command[1:])
        assert code == 3
        assert words in text
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert not Path("/tmp/this-must-not-be").exists()


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
