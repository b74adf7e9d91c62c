"""Trainings with FSDP2 go on from what is written, at any number of ranks; other frameworks' states
go there and come back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from scalai.converters.checkpoint import REPORT
from scalai.converters.consistency import compare, verify
from scalai.converters.dcp_metadata import read_metadata
from scalai.converters.layouts import READ_ALONE, open_checkpoint
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
        write(tmp_path / name, READ_ALONE.get(source.layout, source.layout), of)
    direct, back = files_of(tmp_path / "direct"), files_of(tmp_path / "back")
    assert direct.keys() == back.keys()
    for name, data in direct.items():
        assert data == back[name] or content_of_file(data) == content_of_file(back[name]), name


ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(directory: Path, tree: Any) -> None:
    dcp.save(tree, checkpoint_id=directory, no_dist=True)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of two layers of one shape, behind a step of an optimizer of two groups."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = [{"params": [model[1].weight, model[0].weight]}, {"params": [model[0].bias]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@ALONE
def test_numbered_states_are_read_where_their_order_is_known(
    tmp_path: Path, capsys: Capsys
) -> None:
    model, optimizer = trained()
    weights = model.state_dict()
    save(tmp_path / "numbers", {"model": weights, "optimizer": optimizer.state_dict()})
    named = get_optimizer_state_dict(model, optimizer)
    save(tmp_path / "names", {"model": weights, "optimizer": named})
    (tmp_path / "order.toml").write_text(
        '[[deepspeed.group]]\nparameters = ["1.weight", "0.weight"]\n'
        '[[deepspeed.group]]\nparameters = ["0.bias"]\n'
    )
    for order in ("names", "order.toml"):
        new = tmp_path / f"by-{order}"
        code, text = logged(
            capsys, "reshard", tmp_path / "numbers", new, "--args-from", tmp_path / order
        )
        assert code == 0 and "get names, in the order given by --args-from" in text, text
        assert list(compare(open_checkpoint(tmp_path / "names"), open_checkpoint(new), 0)) == []
        again = get_optimizer_state_dict(model, optimizer)
        dcp.load({"optimizer": again}, checkpoint_id=new, no_dist=True)
    (tmp_path / "module.toml").write_text("[[deepspeed.group]]\n")
    (tmp_path / "short.toml").write_text('[[deepspeed.group]]\nparameters = ["0.bias"]\n')
    for order, words in (("", "get_optimizer_state_dict"), ("module", "by name, in the optimizer"),
                         ("short", "Correct the order")):  # fmt: skip
        options = ["--args-from", tmp_path / f"{order}.toml"] if order else []
        code, text = logged(capsys, "reshard", tmp_path / "numbers", tmp_path / "no", *options)
        assert (code, words in text) == (3, True), text


@ALONE
@pytest.mark.parametrize("is_flat", [False, True])
def test_a_tree_may_mix_nested_and_flattened_parts(tmp_path: Path, is_flat: bool) -> None:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    weights = model.state_dict()
    if is_flat:
        save(tmp_path / "mixed", {"app": {"model": weights}, "optimizer": states})
    else:
        save(tmp_path / "mixed", {**weights, "app": {"optimizer": states}, "step": 1})
    save(
        tmp_path / "plain", {"model": weights, "optim": get_optimizer_state_dict(model, optimizer)}
    )
    mixed = open_checkpoint(tmp_path / "mixed")
    assert list(compare(open_checkpoint(tmp_path / "plain"), mixed, 0)) == []
    write(tmp_path / "new", "dcp", mixed, dp=2)
    old, new = (read_metadata(tmp_path / name) for name in ("mixed", "new"))
    assert old.paths == new.paths
