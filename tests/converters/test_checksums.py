"""Damage is found by checksums of storages, of all or of the bytes read; by fingerprints, by marks
of ranks, by an older save."""

import contextlib
import io
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.converters import checksums as records
from scalai.converters import torch_archive
from scalai.converters.between.adapting import repadded
from scalai.converters.checkpoint import REPORT, Checkpoint
from scalai.converters.checksums import Checked, combined, find_records, storages_in
from scalai.converters.consistency import verify
from scalai.converters.dcp_metadata import Extent, read_objects
from scalai.converters.generation_layout import PARTS, StoredGeneration
from scalai.converters.journal import RunPart
from scalai.converters.layouts import open_checkpoint
from scalai.converters.torch_archive import check_members, read_archive, with_content
from scalai.converters.work import plan_work
from scalai.converters.zip_members import storages
from scalai.core.errors import ProofError, RefusedError
from scalai.core.tensors.fingerprint import CommitStatement
from scalai.store.files import map_file
from scalai.store.manifest import write_manifest
from support import command
from support.checkpoints import carry, lay_out, state, write
from support.command import Capsys, run
from support.rot import ROTS, flip, held, rename_archive, rot, stamp_checksums
from support.training.deepspeed_jobs import Job, Saver

pytestmark = pytest.mark.fault


def test_the_storages_of_every_archive_in_a_file_are_found(tmp_path: Path) -> None:
    import torch

    tensors = [torch.arange(5 + number, dtype=torch.float32) for number in range(4)]
    file = io.BytesIO()
    for number in range(0, 4, 2):  # as torch_dist writes them: one archive behind the other
        torch.save({"a": tensors[number], "b": tensors[number + 1]}, file)
    (tmp_path / "__0_0.distcp").write_bytes(file.getvalue())
    found = sorted(storages_in(tmp_path, "__0_0.distcp"), key=lambda stored: stored.begin)
    data = file.getvalue()
    assert [data[s.begin : s.begin + s.size_bytes] for s in found] == [
        tensor.numpy().tobytes() for tensor in tensors
    ]


def test_what_has_no_checksums_has_none(tmp_path: Path) -> None:
    import torch

    (tmp_path / "other").write_bytes(b"PK\x03\x04 but no archive")
    (tmp_path / "empty").write_bytes(b"")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.ones(3), tmp_path / "unchecked")
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("other", "empty", "unchecked"):
        assert list(storages_in(tmp_path, name)) == []


def test_a_damaged_directory_yields_nothing_outside_of_the_file(tmp_path: Path) -> None:
    import torch

    file = io.BytesIO()
    for number in range(2):
        torch.save({"a": torch.ones(5) * number}, file)
    data = file.getvalue()
    whole = list(storages(memoryview(data)))
    assert len(whole) == 2
    for at in range(len(data)):
        for value in (0, 0x7F, 0xFF):
            changed = data[:at] + bytes([value]) + data[at + 1 :]
            for member in storages(memoryview(changed)):
                assert 0 <= member.begin < member.begin + member.size_bytes <= len(data)
    for end in range(0, len(data), 7):
        assert len(list(storages(memoryview(data[:end])))) <= 1


LARGE = {
    "embedding.word_embeddings.weight": (1024, 512),
    "decoder.layers.0.self_attention.linear_proj.weight": (512, 1024),
    "decoder.layers.0.self_attention.linear_qkv.weight": (384, 512),
    "decoder.final_layernorm.weight": (512,),
}


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=3))
def test_the_checksums_of_parts_give_that_of_the_whole(
    one: bytes, two: bytes, three: bytes
) -> None:
    crc = combined(zlib.crc32(one), zlib.crc32(two), len(two))
    assert crc == zlib.crc32(one + two)
    assert combined(crc, zlib.crc32(three), len(three)) == zlib.crc32(one + two + three)


