"""A save that repeats tensors of an older one of its job is named by ``verify``."""

import shutil
from pathlib import Path

import pytest

from scalai.converters.layouts import open_checkpoint
from support.checkpoints import state, write
from support.command import run
from support.rot import held, stamp_checksums
from support.training.deepspeed_jobs import Job, Saver

pytestmark = pytest.mark.fault


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
    root: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
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
    root: tuple[Path, str, str], capsys: pytest.CaptureFixture[str], kind: str
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
    root: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    there, older, _ = root
    for path in (there / older).glob("*.*"):
        path.write_bytes(b"")
    assert run("verify", there) == 0
    assert f"{older} is not compared: " in capsys.readouterr().out
