"""Weights in Hugging Face's files: the safetensors library reads them, and they come back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from scalai.converters import safetensors_index
from scalai.converters.between.adapting import TargetRequest, adapted
from scalai.converters.between.mapping import find_mapping, read_mapping
from scalai.converters.checkpoint import Checkpoint
from scalai.converters.describe import read_tensor
from scalai.converters.layouts import open_checkpoint
from scalai.converters.recorded import fingerprints
from support.checkpoints import carry, state, write
from support.gpt_shapes import FFN, GROUPS, HEADS, HIDDEN, WIDTH
from support.gpt_shapes import llama as shapes_of_llama

ARGUMENTS = {
    "num_attention_heads": HEADS, "num_query_groups": GROUPS, "group_query_attention": True,
}  # fmt: skip


@pytest.fixture
def llama() -> Checkpoint:
    source = state(shapes=shapes_of_llama())
    return replace(source, values=replace(source.values, arguments=ARGUMENTS))


def export(source: Checkpoint, directory: Path, mapping: str | None = "llama") -> None:
    names = read_mapping(find_mapping(mapping)) if mapping else None
    source, _ = adapted(source, TargetRequest("safetensors", names))
    carry(source, directory, "safetensors")


def test_fused_tensors_are_cut_as_hugging_face_names_them(
    tmp_path: Path, llama: Checkpoint
) -> None:
    export(llama, tmp_path / "weights")
    found = load_file(tmp_path / "weights" / "model.safetensors")
    assert len(found) == 3 + 2 * 9
    name = "param/decoder.layers.1.self_attention.linear_qkv.weight"
    rows = read_tensor(llama, name)[1].reshape(GROUPS, -1, WIDTH, HIDDEN)
    queries = HEADS // GROUPS
    attention = "model.layers.1.self_attn"
    for part, expected in {
        "q_proj": rows[:, :queries], "k_proj": rows[:, queries], "v_proj": rows[:, queries + 1],
    }.items():  # fmt: skip
        weight = found[f"{attention}.{part}.weight"]
        np.testing.assert_array_equal(weight, expected.reshape(-1, HIDDEN))
    gate_up = read_tensor(llama, "param/decoder.layers.0.mlp.linear_fc1.weight")[1]
    np.testing.assert_array_equal(found["model.layers.0.mlp.gate_proj.weight"], gate_up[:FFN])
    np.testing.assert_array_equal(found["model.layers.0.mlp.up_proj.weight"], gate_up[FFN:])


def test_weights_come_back_from_several_files(
    tmp_path: Path, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_index, "FILE_BYTES", 2000)
    export(llama, tmp_path / "weights")
    assert len(list((tmp_path / "weights").glob("model-*.safetensors"))) > 2
    (tmp_path / "weights" / "config.json").write_text(
        f'{{"num_attention_heads": {HEADS}, "num_key_value_heads": {GROUPS}}}'
    )
    names = read_mapping(find_mapping("llama"))
    back, _ = adapted(open_checkpoint(tmp_path / "weights"), TargetRequest("torch_dist", names))
    expected = {n: v for n, v in fingerprints(llama, 1).items() if n.startswith("param/")}
    assert fingerprints(back, 1) == expected


def test_without_a_mapping_names_stay(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    export(source, tmp_path / "weights", None)
    back = open_checkpoint(tmp_path / "weights")
    expected = {n: v for n, v in fingerprints(source, 1).items() if n.startswith("param/")}
    assert fingerprints(back, 1) == expected