def test_the_checksum_of_many_zeros_is_that_of_few_often_combined() -> None:
    crc, size = zlib.crc32(bytes(1 << 10)), 1 << 10
    while size < 1 << 26:
        crc, size = combined(crc, crc, size), 2 * size
    assert crc == zlib.crc32(bytes(1 << 26))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two tensor-parallel ranks whose storages have checksums."""
    directory = tmp_path_factory.mktemp("saved")
    write(directory / "tp2", source=state(shapes=LARGE), tp=2)
    (directory / "tp2" / "scalai.json").unlink()
    assert stamp_checksums(directory) > len(LARGE)
    return directory / "tp2"


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are read for their checksums alone."""
    sizes: list[int] = []
    original = records.crcs_of

    def crcs(source: Checkpoint, gaps: Sequence[Any]) -> list[int]:
        sizes.extend(gap[2] for gap in gaps)
        return original(source, gaps)

    monkeypatch.setattr(records, "crcs_of", crcs)
    return sizes


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_what_is_cut_along_any_axis_is_checked_as_it_is_read(
    saved: Path, tmp_path: Path, filled: list[int], tp: int
) -> None:
    report = carry(open_checkpoint(saved), tmp_path / "new", tp=tp)
    assert report["checksums"]["records"] > 10
    assert report["checksums"]["records_without"] == report["checksums"]["files_without"] == 0
    assert filled == []


