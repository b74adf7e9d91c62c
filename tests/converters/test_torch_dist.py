"""The layout ``torch_dist``: its common state, chains of optimizers, partly trained layers."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from scalai.converters.checkpoint import (
    Checkpoint,
    ReadOptions,
    place,
)
from scalai.converters.consistency import compare, verify
from scalai.converters.dcp_metadata import read_metadata
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.common_state import COMMON_FILE, COMMON_OBJECT, FORM, read_common
from scalai.converters.megatron.torch_dist_writer import LINKS
from scalai.converters.torch_archive import content_of, lay_out_archive
from scalai.core.errors import RefusedError
from support.checkpoints import GROUP, lay_out, newest, state, write
from support.command import Capsys, run
from support.damage import Damage
from support.rejects import lost, replaced


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


def test_the_form_is_that_of_the_targets_job(tmp_path: Path, capsys: Capsys) -> None:
    write(tmp_path / "old"), write_new(tmp_path / "new")
    for source, reference, form in (("new", "old", COMMON_FILE), ("old", "new", COMMON_OBJECT)):
        target = tmp_path / f"{source}-for-{reference}"
        assert run("reshard", tmp_path / source, target, "--args-from", tmp_path / reference) == 0
        assert open_checkpoint(target).values.extra[FORM] == form
        recorded = "older releases look for common.pt" in capsys.readouterr().out
        assert recorded == (form == COMMON_OBJECT)


def rename_the_folder(directory: Path) -> None:
    directory.rename(directory.with_name("iter_0000005"))
    (directory.parent / "latest_checkpointed_iteration.txt").write_text("5")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (replaced("__0_0.distcp", b"opt_param_scheduler", b"opt_param_schedulfr"), "Bad CRC-32"),
        (rename_the_folder, "common_state/shard_0_1 is of iteration 3, not 5"),
        (lost("metadata.json"), "so the save was interrupted"),
    ],
    ids=["bit", "iteration", "marker"],
)
def test_a_damaged_one_is_refused(tmp_path: Path, damage: Damage, words: str) -> None:
    damage(write_new(tmp_path / "new").directory)
    with pytest.raises(RefusedError, match=words):
        open_checkpoint(tmp_path / "new")


RATES = {**GROUP, "lr": 0.01, "weight_decay": 0.1}
MUON: dict[str, Any] = {**RATES, "momentum_beta": 0.95, "use_nesterov": True}
ADAM: dict[str, Any] = {**RATES, "betas": (0.9, 0.95), "eps": 1e-8}


def chained(*groups: dict[str, Any], links: tuple[int, ...] = ()) -> Checkpoint:
    source = state()
    extra = {LINKS: links} if links else {}
    values = replace(source.values, param_groups=groups, is_split=False, extra=extra)
    return replace(source, values=values)


def test_each_optimizer_of_a_chain_keeps_its_groups(tmp_path: Path) -> None:
    written = write(tmp_path / "out", source=chained(MUON, ADAM, ADAM, links=(1, 2)), tp=2)
    assert written.values.extra[LINKS] == (1, 2)
    assert written.values.param_groups == (MUON, ADAM, ADAM)
    muon, adam = read_common(written.directory, {}).content["optimizer"].values()
    assert muon["state"] == {}, "Muon counts no steps"
    assert list(adam["state"]) == ["common_step"]
    assert write(tmp_path / "again", source=written).values.extra[LINKS] == (1, 2)


def test_groups_that_say_nothing_get_those_at_their_place(tmp_path: Path) -> None:
    reference = write(tmp_path / "reference", source=chained(MUON, ADAM, links=(1, 1))).values
    written = write(tmp_path / "out", source=chained(RATES, RATES), reference=reference)
    assert written.values.param_groups == (MUON, ADAM)
    with pytest.raises(RefusedError, match="nor a momentum"):
        lay_out(chained(RATES), reference=reference)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (chained(MUON, ADAM), {}),
        (chained(MUON, ADAM, links=(1, 1)), {"is_split": True}),
        (chained(MUON, {**ADAM, "is_expert_parallel": True}, links=(1, 1)), {"ep": 2}),
    ],
    ids=["no links", "split over ranks", "other experts"],
)
def test_chains_that_would_be_others_are_refused(
    source: Checkpoint, options: dict[str, Any]
) -> None:
    with pytest.raises(RefusedError, match="several kinds of optimizers"):
        lay_out(source, **options)


def half_trained() -> Checkpoint:
    """Return a state whose layer 0 has no optimizer state, and objects by layer."""
    source = state()
    pieces = [
        piece
        for piece in map(source.placed.piece, range(len(source.placed.collection)))
        if piece.tensor.name.startswith("param/") or ".layers.0." not in piece.tensor.name
    ]
    names = (
        "decoder.layers.mlp.linear_fc2._extra_state/shard_1_2",
        "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_0.3_2.4",
        "output_layer._extra_state/shard_0_1",
    )
    objects = {name: content_of(lay_out_archive([number])) for number, name in enumerate(names)}
    values = replace(source.values, extra={"objects": objects})
    return replace(source, placed=place(pieces, source.placed.files), values=values)


def test_layers_of_which_some_are_trained_are_in_the_names(tmp_path: Path) -> None:
    source = half_trained()
    written = write(tmp_path / "out", source=source)
    assert list(compare(source, written, 1)) == []
    assert written.values.extra["content_metadata"]["non_homogeneous_layers"] is True
    metadata = read_metadata(written.directory)
    assert {
        "decoder.layers.1.mlp.linear_fc2._extra_state/shard_0_1",
        "decoder.layers.0.mlp.experts.experts.linear_fc1._extra_state/shard_3_4",
        "output_layer._extra_state/shard_0_1",
    } <= set(metadata.objects)
    keys = {stored.key for stored in metadata.tensors}
    assert "optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc2.weight" in keys
    assert "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc2.weight" not in keys


def test_layers_that_are_all_trained_stay_an_axis(tmp_path: Path) -> None:
    written = write(tmp_path / "out")
    assert "non_homogeneous_layers" not in written.values.extra["content_metadata"]
    keys = {stored.key for stored in read_metadata(written.directory).tensors}
    assert "decoder.layers.mlp.linear_fc2.weight" in keys


def test_of_several_iterations_the_tracker_or_the_user_chooses(tmp_path: Path) -> None:
    write(tmp_path / "source", source=state(step=3))
    write(tmp_path / "other", source=state(step=5))
    shutil.move(tmp_path / "other" / "iter_0000005", tmp_path / "source")
    assert open_checkpoint(tmp_path / "source").values.step == 3
    assert open_checkpoint(tmp_path / "source", ReadOptions(iteration=5)).values.step == 5
    with pytest.raises(RefusedError, match="holds no iteration 4"):
        open_checkpoint(tmp_path / "source", ReadOptions(iteration=4))
