"""What is not read is called by its name, with a way out; what is left out is said."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scalai.converters.checkpoint import Checkpoint, WriteOptions
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.converters.megatron.torch_dist_metadata import Extent, write_metadata
from scalai.core.errors import RefusedError
from scalai.launch import cli
from support.checkpoints import state, write
from support.damage import merge


def run(*arguments: object) -> int:
    """Run ``scalai`` and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    return int(ended.value.code or 0)


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


def keeping_fsdp_arguments(path: Path) -> None:
    """Make a directory that holds Megatron's arguments beside its keys."""
    content = b"PK args ckpt_format fsdp_dtensor"
    extents = {key: Extent("__0_0.distcp", 0, len(content)) for key in (*MEGATRON, "args")}
    (path / ".metadata").write_bytes(write_metadata([], extents))
    (path / "__0_0.distcp").write_bytes(content)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_keys("tok_embeddings.weight"), "by torchtitan.*export its weights"),
        (with_keys("anything"), "not by Megatron as torch_dist"),
        (with_keys("common_state/shard_0_1"), r"there is no metadata\.json\. Use an older one"),
        (keeping_fsdp_arguments, "--ckpt-format fsdp_dtensor.*Megatron-Bridge export"),
        (with_keys(*MEGATRON), "--ckpt-format torch_dcp.*--ckpt-format torch_dist"),
        (with_files("pytorch_model_fsdp_0/.metadata"), "Accelerate with FSDP.*merge-weights"),
        (with_files("iter_0000003_0_local.pt"), "nvidia-resiliency-ext.*save a global one"),
        (with_files("adapter_config.json", "adapter_model.safetensors"), "PEFT.*merge_and_unload"),
        (with_files("pytorch_model-00001-of-00002.bin"), "save_pretrained, which writes"),
        (with_files("weights/.metadata", "context/model.yaml"), "NeMo 2"),
        (with_files("embedding.word_embeddings.weight/.zarray"), "zarr backend"),
        (with_files("model.pt"), r"torch\.save.*safetensors\.torch\.save_file"),
    ],
)
def test_other_layouts_are_called_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None], words: str
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


def test_files_of_others_beside_a_checkpoint_are_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "source").directory
    assert open_checkpoint(tmp_path / "source").notes == ()
    with_files("run_config.yaml", "train_state.pt")(directory)
    (note,) = open_checkpoint(tmp_path / "source").notes
    assert note == "not carried: Megatron-Bridge's run_config.yaml, train_state.pt"


def test_a_trainers_own_optimizer_is_not_read_and_that_is_said(tmp_path: Path) -> None:
    weights = write(tmp_path / "weights", "safetensors")
    assert weights.notes == ()
    (tmp_path / "weights" / "optimizer.pt").write_bytes(b"")
    read = open_checkpoint(tmp_path / "weights")
    assert "optimizer.pt of a Trainer without DeepSpeed is not read" in read.notes[0]
    target = layout_named("safetensors").lay_out(read, WriteOptions({}))
    assert target.notes == read.notes, "0 tensors are left out"


def test_a_vocabulary_that_tp_does_not_divide_names_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "source")
    assert run("reshard", tmp_path / "source", tmp_path / "new", "--tp", 3) == 3
    assert "vocabulary of 8 rows. Give --repad" in capsys.readouterr().err


def with_arguments(directory: Path, **given: object) -> None:
    import argparse

    merge(open_checkpoint(directory).directory / "common.pt", {"args": argparse.Namespace(**given)})


def test_a_dense_models_experts_are_cut_as_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    keep = [
        row
        for row in range(len(source.placed.collection))
        if source.placed.collection.box(row)[0].name.startswith(("param/", "exp_avg/"))
    ]
    from scalai.converters.checkpoint import FilePiece, place

    boxes = [(row, *source.placed.collection.box(row)) for row in keep]
    pieces = [
        FilePiece(
            replace(tensor, name=tensor.name.replace("exp_avg/", "momentum_buffer/")), box,
            source.placed.files[source.placed.file[row]].path, 0,
        )
        for row, tensor, box in boxes
    ]  # fmt: skip
    (group,) = source.values.param_groups
    group = {**{key: group[key] for key in group if key not in ("betas", "eps")}, "momentum": 0.9}
    values = replace(source.values, param_groups=(group,), is_split=False)
    return replace(source, placed=place(pieces, source.placed.files), values=values)


def test_an_optimizer_that_counts_no_steps_gets_none(tmp_path: Path) -> None:
    written = write(tmp_path / "sgd", source=without_steps(), tp=2)
    kinds = {tensor.name.partition("/")[0] for tensor in written.placed.collection.tensors}
    assert kinds == {"param", "momentum_buffer"}
    assert run("verify", tmp_path / "sgd", write(tmp_path / "b", source=written).directory) == 0
