"""Unreadable layouts are named with the way out; nothing is lost in silence."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scalai.converters.checkpoint import Checkpoint, place
from scalai.converters.dcp_metadata import Extent, write_metadata
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.beside_tensors import with_degrees
from scalai.converters.megatron.model_limits import limits_of
from scalai.converters.opening import short_layers
from scalai.core.degrees.degrees import Degrees, refusal
from scalai.core.errors import RefusedError
from support.checkpoints import carry, convert, gpt, lay_out, state, write
from support.command import Capsys, run
from support.damage import merge

pytestmark = pytest.mark.fault


def with_keys(*keys: str) -> Callable[[Path], None]:
    """Return what makes a directory of torch.distributed.checkpoint with these keys."""

    def make(path: Path) -> None:
        objects = {key: Extent("__0_0.distcp", 0, 1) for key in keys}
        (path / ".metadata").write_bytes(write_metadata([], objects))
        (path / "__0_0.distcp").write_bytes(b"x")

    return make


def with_files(*names: str) -> Callable[[Path], None]:
    """Return what makes empty files."""

    def make(path: Path) -> None:
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"")

    return make


MEGATRON = "checkpoint_version", "num_floating_point_operations_so_far"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_keys("common_state/shard_0_1"), r"there is no metadata\.json\. Use an older one"),
        (with_keys(*MEGATRON), "--ckpt-format torch_dcp.*--ckpt-format torch_dist"),
        (with_files("adapter_config.json", "adapter_model.safetensors"), "PEFT.*--merge-adapter"),
        (with_files("pytorch_model-00001-of-00002.bin"), "save_pretrained, which writes"),
        (with_files("weights/.metadata", "context/model.yaml"), "NeMo 2"),
        (with_files("embedding.word_embeddings.weight/.zarray"), "zarr backend"),
        (with_files("model.pt"), r"torch\.save.*safetensors\.torch\.save_file"),
    ],
)
def test_other_layouts_are_called_by_their_names(
    tmp_path: Path, capsys: Capsys, make: Callable[[Path], None], words: str
) -> None:
    make(tmp_path)
    with pytest.raises(RefusedError, match=words):
        open_checkpoint(tmp_path)
    assert run("inspect", tmp_path) == 3
    text = capsys.readouterr().err
    assert "holds no committed generation" in text
    assert "no checkpoint of a known layout (scalai, torch_dist" in text


def test_what_megatron_saved_as_torch_dcp_was_not_interrupted(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    with_keys(*MEGATRON)(tmp_path / "iter_0000003")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(RefusedError, match="--ckpt-format torch_dcp"):
        open_checkpoint(tmp_path)


def test_a_trainers_own_optimizer_is_not_read_and_that_is_said(tmp_path: Path) -> None:
    weights = write(tmp_path / "weights", "safetensors")
    assert weights.notes == ()
    (tmp_path / "weights" / "optimizer.pt").write_bytes(b"")
    (tmp_path / "weights" / "optimizer.bin").write_bytes(b"")
    (tmp_path / "weights" / "trainer_state.json").write_text('{"global_step": 4}')
    read = open_checkpoint(tmp_path / "weights")
    assert read.values.step == 4 and "optimizer.bin of Accelerate" in read.notes[1]
    assert "optimizer.pt of a Trainer without DeepSpeed is not read" in read.notes[0]
    target = lay_out(read, "safetensors")
    assert target.notes == read.notes, "0 tensors are left out"


def with_arguments(directory: Path, **given: object) -> None:
    import argparse

    merge(open_checkpoint(directory).directory / "common.pt", {"args": argparse.Namespace(**given)})


def test_a_dense_models_experts_are_cut_as_the_rest(tmp_path: Path, capsys: Capsys) -> None:
    write(tmp_path / "source", tp=2)
    with_arguments(tmp_path / "source", tensor_model_parallel_size=2, expert_tensor_parallel_size=2)
    assert run("reshard", tmp_path / "source", tmp_path / "new", "--tp", 1, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    target = next(line for line in lines if line["event"] == "target")
    assert (target["degrees"]["tp"], target["degrees"]["etp"]) == (1, 1)
    arguments = open_checkpoint(tmp_path / "new").values.arguments or {}
    assert arguments["expert_tensor_parallel_size"] == 1


def without_steps() -> Checkpoint:
    """Return a state of SGD: a momentum, and nothing that counts steps."""
    source = state()
    kept = [
        piece
        for piece in map(source.placed.piece, range(len(source.placed.collection)))
        if piece.tensor.name.startswith(("param/", "exp_avg/"))
    ]
    names = [piece.tensor.name.replace("exp_avg/", "momentum_buffer/") for piece in kept]
    pieces = [
        replace(piece, tensor=replace(piece.tensor, name=name))
        for piece, name in zip(kept, names, strict=True)
    ]
    (group,) = source.values.param_groups
    group = {**{key: group[key] for key in group if key not in ("betas", "eps")}, "momentum": 0.9}
    values = replace(source.values, param_groups=(group,), is_split=False)
    return replace(source, placed=place(pieces, source.placed.files), values=values)


def test_an_optimizer_that_counts_no_steps_gets_none(tmp_path: Path) -> None:
    written = write(tmp_path / "sgd", source=without_steps(), tp=2)
    kinds = {tensor.name.partition("/")[0] for tensor in written.placed.collection.tensors}
    assert kinds == {"param", "momentum_buffer"}
    assert run("verify", tmp_path / "sgd", write(tmp_path / "b", source=written).directory) == 0


def lion() -> Checkpoint:
    """Return a state of Lion: one moment, betas, and no count of steps."""
    made = state()
    placed = made.placed
    pieces = [placed.piece(row) for row in range(len(placed.collection))]
    kept = [of for of in pieces if not of.tensor.name.startswith(("exp_avg_sq/", "step/"))]
    return replace(made, placed=place(kept, placed.files))


@pytest.mark.parametrize("is_split", [False, True])
def test_lion_keeps_its_one_moment(tmp_path: Path, is_split: bool) -> None:
    source = lion()
    names = {tensor.name for tensor in source.placed.collection.tensors}
    convert(source, tmp_path / "a", "torch_dist", is_split=is_split)
    assert run("reshard", tmp_path / "a", tmp_path / "b", "--tp", 2) == 0
    for path in (tmp_path / "a", tmp_path / "b"):
        read = open_checkpoint(path)
        assert {tensor.name for tensor in read.placed.collection.tensors} == names
        assert run("verify", path) == 0


def change(file: Path, edit: Any) -> None:
    """Change what a file of torch's holds."""
    content = torch.load(file, weights_only=False)
    edit(content)
    torch.save(content, file)
    for report in file.parents[1].glob("scalai.json"):
        report.unlink()


