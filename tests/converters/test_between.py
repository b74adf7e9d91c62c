"""Between frameworks: what a source does not say, rows of the vocabulary, registered tensors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.converters.between.crossing import to_deepspeed_scale, to_megatron_scale, with_rates
from scalai.converters.between.megatron_described import schedule_of, shape_arguments
from scalai.converters.checkpoint import (
    Checkpoint,
    CheckpointFile,
    FilePiece,
    parameters_of,
    place,
    unite,
)
from scalai.converters.consistency import verify
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.describe import read_tensor
from scalai.converters.layouts import open_checkpoint
from scalai.converters.recorded import fingerprints
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import whole
from support.checkpoints import carry, state, write
from support.command import Capsys, logged, reported, run
from support.gpt_shapes import FFN, GROUPS, HEADS, HIDDEN, VOCABULARY, WIDTH, Shapes, gpt, llama

MEGATRON = f"""
[megatron]
num_attention_heads = {HEADS}
lr = 0.01
global_batch_size = 4
train_iters = 20
"""
DEEPSPEED = """
[deepspeed.config]
gradient_clipping = 1.0
[[deepspeed.group]]
[[deepspeed.group]]
parameters = ["*.bias", "*norm.weight", "*layernorm.weight", "*.ln_?.weight"]
"""


def megatron(directory: Path, shapes: Shapes, layout: str = "torch_dist", **arguments: Any) -> Path:
    """Write a state of two parameter groups as Megatron would."""
    source = state(shapes=shapes)
    group = source.values.param_groups[0]
    groups = group, {**group, "wd_mult": 0.0, "weight_decay": 0.0}
    known = {
        "num_attention_heads": HEADS,
        **source.values.counters,
        **arguments,
    }
    values = replace(source.values, param_groups=groups, arguments=known)
    carry(replace(source, values=values), directory, layout)
    return directory


JOB = DeepSpeedJob("tag", (), (), {}, None, {}, {}, (), (), {}, {}, False, False)
LAYOUTS = ["deepspeed_zero0", "deepspeed_zero1", "deepspeed_zero3", "deepspeed_universal"]


@pytest.mark.parametrize(
    ("names", "shapes", "there", "back"),
    [
        *(("gpt", gpt(), layout, "torch_dist") for layout in LAYOUTS),
        ("gpt_neox", gpt(is_tied=False, positions=False), "deepspeed_zero2", "torch"),
        ("llama", llama(), "deepspeed_zero3", "scalai"),
        ("llama", llama(is_tied=True, biases=True), "deepspeed_zero1", "torch_dist"),
    ],
)
def test_a_state_goes_to_deepspeed_and_back_by_files_alone(
    tmp_path: Path, names: str, shapes: Shapes, there: str, back: str
) -> None:
    grouped = {"group_query_attention": True, "num_query_groups": GROUPS}
    arguments: dict[str, Any] = grouped if names == "llama" else {}
    saved = megatron(tmp_path / "saved", shapes, **arguments)
    (tmp_path / "job.toml").write_text(MEGATRON + DEEPSPEED)
    options = "--mapping", names, "--args-from", tmp_path / "job.toml"
    out = reported("reshard", saved, tmp_path / "there", "--to", there, "--dp", 2, *options)
    for words in ("order of the parameters", "global_steps"):
        assert any(words in text for text in out["invented"])
    out = reported("reshard", tmp_path / "there", tmp_path / "back", "--to", back, *options)
    assert f"Megatron's argument hidden_size {HIDDEN} (by the tensors)" in out["invented"]
    assert "Megatron's argument seed 1234 (by default)" in out["invented"]
    assert not any("num_attention_heads" in text for text in out["invented"])
    assert {"ds_config", "DeepSpeed's lr_scheduler"} <= set(out["left out"])
    before, after = (open_checkpoint(tmp_path / name) for name in ("saved", "back"))
    assert verify(after, 1) == fingerprints(before, 1)
    assert after.values.step == before.values.step
    assert after.values.counters["consumed_train_samples"] == 4 * after.values.step
    assert run("verify", saved, tmp_path / "there", "--mapping", names) == 0


def test_rates_of_parameter_groups_travel_with_their_parameters(tmp_path: Path) -> None:
    saved = megatron(tmp_path / "saved", gpt())
    (tmp_path / "job.toml").write_text(DEEPSPEED)
    options = "--mapping", "gpt", "--args-from", tmp_path / "job.toml"
    reported("reshard", saved, tmp_path / "out", "--to", "deepspeed_zero1", "--dp", 1, *options)
    values = open_checkpoint(tmp_path / "out").values
    found = [(g["lr"], g["betas"], g["eps"], g["weight_decay"]) for g in values.param_groups]
    assert found == [(0.01, (0.9, 0.95), 1e-8, 0.1), (0.01, (0.9, 0.95), 1e-8, 0.0)]
    first, second = values.extra[STATE].groups
    assert first[:3] == (
        "transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight",
    )  # fmt: skip
    assert second[:2] == ("transformer.h.0.ln_1.weight", "transformer.h.0.ln_1.bias")
    assert values.extra[STATE].aliases == {"lm_head.weight": "transformer.wte.weight"}


def test_rates_that_do_not_agree_stay_and_are_listed() -> None:
    notes: list[str] = []
    decayed, plain = ({"lr": 0.1, "weight_decay": decay} for decay in (0.1, 0.0))
    (group,) = with_rates([{"weight_decay": 0.3, "eps": 1e-6}], [[decayed, plain]], notes)
    assert group == {"weight_decay": 0.3, "eps": 1e-6, "lr": 0.1}
    assert any(n.startswith("left out: weight_decay of parameter group 0") for n in notes)
    assert "invented: eps 1e-06 of parameter group 0" in notes


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (
            gpt(),
            {
                "num_query_groups": HEADS, "group_query_attention": False, "swiglu": False,
                "add_bias_linear": True, "normalization": "LayerNorm", "ffn_hidden_size": FFN,
                "position_embedding_type": "learned_absolute",
                "untie_embeddings_and_output_weights": False,
            },
        ),
        (
            llama(biases=True),
            {
                "num_query_groups": GROUPS, "group_query_attention": True, "swiglu": True,
                "add_bias_linear": False, "add_qkv_bias": True, "normalization": "RMSNorm",
                "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
            },
        ),
    ],
    ids=["gpt", "llama"],
)  # fmt: skip
def test_shapes_say_the_model(shapes: Shapes, expected: dict[str, Any]) -> None:
    found = shape_arguments(parameters_of(state(shapes=shapes)), HEADS)
    assert found.items() >= expected.items()
    assert (found["num_layers"], found["hidden_size"]) == (2, HIDDEN)
    assert (found["padded_vocab_size"], found["kv_channels"]) == (VOCABULARY, WIDTH)
    with pytest.raises(RefusedError, match="are not those of 5 heads"):
        shape_arguments(parameters_of(state(shapes=shapes)), 5)


def test_a_schedule_needs_a_rate_and_a_length() -> None:
    known = {"lr": 0.01, "global_batch_size": 4, "consumed_train_samples": 12}
    assert schedule_of(known) is None
    found = schedule_of({**known, "train_iters": 20, "lr_warmup_iters": 2, "weight_decay": 0.1})
    assert found is not None
    assert (found["num_steps"], found["lr_warmup_steps"], found["lr_decay_steps"]) == (12, 8, 80)
    assert (found["start_wd"], found["end_wd"], found["wd_incr_steps"]) == (0.1, 0.1, 80)
    samples = {**known, "train_samples": 100, "lr_warmup_fraction": 0.1, "global_batch_size": None}
    found = schedule_of(samples)
    assert found is not None
    assert (found["lr_warmup_steps"], found["lr_decay_steps"]) == (10.0, 100)


@pytest.mark.parametrize("good", [0, 1, 7])
def test_a_loss_scale_grows_when_it_would_have(good: int) -> None:
    scale = NewTensor("F32", (1,), b"\0\0\x80E")
    scaler = {"scale": scale, "growth_tracker": good, "hysteresis_tracker": 2}
    config = {"fp16": {"enabled": True, "loss_scale_window": 10}}
    entries = to_deepspeed_scale(scaler, config, step=20)
    assert entries is not None
    theirs = entries["loss_scaler"].state
    steps = next(
        step for step in range(1, 20)
        if theirs["cur_iter"] + step - 1 - theirs["last_overflow_iter"] - 1 == 10
    )  # fmt: skip
    assert steps == 10 - good
    job = replace(JOB, optimizer=entries)
    back = to_megatron_scale(job)
    assert back is not None
    assert back["scale"].content == scale.content
    assert (back["growth_tracker"], back["hysteresis_tracker"]) == (good, 2)
    assert to_deepspeed_scale(scaler, {"bf16": {"enabled": True}}, step=20) is None


@pytest.mark.parametrize(
    ("text", "options", "code", "words"),
    [
        (None, (), 3, "Pass --args-from with a DeepSpeed checkpoint"),
        ("[model]\n", (), 2, "['model'] mean nothing"),
        ("[deepspeed", (), 2, "is neither a checkpoint nor TOML"),
        ('[[deepspeed.group]]\nparameters = ["*.bias"]\n', (), 3, "is in no [[deepspeed.group]]"),
        (DEEPSPEED, ("--mapping", "llama"), 3, "have no name in"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    tmp_path: Path, capsys: Capsys,
    text: str | None, options: tuple[str, ...], code: int, words: str,
) -> None:  # fmt: skip
    saved = megatron(tmp_path / "saved", gpt())
    known: tuple[object, ...] = ()
    if text is not None:
        (tmp_path / "job.toml").write_text(text)
        known = "--args-from", tmp_path / "job.toml"
    command = saved, tmp_path / "out", "--to", "deepspeed_zero1", "--dp", 1, "--mapping", "gpt"
    assert run("reshard", *command, *known, *options) == code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_frameworks_without_a_mapping_and_a_reference_of_another_model_are_refused(
    tmp_path: Path, capsys: Capsys
) -> None:
    saved = megatron(tmp_path / "saved", gpt())
    other = megatron(tmp_path / "other", gpt(layers=3), num_layers=3)
    padded = megatron(
        tmp_path / "padded", {**gpt(), "embedding.word_embeddings.weight": (20, HIDDEN)}
    )
    untied = megatron(tmp_path / "untied", gpt(is_tied=False))
    (tmp_path / "job.toml").write_text(DEEPSPEED)
    there, out = tmp_path / "there", tmp_path / "out"
    to = "--to", "deepspeed_zero1", "--dp", 1
    names = "--mapping", "gpt", "--args-from"
    assert run("reshard", saved, there, *to, *names, tmp_path / "job.toml") == 0
    for code, words, source, *options in (
        (2, "Pass --mapping", saved, *to),
        (3, "give --repad ROWS", padded, *to, *names, there),
        (3, "num_layers is 3 in --args-from, and 2 by the tensors",
         there, "--to", "torch_dist", *names, other),
        (3, "tensors without a place in the DeepSpeed job's module", untied, *to, *names, there),
        (3, "is not DeepSpeed's", saved, *to, *names, other),
    ):  # fmt: skip
        found, text = logged(capsys, "reshard", source, out, *options)
        assert (found, words in text) == (code, True), text


TOKENS = 50257
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
    source = model(old, vocab_size=TOKENS)
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
    source = model(1, vocab_size=TOKENS)
    saved = saved_in(tmp_path / "saved", source)
    said = reported("reshard", saved, tmp_path / "exact", "--repad", TOKENS)
    assert any("losses will differ" in text for texts in said.values() for text in texts)
    assert run("reshard", tmp_path / "exact", tmp_path / "back", "--repad") == 0
    back = open_checkpoint(tmp_path / "back")
    before, after = (read_tensor(one, f"exp_avg/{EMBEDDING}")[1] for one in (source, back))
    np.testing.assert_array_equal(after[:TOKENS], before[:TOKENS])
    assert after.shape == before.shape and not after[TOKENS:].any()


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ({}, ("--repad",), "does not say how many are of tokens"),
        ({"vocab_size": TOKENS}, ("--repad", 50256), "tokens would have none"),
        ({"vocab_size": 50305}, ("--repad", 50400), "tokens would have none"),
        ({"vocab_size": TOKENS}, ("--repad", 50433, "--tp", 2), "tp=2 does not divide"),
    ],
)
def test_a_vocabulary_that_is_unknown_or_too_large_is_refused(
    tmp_path: Path, capsys: Capsys,
    arguments: dict[str, Any], options: tuple[object, ...], words: str,
) -> None:  # fmt: skip
    saved = saved_in(tmp_path / "saved", model(1, **arguments))
    assert run("reshard", saved, tmp_path / "out", *options) == 3
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_says_how_many_tokens_there_are(tmp_path: Path) -> None:
    saved = saved_in(tmp_path / "saved", model(1))
    (tmp_path / "job.toml").write_text(f"[megatron]\nvocab_size = {TOKENS}\n")
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


AVERAGE = Tensor("user/average", (4,), "F32")


def registered(tensor: Tensor = AVERAGE) -> Checkpoint:
    """Return a state in memory with a tensor that has no parameter."""
    content = np.arange(4, dtype="<f4").tobytes()
    piece = FilePiece(tensor, whole(tensor.shape), "(more)", 0)
    more = place([piece], [CheckpointFile("(more)", len(content), content)])
    source = state()
    return replace(source, placed=unite([source.placed, more]))


def test_a_generation_with_a_registered_tensor_is_verified_and_keeps_it(tmp_path: Path) -> None:
    source = write(tmp_path / "saved", "scalai", registered())
    assert AVERAGE.name in verify(source, 1)
    again = write(tmp_path / "again", "scalai", source)
    assert verify(again, 1) == verify(source, 1)


def test_another_layout_goes_without_it_and_says_so(tmp_path: Path, capsys: Capsys) -> None:
    write(tmp_path / "saved", "scalai", registered())
    whole_state = write(tmp_path / "other", "torch_dist")
    code, text = logged(
        capsys, "reshard", tmp_path / "saved", tmp_path / "new", "--to", "torch_dist", "--pp", 2
    )
    assert code == 0 and "left out user/average, which is no parameter" in text, text
    assert run("verify", tmp_path / "new", whole_state.directory) == 0


def test_what_has_no_parameter_and_was_not_registered_is_refused(tmp_path: Path) -> None:
    stray = replace(AVERAGE, name="exp_avg/average")
    with pytest.raises(RefusedError, match="has exp_avg of 'average', and no such parameter"):
        write(tmp_path / "saved", "scalai", registered(stray))
