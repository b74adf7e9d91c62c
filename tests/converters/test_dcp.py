"""Trainings with FSDP2 go on from what is written, at any number of ranks; other frameworks' states
go there and come back."""

from pathlib import Path

import pytest

from scalai.converters.checkpoint import REPORT
from scalai.converters.consistency import compare, verify
from scalai.converters.layouts import open_checkpoint
from scalai.converters.sense import find_nonsense
from scalai.converters.torch_archive import read_archive_bytes
from support.checkpoints import open_in_order, write
from support.command import Capsys, logged
from support.rejects import MAKERS
from support.training.fsdp_worker import FsdpJob
from support.training.worker_pool import WorkerPool


def run(pool: WorkerPool, job: FsdpJob) -> list[float]:
    losses: list[float] = pool.run("fsdp_worker:train", [(job,)] * job.world)[0]
    return losses


@pytest.mark.parametrize(
    ("form", "optimizer"),
    [
        *((form, "adamw") for form in ("nested", "flat", "accelerate")),
        *((form, of) for form in ("nested", "flat") for of in ("amsgrad", "sgd", "lion")),
        ("nested", "plain_sgd"),
    ],
)
def test_a_training_goes_on_from_what_is_written(
    pool: WorkerPool, tmp_path: Path, capsys: Capsys, form: str, optimizer: str
) -> None:
    saved, new = tmp_path / "saved", tmp_path / "new"
    run(pool, FsdpJob(2, form, optimizer, save=str(saved)))
    code, text = logged(capsys, "reshard", saved, new, "--dp", 3, "--workers", 1)
    assert code == 0, text
    assert ("dataloader is the place in the data of 2 ranks" in text) == (form == "flat")
    assert open_checkpoint(new).values.step == 3
    assert list(find_nonsense(open_checkpoint(saved))) == []
    assert list(compare(open_checkpoint(saved), open_checkpoint(new), 0)) == []
    verify(open_checkpoint(new), 0)
    after = [run(pool, FsdpJob(3, form, optimizer, load=str(path))) for path in (saved, new)]
    assert after[0] == after[1]


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in (REPORT, "manifest.json")
    }


def content_of_file(data: bytes) -> str:
    return repr(read_archive_bytes(data, Path("file")) if data[:2] == b"PK" else data)


@pytest.mark.parametrize("made", [name for name in MAKERS if "dcp" not in name])
def test_a_state_of_another_framework_comes_back_as_it_was(tmp_path: Path, made: str) -> None:
    MAKERS[made](tmp_path / "whole")
    source = open_in_order(tmp_path / "whole")
    write(tmp_path / "dcp", "dcp", source, dp=3)
    there = open_checkpoint(tmp_path / "dcp")
    assert list(compare(source, there, 0)) == []
    assert there.values.framework == source.values.framework
    for name, of in (("direct", source), ("back", there)):
        write(tmp_path / name, source.layout, of)
    direct, back = files_of(tmp_path / "direct"), files_of(tmp_path / "back")
    assert direct.keys() == back.keys()
    for name, data in direct.items():
        assert data == back[name] or content_of_file(data) == content_of_file(back[name]), name