def groups_of(content: Any) -> Any:
    return content["optimizer"]["optimizer"]["param_groups"]


def test_parameter_groups_that_count_other_steps_are_refused(tmp_path: Path) -> None:
    convert(gpt(), tmp_path / "a", "torch_dist", is_split=True)

    def edit(content: Any) -> None:
        groups_of(content)[0]["step"], groups_of(content)[-1]["step"] = 3.0, 5.0

    change(next((tmp_path / "a").glob("iter_*")) / "common.pt", edit)
    with pytest.raises(RefusedError, match=r"have made \[3\.0, 5\.0\] steps"):
        open_checkpoint(tmp_path / "a")


def test_groups_of_an_old_release_get_what_newer_ones_ask_for(tmp_path: Path) -> None:
    convert(gpt(), tmp_path / "a", "torch_dist", is_split=True)

    def edit(content: Any) -> None:
        for group in groups_of(content):
            group.pop("lr_mult")

    change(next((tmp_path / "a").glob("iter_*")) / "common.pt", edit)
    source = open_checkpoint(tmp_path / "a")
    target = lay_out(source, tp=2)
    assert any("have no lr_mult: 1.0" in note for note in target.notes)
    carry(source, tmp_path / "b", tp=2)
    common = torch.load(next((tmp_path / "b").glob("iter_*")) / "common.pt", weights_only=False)
    assert {group["lr_mult"] for group in groups_of(common)} == {1.0}


