"""Damaged DeepSpeed checkpoints are refused, by words that name the file and the way out."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.checksums import check_checksums
from scalai.converters.layouts import open_checkpoint
from scalai.launch import cli
from support.training.deepspeed_jobs import Job, Runner

Damage = Callable[[Path], None]

FIRST = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
SECOND = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
LATER = "global_step6"


@pytest.fixture(scope="module")
def saved(run_deepspeed: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of stage 1 on two ranks, with a later tag beside it."""
    directory = tmp_path_factory.mktemp("saved")
    run_deepspeed(Job(stage=1, world=2, save=str(directory)))
    return directory


def remove_a_rank(tag: Path) -> None:
    (tag / SECOND).unlink()


def remove_the_first_rank(tag: Path) -> None:
    (tag / FIRST).unlink()


def remove_the_model(tag: Path) -> None:
    (tag / "mp_rank_00_model_states.pt").unlink()


def mix_tags(tag: Path) -> None:
    shutil.copy(tag.parent / LATER / SECOND, tag / SECOND)


def truncate(tag: Path) -> None:
    data = (tag / SECOND).read_bytes()
    (tag / SECOND).write_bytes(data[: len(data) // 2])


def plant_a_class(tag: Path) -> None:
    import os

    import torch

    class Planted:
        def __reduce__(self) -> Any:
            return os.system, ("false",)

    torch.save({"optimizer_state_dict": Planted()}, tag / SECOND)


def add_a_model_parallel_rank(tag: Path) -> None:
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_01_model_states.pt")


def empty_a_file(tag: Path) -> None:
    (tag / "mp_rank_00_model_states.pt").write_bytes(b"")


DAMAGES: list[tuple[Damage, str]] = [
    (remove_a_rank, "was saved by 2 data-parallel ranks, and has optim_states.pt of 1"),
    (remove_the_first_rank, "has no file of data-parallel rank 0 (of 2"),
    (remove_the_model, "a rank's file is missing"),
    (mix_tags, f"{SECOND} has made 6.0 optimizer steps"),
    (truncate, f"{SECOND} is damaged or truncated"),
    (plant_a_class, "system, which no checkpoint of a known framework needs"),
    (add_a_model_parallel_rank, "and 0 beside mp_rank_01_model_states.pt"),
    (empty_a_file, "mp_rank_00_model_states.pt is damaged or truncated"),
]


@pytest.mark.parametrize(
    ("damage", "words"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES]
)
def test_damage_is_refused_with_words_and_exit_code_3(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Damage, words: str
) -> None:
    source = tmp_path / "damaged"
    shutil.copytree(saved, source)
    damage(source / "global_step3")
    with pytest.raises(SystemExit) as ended:
        cli.main(["reshard", str(source), str(tmp_path / "out"), "--dp", "3"])
    assert ended.value.code == 3
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_changed_bit_of_a_moment_is_named_by_its_checksum(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved / "global_step3", tmp_path / "global_step3")
    checkpoint = open_checkpoint(tmp_path / "global_step3")
    assert check_checksums(checkpoint, workers=0) > 10
    placed = checkpoint.placed
    row = next(
        row
        for row in range(len(placed.collection))
        if placed.collection.box(row)[0].name.startswith("exp_avg/")
        and placed.files[placed.file[row]].path == SECOND
    )
    with open(tmp_path / "global_step3" / SECOND, "r+b") as file:
        file.seek(int(placed.begin[row]) + 5)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(tmp_path / "global_step3")])
    assert ended.value.code == 4
    logged = capsys.readouterr().err
    assert SECOND in logged and "are not what their CRC-32 was taken of" in logged
    assert "exp_avg/" in logged


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ("tp", "nothing says along which dimension tensor-parallel ranks cut"),
        ("pp", "whose engine is no pipeline. Give --pp 1"),
        ("cp", "which has dp, tp, pp alone. Give --cp 1"),
    ],
)
def test_axes_that_a_job_does_not_have_are_refused(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], axis: str, words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["reshard", str(saved), str(tmp_path / "out"), f"--{axis}", "2"])
    assert ended.value.code == 3
    assert words in capsys.readouterr().err
