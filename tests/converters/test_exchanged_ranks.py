"""Files of ZeRO's ranks that were exchanged for each other are refused, or named where nothing
tells them apart."""

import shutil
from pathlib import Path

import pytest

from support.command import run
from support.rot import rename_archive
from support.training.deepspeed_jobs import Job, Saver

pytestmark = pytest.mark.fault

STAGES = {1: Job(stage=1, world=2, precision="bf16"), 3: Job(stage=3, world=2)}


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
    save: Saver, tmp_path: Path, capsys: pytest.CaptureFixture[str],
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
    save: Saver, tmp_path: Path, capsys: pytest.CaptureFixture[str],
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