def test_the_optimizer_of_a_layer_wise_one_is_not_left_behind(tmp_path: Path) -> None:
    convert(gpt(), tmp_path / "a", "torch", is_split=False)
    rank = next((tmp_path / "a").glob("iter_*/mp_rank_00"))
    change(rank / "model_optim_rng.pt", lambda content: content.pop("optimizer"))
    assert any("weights alone" in note for note in open_checkpoint(tmp_path / "a").notes)
    torch.save({}, rank / "layer_wise_optimizer_0.pt")
    with pytest.raises(RefusedError, match=r"layer_wise_optimizer_0\.pt.*dist_muon"):
        open_checkpoint(tmp_path / "a")


def test_weights_without_an_optimizer_are_said_to_be_so(tmp_path: Path) -> None:
    convert(gpt(), tmp_path / "a", "torch_dist", is_split=True)
    change(
        next((tmp_path / "a").glob("iter_*")) / "common.pt",
        lambda content: content.pop("optimizer"),
    )
    source = open_checkpoint(tmp_path / "a")
    assert not any("no optimizer" in note for note in source.notes)  # its tensors are there
    carry(source, tmp_path / "w", "safetensors")
    carry(open_checkpoint(tmp_path / "w"), tmp_path / "b")
    (tmp_path / "b" / "layer_wise_optimizer_0.pt").write_bytes(b"")
    (note,) = (n for n in open_checkpoint(tmp_path / "b").notes if "no optimizer" in n)
    assert "layer_wise_optimizer_0.pt" in note


@pytest.mark.parametrize("layout", ["torch_dist", "torch"])
@pytest.mark.parametrize(
    ("arguments", "tp", "flag"),
    [
        ({"vocab_size": 16, "make_vocab_size_divisible_by": 8}, 2, None),
        ({"vocab_size": 14, "make_vocab_size_divisible_by": 16}, 2, 8),
        ({"vocab_size": 14, "make_vocab_size_divisible_by": 16}, 1, None),
        ({}, 2, 8),
    ],
)
def test_a_vocabulary_that_the_next_job_would_pad_otherwise_is_named(
    tmp_path: Path, layout: str, arguments: dict[str, Any], tp: int, flag: int | None
) -> None:
    source = gpt(**arguments)
    rows = next(t.shape[0] for t in source.placed.collection.tensors if "word_embed" in t.name)
    target = lay_out(source, layout, tp=tp)
    found = [note for note in target.notes if "stays padded" in note]
    assert rows == 16
    assert [f"--make-vocab-size-divisible-by {flag}," in note for note in found] == [True] * bool(
        flag
    )


def test_an_optimizer_of_two_kinds_is_muon_whoever_named_it() -> None:
    source = gpt()
    adam = source.values.param_groups[0]
    muon = {key: value for key, value in adam.items() if key not in ("betas", "eps")}
    values = replace(
        source.values, param_groups=({**muon, "momentum": 0.9}, adam), degrees={"tp": 1}
    )
    tensors = source.placed.collection.tensors
    assert [axis for axis, _, _ in limits_of(values, tensors).fixed] == ["tp"]
    assert not limits_of(source.values, tensors).fixed