@pytest.mark.parametrize("kind", ["param", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("tp", [1, 8])
def test_a_bit_that_changed_anywhere_is_found(
    saved: Path, tmp_path: Path, tp: int, kind: str
) -> None:
    shutil.copytree(saved, tmp_path / "tp2")
    piece = held(open_checkpoint(tmp_path / "tp2"), kind)
    rot(piece, flip)
    with pytest.raises(ProofError, match=f"{piece.path.name}: bytes .*{piece.tensor}.*CRC-32"):
        carry(open_checkpoint(tmp_path / "tp2"), tmp_path / "new", tp=tp)
    assert [path.name for path in tmp_path.iterdir()] == ["tp2"]


def test_what_nobody_wants_of_a_record_is_read_for_its_checksum(
    saved: Path, tmp_path: Path, filled: list[int]
) -> None:
    """Rows of the vocabulary's padding that a smaller one leaves out."""
    report = carry(repadded(open_checkpoint(saved), 1000, 1000), tmp_path / "new")
    assert report["checksums"]["records"] > 10
    assert sum(filled) == 3 * 24 * 512 * 4


def test_parts_of_several_hosts_check_together(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "tp2")
    source = open_checkpoint(tmp_path / "tp2")
    assert carry(source, tmp_path / "good", part=RunPart(1, 2), tp=4) is None
    report = carry(source, tmp_path / "good", part=RunPart(2, 2), tp=4)
    assert report["checksums"]["records"] > 10
    rot(held(source, "exp_avg"), flip)
    assert carry(source, tmp_path / "bad", part=RunPart(1, 2), tp=4) is None
    with pytest.raises(ProofError, match="CRC-32"):
        carry(source, tmp_path / "bad", part=RunPart(2, 2), tp=4)
    assert not (tmp_path / "bad").exists() and not (tmp_path / ".bad.partial").exists()


def test_a_source_that_was_mended_goes_through_though_its_times_are_the_same(
    saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "tp2")
    source = open_checkpoint(tmp_path / "tp2")
    piece = held(source, "exp_avg")
    whole = piece.path.read_bytes()
    rot(piece, flip)
    times = piece.path.stat()
    with pytest.raises(ProofError, match="CRC-32"):
        carry(source, tmp_path / "new", tp=4)
    piece.path.write_bytes(whole)
    os.utime(piece.path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert carry(source, tmp_path / "new", tp=4)["resumed_tasks"] == 0


def test_files_saved_without_checksums_are_converted_and_it_is_said(
    saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "tp2")
    stamp_checksums(tmp_path / "tp2", are_taken=False)
    report = carry(open_checkpoint(tmp_path / "tp2"), tmp_path / "new", tp=1)
    assert report["checksums"]["records"] == 0
    assert report["checksums"]["records_without"] > 10
    logged = str(Checked(**report["checksums"]))
    assert "were saved without a CRC-32: damage in them is not seen" in logged


def test_what_a_conversion_wrote_is_checked_by_its_own_proof(saved: Path, tmp_path: Path) -> None:
    carry(open_checkpoint(saved), tmp_path / "one", tp=1)
    report = carry(open_checkpoint(tmp_path / "one"), tmp_path / "two", tp=2)
    logged = str(Checked(**report["checksums"]))
    assert logged == "all tensors have the fingerprints that were recorded beside the source"


def test_torch_files_saved_without_checksums_are_read(tmp_path: Path) -> None:
    import torch

    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(5), "b": 3}, tmp_path / "without")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save({"a": torch.arange(5), "b": 3}, tmp_path / "with")
    for name in ("without", "with"):
        path = tmp_path / name
        content = with_content(read_archive(path), map_file(path))["a"].content
        assert np.frombuffer(content, np.int64).tolist() == [0, 1, 2, 3, 4]
        data = path.read_bytes()
        path.write_bytes(data.replace(content, content[:8] + b"\7" + content[9:]))
    assert read_archive(tmp_path / "without")["b"] == 3
    with pytest.raises(RefusedError, match="with: with/data/0 is not what its CRC-32"):
        with_content(read_archive(tmp_path / "with"), map_file(tmp_path / "with"))


def test_what_a_tree_repeats_is_made_once_and_all_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def filled(tree: Any) -> Any:
        torch.save(tree, tmp_path / "tree")
        return with_content(read_archive(tmp_path / "tree"), map_file(tmp_path / "tree"))

    one: Any = torch.arange(5)
    first, *others = filled([[one] * 3] * 3)
    assert all(other is first for other in others) and first[0] is first[2]
    for _ in range(30):
        one = [one] * 10
    assert len(filled(one)) == 10
    one = []
    one.append(one)
    with pytest.raises(RefusedError, match="contains itself"):
        filled(one)
    monkeypatch.setattr(torch_archive, "MAX_VALUES_BYTES", 10_000)
    views = torch.zeros(1000, dtype=torch.uint8)
    with pytest.raises(RefusedError, match="10000 of all"):
        filled([views[at:] for at in range(11)])
    extents = {str(key): Extent("file", key, 64 << 20) for key in range(65)}
    with pytest.raises(RefusedError, match="bytes of objects that are no tensors, and at most"):
        read_objects(tmp_path, extents)


def test_what_is_carried_as_it_is_is_compared_with_its_checksums(tmp_path: Path) -> None:
    import torch

    for is_good in (True, False):
        file = io.BytesIO()
        torch.save({"state": torch.arange(5)}, file)
        data = file.getvalue()
        content = torch.arange(5).numpy().tobytes()
        file = io.BytesIO(data if is_good else data.replace(content, content[:-1] + b"\1"))
        with contextlib.nullcontext() if is_good else pytest.raises(RefusedError, match="Bad CRC"):
            check_members(file, "rng_state_0.pth")
    with pytest.raises(RefusedError, match=r"random_states_0.* is damaged"):
        check_members(io.BytesIO(data[:-60]), "random_states_0.pkl")
    check_members(io.BytesIO(b"a tokenizer"), "tokenizer.model")


def test_an_object_that_torch_cannot_read_is_refused(tmp_path: Path) -> None:
    import torch

    file = io.BytesIO()
    torch.save([{"a": torch.arange(4), "b": 3}], file)
    data, refused = file.getvalue(), 0
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        (tmp_path / "file").write_bytes(changed)
        try:
            read_objects(tmp_path, {"an object": Extent("file", 0, len(data))})
        except RefusedError as error:
            assert "an object" in str(error) and "damaged" in str(error)
            refused += 1
            continue
        (value,) = torch.load(io.BytesIO(changed))
        assert value["b"] == 3 and value["a"].tolist() == [0, 1, 2, 3], at
    assert refused > len(data) // 4


def test_bytes_behind_the_last_archive_do_not_hide_the_checksums(
    saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "tp2")
    source = open_checkpoint(tmp_path / "tp2")
    for path in source.directory.glob("*.distcp"):
        with open(path, "ab") as file:
            file.write(bytes(512))
    checksums = carry(open_checkpoint(tmp_path / "tp2"), tmp_path / "good", tp=1)["checksums"]
    assert checksums["records"] > 10 and not checksums["files_without"]
    rot(held(source, "exp_avg"), flip)
    with pytest.raises(ProofError, match="CRC-32"):
        carry(open_checkpoint(tmp_path / "tp2"), tmp_path / "bad", tp=1)


def test_tensors_that_lie_in_no_storage_are_told_of(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "tp2")
    source = open_checkpoint(tmp_path / "tp2")
    path = source.directory / source.placed.files[0].path
    data = path.read_bytes()
    (last, *others) = storages(memoryview(data))
    at = data.index(b"PK\5\6", max(member.begin for member in others))
    assert at < last.begin
    path.write_bytes(data[:at] + bytes(4) + data[at + 4 :])  # behind them nothing is found
    target = lay_out(source, tp=1)
    found = find_records(source, plan_work(source, target, 1 << 20))
    assert found.bare_files == (path.name,)


STAGES = {1: Job(stage=1, world=2, precision="bf16"), 3: Job(stage=3, world=2)}


@pytest.mark.parametrize(
    ("stage", "change", "kind"),
    [
        *((1, change, "exp_avg") for change in ROTS),
        *((1, "a-bit", kind) for kind in ("main", "param", "exp_avg_sq")),
        *((3, "swapped", kind) for kind in ("param", "exp_avg", "exp_avg_sq")),
    ],
)
def test_damage_of_zeros_files_is_found_by_the_conversion_that_reads_it(
    save: Saver, tmp_path: Path, capsys: Capsys,
    stage: int, change: str, kind: str,
) -> None:  # fmt: skip
    saved, _ = save(STAGES[stage])
    shutil.copytree(saved / "global_step3", tmp_path / "global_step3")
    piece = held(open_checkpoint(tmp_path / "global_step3"), kind)
    rot(piece, ROTS[change])
    assert run("reshard", tmp_path / "global_step3", tmp_path / "out", "--dp", 3) == 4
    logged = capsys.readouterr().err
    assert piece.tensor in logged or "contradicts itself" in logged, logged
    if kind.startswith("exp_avg"):
        assert piece.path.name in logged and "are not what their CRC-32 was taken of" in logged
        assert piece.tensor in logged and "use another checkpoint" in logged
        code, said = command.logged(capsys, "verify", tmp_path / "global_step3")
        assert code == 4 and piece.path.name in said and piece.tensor in said
    assert [path.name for path in tmp_path.iterdir()] == ["global_step3"]


def test_files_saved_without_checksums_are_converted_and_it_is_said_of_bit_rot(
    save: Saver, tmp_path: Path, capsys: Capsys
) -> None:
    saved, _ = save(STAGES[1])
    tag = tmp_path / "global_step3"
    shutil.copytree(saved / "global_step3", tag)
    assert run("reshard", tag, tmp_path / "checked", "--dp", 3) == 0
    logged = capsys.readouterr().out
    assert "records have the CRC-32 that was saved with them" in logged
    assert "saved without" not in logged
    assert run("verify", tag) == 0
    assert "CRC-32" not in capsys.readouterr().out
    stamp_checksums(tag, are_taken=False)
    assert run("reshard", tag, tmp_path / "out", "--dp", 3) == 0
    assert "records were saved without a CRC-32" in capsys.readouterr().out
    assert run("verify", tag) == 0
    assert "records were saved without a CRC-32" in capsys.readouterr().out


NAME = "exp_avg/decoder.final_layernorm.weight"


def test_a_tensor_that_is_not_what_was_committed_is_found(tmp_path: Path) -> None:
    found = dict(verify(write(tmp_path / "saved", "scalai"), 1))
    (tmp_path / "saved" / REPORT).unlink()
    stored = open_checkpoint(tmp_path / "saved").values.extra[PARTS]
    assert isinstance(stored, StoredGeneration)
    (part,), (place,) = stored.generation.hosts, stored.generation.directories
    assert place is not None
    write_manifest(place, replace(part, committed=CommitStatement(("offline",), found)))
    assert verify(open_checkpoint(tmp_path / "saved"), 1) == found
    assert run("inspect", "--verify", tmp_path / "saved") == 0

    wrong = CommitStatement(("offline",), {**found, NAME: found[NAME] ^ 1})
    write_manifest(place, replace(part, committed=wrong))
    source = open_checkpoint(tmp_path / "saved")
    with pytest.raises(ProofError, match=f"1 tensors are not what .* was written: {NAME}"):
        verify(source, 1)
    assert run("inspect", "--verify", tmp_path / "saved") == 4
    with pytest.raises(ProofError, match=f"1 tensors are not what .* was written: {NAME}"):
        carry(source, tmp_path / "new", pp=2)
    assert not (tmp_path / "new").exists()


def exchange(tag: Path) -> None:
    """Exchange the optimizer's files of two ranks."""
    one, two = sorted(tag.glob("*_optim_states.pt"))
    one.rename(tag / "aside")
    two.rename(one)
    (tag / "aside").rename(two)


def rename_archives(tag: Path, name: str = "archive", devices: bool = False) -> None:
    """Have all files saved under one name, from the CPU or from a GPU a rank."""
    for path in tag.glob("*.pt"):
        rank = int("_rank_1_" in path.name)
        rename_archive(path, name, f"cuda:{rank}" if devices else "cpu")


@pytest.mark.parametrize(
    ("stage", "mark", "words"),
    [
        (3, "name", "was saved as zero_pp_rank_1_mp_rank_00_optim_states.pt, by another rank"),
        (1, "name", "was saved as bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt, by another rank"),
        (3, "device", "was saved from cuda:1, and zero_pp_rank_0_mp_rank_00_model_states.pt"),
        (3, "padding", "has moments where rank 1 has padding"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "reshard"])
def test_optimizer_files_of_two_ranks_that_were_exchanged_are_refused(
    save: Saver, tmp_path: Path, capsys: Capsys,
    stage: int, mark: str, words: str, command: str,
) -> None:  # fmt: skip
    saved, _ = save(STAGES[stage])
    tag = tmp_path / "global_step3"
    shutil.copytree(saved / "global_step3", tag)
    if mark != "name":
        rename_archives(tag, devices=mark == "device")
    exchange(tag)
    out = [tmp_path / "out", "--dp", 3] if command == "reshard" else []
    assert run(command, tag, *out) == 3
    logged = capsys.readouterr().err
    assert words in logged and "Copy them again under their own names" in logged, logged


NO_COPY = "stage 3 keeps no second copy"


@pytest.mark.parametrize(
    ("stage", "names", "devices", "is_recorded"),
    [
        (3, "", False, False), (3, "archive", True, False), (3, "archive", False, True),
        (1, "archive", False, False),
    ],
)  # fmt: skip
def test_where_nothing_tells_the_ranks_of_stage_3_apart_it_is_said(
    save: Saver, tmp_path: Path, capsys: Capsys,
    stage: int, names: str, devices: bool, is_recorded: bool,
) -> None:  # fmt: skip
    saved, _ = save(STAGES[stage])
    tag = tmp_path / "global_step3"
    shutil.copytree(saved / "global_step3", tag)
    if names:
        rename_archives(tag, names, devices)
    assert run("verify", tag) == 0
    assert (NO_COPY in capsys.readouterr().out) == is_recorded
    assert run("reshard", tag, tmp_path / "out", "--dp", 3) == 0
    assert (NO_COPY in capsys.readouterr().out) == is_recorded


def repeat(older: Path, newer: Path, kind: str) -> str:
    """Give a tensor of a save the bytes that it has in an older one; return its name."""
    one, two = (held(open_checkpoint(path), kind) for path in (older, newer))
    assert one.tensor == two.tensor and one.size_bytes == two.size_bytes
    data = one.path.read_bytes()[one.begin : one.begin + one.size_bytes]
    with open(two.path, "r+b") as file:
        file.seek(two.begin)
        file.write(data)
    return two.tensor


@pytest.fixture(params=["deepspeed", "megatron"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str]:
    """A folder with two saves of a job, and their names."""
    there = tmp_path / "there"
    if request.param == "deepspeed":
        save: Saver = request.getfixturevalue("save")
        saved, _ = save(Job(stage=2, world=1))
        shutil.copytree(saved, there)
        (there / "latest").write_text("global_step6")
        return there, "global_step3", "global_step6"
    there.mkdir()
    for step in (3, 6):
        write(tmp_path / f"of-{step}", source=state(step))
        name = f"iter_{step:07d}"
        shutil.move(tmp_path / f"of-{step}" / name, there / name)
    (there / "latest_checkpointed_iteration.txt").write_text("6")
    return there, "iter_0000003", "iter_0000006"


def test_saves_of_a_job_that_trained_repeat_nothing(
    root: tuple[Path, str, str], capsys: Capsys
) -> None:
    assert run("verify", root[0]) == 0
    logged = capsys.readouterr().out
    assert (
        f"{root[2]} (" in logged
        and "trained tensors" not in logged
        and "not compared" not in logged
    )


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_a_save_that_repeats_an_older_ones_tensor_is_named(
    root: tuple[Path, str, str], capsys: Capsys, kind: str
) -> None:
    there, older, newer = root
    name = repeat(there / older, there / newer, kind)
    stamp_checksums(there)
    assert run("verify", there) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "trained tensors" in line]
    assert len(warnings) == 1
    assert f"{newer} repeats 1 of" in warnings[0] and f"tensors of {older}: {name}." in warnings[0]
    assert f"Go on from {older}" in warnings[0]
    assert run("verify", there / newer) == 0
    assert "trained tensors" not in capsys.readouterr().out


def test_a_save_between_that_cannot_be_read_is_named(
    root: tuple[Path, str, str], capsys: Capsys
) -> None:
    there, older, _ = root
    for path in (there / older).glob("*.*"):
        path.write_bytes(b"")
    assert run("verify", there) == 0
    assert f"{older} is not compared: " in capsys.readouterr().out
