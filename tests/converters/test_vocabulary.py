"""A vocabulary of 50257 tokens, padded for other degrees of tensor parallelism."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.converters.checkpoint import Checkpoint
from scalai.converters.consistency import verify
from scalai.converters.describe import read_tensor
from scalai.converters.layouts import open_checkpoint
from scalai.converters.recorded import fingerprints
from support.checkpoints import carry, state
from support.command import reported, run
from support.gpt_shapes import HEADS, gpt

VOCABULARY = 50257
ROWS = {1: 50304, 2: 50432, 4: 50688, 8: 51200}
"""As Megatron pads 50257 at each TP."""
EMBEDDING = "embedding.word_embeddings.weight"
KINDS = ("param", "exp_avg", "exp_avg_sq")
SMALL = 2
"""Hidden size."""


def model(tp: int, **arguments: Any) -> Checkpoint:
    """Return a state of a model with an untied output layer, padded for a TP."""
    shapes = {EMBEDDING: (ROWS[tp], SMALL), "output_layer.weight": (ROWS[tp], SMALL)}
    source = state(shapes=shapes)
    values = replace(
        source.values,
        degrees={"tp": tp, "pp": 1},
        arguments={
            "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1,
            "padded_vocab_size": ROWS[tp], "make_vocab_size_divisible_by": 128, **arguments,
        },
        counters={**source.values.counters, "padded_vocab_size": ROWS[tp]},
    )  # fmt: skip
    return replace(source, values=values)


def saved_in(directory: Path, source: Checkpoint, layout: str = "torch_dist") -> Path:
    carry(source, directory, layout)
    return directory


@pytest.mark.parametrize("layout", ["torch_dist", "torch"])
@pytest.mark.parametrize(("old", "new"), [(1, 2), (1, 4), (2, 8), (8, 1)])
def test_50257_tokens_at_other_tp(tmp_path: Path, layout: str, old: int, new: int) -> None:
    source = model(old, vocab_size=VOCABULARY)
    saved = saved_in(tmp_path / "saved", source, layout)
    assert run("reshard", saved, tmp_path / "stays", "--tp", new) == 0
    assert verify(open_checkpoint(tmp_path / "stays"), 1) == fingerprints(source, 1)
    assert run("reshard", saved, tmp_path / "out", "--tp", new, "--repad") == 0
    out = open_checkpoint(tmp_path / "out")
    verify(out, 1)
    arguments = out.values.arguments or {}
    assert arguments["padded_vocab_size"] == ROWS[new]
    assert out.values.counters["padded_vocab_size"] == ROWS[new]
    for name in (EMBEDDING, "output_layer.weight"):
        for kind in KINDS:
            before = read_tensor(source, f"{kind}/{name}")[1]
            after = read_tensor(out, f"{kind}/{name}")[1]
            kept = min(ROWS[old], ROWS[new])
            assert after.shape == (ROWS[new], SMALL)
            np.testing.assert_array_equal(after[:kept], before[:kept])
            assert not after[kept:].any()


def test_there_and_back_only_rows_of_no_token_are_lost(tmp_path: Path) -> None:
    source = model(1, vocab_size=VOCABULARY)
    saved = saved_in(tmp_path / "saved", source)
    said = reported("reshard", saved, tmp_path / "exact", "--repad", VOCABULARY)
    assert any("losses will differ" in text for texts in said.values() for text in texts)
    assert run("reshard", tmp_path / "exact", tmp_path / "back", "--repad") == 0
    back = open_checkpoint(tmp_path / "back")
    before, after = (read_tensor(one, f"exp_avg/{EMBEDDING}")[1] for one in (source, back))
    np.testing.assert_array_equal(after[:VOCABULARY], before[:VOCABULARY])
    assert after.shape == before.shape and not after[VOCABULARY:].any()


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ({}, ("--repad",), "does not say how many are of tokens"),
        ({"vocab_size": VOCABULARY}, ("--repad", 50256), "tokens would have none"),
        ({"vocab_size": 50305}, ("--repad", 50400), "tokens would have none"),
        ({"vocab_size": VOCABULARY}, ("--repad", 50433, "--tp", 2), "tp=2 does not divide"),
    ],
)
def test_a_vocabulary_that_is_unknown_or_too_large_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    arguments: dict[str, Any], options: tuple[object, ...], words: str,
) -> None:  # fmt: skip
    saved = saved_in(tmp_path / "saved", model(1, **arguments))
    assert run("reshard", saved, tmp_path / "out", *options) == 3
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_says_how_many_tokens_there_are(tmp_path: Path) -> None:
    saved = saved_in(tmp_path / "saved", model(1))
    (tmp_path / "job.toml").write_text(f"[megatron]\nvocab_size = {VOCABULARY}\n")
    options = "--tp", 4, "--repad", "--args-from", tmp_path / "job.toml"
    assert run("reshard", saved, tmp_path / "out", *options) == 0
    out = open_checkpoint(tmp_path / "out")
    assert read_tensor(out, f"param/{EMBEDDING}")[0].shape == (ROWS[4], SMALL)


def test_hugging_faces_files_get_the_rows_of_tokens_alone(tmp_path: Path) -> None:
    shapes = {**gpt(), EMBEDDING: (20, gpt()[EMBEDDING][1])}
    source = state(shapes=shapes)
    arguments = {"vocab_size": 17, "padded_vocab_size": 20, "num_attention_heads": HEADS}
    source = replace(source, values=replace(source.values, arguments=arguments))
    saved = saved_in(tmp_path / "saved", source)
    options = "--to", "safetensors", "--mapping", "gpt", "--repad"
    assert run("reshard", saved, tmp_path / "out", *options) == 0
    tensor, values = read_tensor(open_checkpoint(tmp_path / "out"), "param/transformer.wte.weight")
    assert tensor.shape[0] == 17
    np.testing.assert_array_equal(values, read_tensor(source, f"param/{EMBEDDING}")[1][:17])