def test_rows_of_experts_that_alternate_stay_on_their_ranks() -> None:
    source = gpt(moe_mlp_glu_interleave_size=32)
    values = replace(source.values, degrees={"tp": 2, "etp": 1})
    limits = limits_of(values, source.placed.collection.tensors)
    assert refusal(Degrees(tp=1, pp=1, dp=1), replace(limits, expert_tp=1)) is None
    why = refusal(Degrees(tp=2, pp=1, dp=1), replace(limits, expert_tp=2))
    assert why and why.startswith("etp=2 must stay 1: --moe-mlp-glu-interleave-size")


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["a.0.x", "a.1.x", "e"], None),
        (["a.0.x", "a.0.y", "a.1.x"], "a.1.y"),
        (["a.0.mlp", "a.1.experts.0.w", "a.1.experts.1.w"], None),
        (["a.0.x", "b.0.y"], None),
    ],
)
def test_a_layer_lacks_what_another_has_unless_it_has_its_own(
    names: list[str], missing: str | None
) -> None:
    assert next(short_layers(names), None) == missing


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["block.0.attention.bias", *(f"block.{n}.attention.q" for n in range(4))], None),
        (["net.0.weight", "net.0.bias", "net.2.weight"], None),
        ([f"a.{n}.mlp.{of}" for n in range(3) for of in "xy" if (n, of) != (1, "y")], "a.1.mlp.y"),
    ],
)
def test_what_one_layer_alone_has_no_other_is_warned_of(
    names: list[str], missing: str | None
) -> None:
    assert next(short_layers(names, is_usual=True), None) == missing


POINTERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")


@pytest.mark.parametrize("name", [*POINTERS, "model.safetensors", ".metadata"])
@pytest.mark.parametrize("kind", ["endless", "pipe", "long", "bytes"])
@pytest.mark.timeout(60)
def test_a_pointer_is_read_from_a_file_and_to_an_end(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "iter_0000001").mkdir()
    if kind == "endless":
        (tmp_path / name).symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(b"1" * 10**6 if kind == "long" else b"\xff\0\xfe")
    with pytest.raises(RefusedError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", ".metadata", "common.pt"])
@pytest.mark.timeout(60)
def test_a_pipe_in_a_files_place_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(RefusedError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["global_step3/x"], "there is no latest beside global_step3"),
        (["latest", "global_step2/x"], "latest names 'global_step3', which is not there"),
        (["latest", "global_step3/x"], r"global_step3 has no \*_model_states.pt"),
        (["latest", "global_step3/x", "a.pt"], r"global_step3 has no \*_model_states.pt"),
        (["a.safetensors", "b.safetensors"], "neither model.safetensors.index.json"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, files: list[str], words: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("global_step3")
    with pytest.raises(RefusedError, match=words):
        open_checkpoint(tmp_path)


def test_nothing_of_a_file_reaches_a_terminal_as_it_is(tmp_path: Path, capsys: Capsys) -> None:
    name = "w\x1b]0;owned\x07\x1b[31m\nrm -rf\u202e\ud800"
    text = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = len(text).to_bytes(8, "little") + text + b"\0\0\xc0\x7f"
    (tmp_path / "model.safetensors").write_bytes(data)
    run("inspect", tmp_path)
    run("verify", tmp_path)
    run("reshard", tmp_path, tmp_path / "b", "--to", "torch_dist")
    run("inspect", tmp_path, "--tensor", "no")
    shown = "".join(capsys.readouterr())
    assert r"w\x1b]0;owned\x07\x1b[31m\nrm -rf" in shown
    assert all(c.isprintable() or c == "\n" for c in shown) and "\nrm" not in shown


def test_arguments_of_uneven_stages_hold_for_as_many_stages_alone() -> None:
    stated = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3}
    assert with_degrees(stated, {"tp": 2}) == stated
    assert with_degrees(stated, {"pp": 1})["decoder_first_pipeline_num_layers"] is None


def test_a_directory_without_a_checkpoint_says_what_it_has(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "stray.txt").write_text("")
    assert run("verify", tmp_path) == 3
    assert "stray.txt" in capsys.readouterr().err
    assert run("verify", tmp_path / "nowhere") == 2
    assert "does not exist" in capsys.readouterr().err
