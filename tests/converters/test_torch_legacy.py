"""Megatron's legacy layout without a framework: round trips, flat buffers, what is refused."""

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.converters import pickles
from scalai.converters.consistency import verify
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.grad_buffers import BufferMember, bucket_numel, lay_buffer
from scalai.converters.torch_archive import NewTensor, content_of, lay_out_archive
from scalai.core.errors import RefusedError
from support.checkpoints import GPT_GROUPS, GPT_LAYERS, GPT_SHAPES, convert, gpt, lay_out
from support.damage import change_tree
from support.rejects import ITERATION


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize(
    "degrees",
    [{}, {"tp": 2}, {"pp": 2}, {"tp": 4, "pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 4, "tp": 2}],
    ids=str,
)
def test_every_element_survives_any_degrees(
    tmp_path: Path, degrees: dict[str, Any], is_split: bool
) -> None:
    arguments: dict[str, Any] = {"overlap_grad_reduce": True, "ddp_bucket_size": 300}
    legacy = convert(gpt(**arguments), tmp_path / "legacy", is_split=is_split, **degrees)
    assert {axis: legacy.values.degrees[axis] for axis in degrees} == degrees
    assert legacy.values.is_split is is_split
    assert verify(legacy, workers=0) == verify(gpt(), workers=0)


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("rows", [16, 64], ids=lambda rows: f"{rows}-rows")
def test_without_arguments_a_tied_embedding_is_told_by_its_content(
    tmp_path: Path, rows: int, is_split: bool
) -> None:
    # A tensor-parallel rank has fewer elements of the smaller one than are compared elsewhere.
    made = gpt({**GPT_SHAPES, "embedding.word_embeddings.weight": (rows, 8)})
    source = replace(made, values=replace(made.values, arguments=None))
    legacy = convert(source, tmp_path / "legacy", is_split=is_split, tp=2, pp=2)
    assert verify(legacy, workers=0) == verify(source, workers=0)


@pytest.mark.parametrize("is_split", [True, False])
def test_extra_state_of_transformer_engine_is_no_parameter(tmp_path: Path, is_split: bool) -> None:
    legacy = convert(gpt(), tmp_path / "legacy", is_split=is_split, tp=2)
    linear = "decoder.layers.0.self_attention.linear_"
    # As its releases write it: an object, or a tensor, which is empty without fp8.
    entries = {
        f"{linear}qkv._extra_state": NewTensor("U8", (0,), b""),
        f"{linear}proj._extra_state": NewTensor("U8", (3,), b"fp8"),
        "decoder.layers.0.mlp.linear_fc1._extra_state": io.BytesIO(b"fp8"),
        "decoder.layers.0.mlp.linear_fc2._extra_state": None,
    }
    shutil.copytree(tmp_path / "legacy", tmp_path / "theirs")
    for folder in (tmp_path / "theirs" / ITERATION).iterdir():
        change_tree(
            folder / "model_optim_rng.pt",
            lambda tree: {**tree, "model": {**tree["model"], **entries}},
        )
    again = open_checkpoint(tmp_path / "theirs")
    assert verify(again, workers=0) == verify(legacy, workers=0)
    logged = [note for note in again.notes if "_extra_state" in note]
    assert logged == [
        "decoder.layers.*.self_attention.linear_proj._extra_state is not carried",
        "decoder.layers.*.mlp.linear_fc1._extra_state is not carried",
    ]


def test_layers_that_predict_further_tokens_are_refused(tmp_path: Path) -> None:
    convert(gpt(), tmp_path / "legacy", pp=2)
    entry = {"mtp.layers.0.eh_proj.weight": NewTensor("F32", (8, 16), bytes(512))}
    change_tree(
        tmp_path / "legacy" / ITERATION / "mp_rank_00_001" / "model_optim_rng.pt",
        lambda tree: {**tree, "model": {**tree["model"], **entry}},
    )
    with pytest.raises(RefusedError, match=r"\(MTP\), .* --ckpt-format torch_dist"):
        open_checkpoint(tmp_path / "legacy")
    source = gpt({**GPT_SHAPES, "mtp.layers.0.eh_proj.weight": (8, 16)})
    with pytest.raises(RefusedError, match=r"mtp\..*Write torch_dist instead"):
        lay_out(source, "torch", pp=2)


def test_extra_state_travels_by_layer_in_torch_dist(tmp_path: Path) -> None:
    made = gpt()
    key = "decoder.layers.self_attention.linear_qkv._extra_state/shard_"
    kept = {
        f"{key}{n}_{GPT_LAYERS}": content_of(lay_out_archive([io.BytesIO(b"fp8")])) for n in (0, 3)
    }
    source = replace(made, values=replace(made.values, extra={"objects": kept}))
    converted = convert(source, tmp_path / "dist", "torch_dist", tp=2, pp=2)
    objects = converted.values.extra["objects"]
    assert {name: data for name, data in objects.items() if "_extra_state" in name} == kept


def test_experts_are_found_under_their_own_numbers(tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in GPT_SHAPES.items() if "mlp.linear_fc" not in name}
    for layer in range(GPT_LAYERS):
        mlp = f"decoder.layers.{layer}.mlp"
        shapes[f"{mlp}.router.weight"] = (4, 8)
        for expert in range(4):
            shapes[f"{mlp}.experts.experts.{expert}.linear_fc1.weight"] = (8, 8)
            shapes[f"{mlp}.experts.experts.{expert}.linear_fc2.weight"] = (8, 4)
    source = gpt(shapes)
    groups = [{**g, "is_expert_parallel": flag} for flag in (False, True) for g in GPT_GROUPS]
    source = replace(source, values=replace(source.values, param_groups=tuple(groups)))
    for is_split in (True, False):
        folder = tmp_path / f"split-{is_split}"
        legacy = convert(source, folder, is_split=is_split, tp=2, ep=2)
        assert (folder / ITERATION / "mp_rank_01_001").is_dir()
        assert verify(legacy, workers=0) == verify(source, workers=0)


def test_parameters_lie_in_reverse_order_and_buckets_lose_their_padding() -> None:
    members = [BufferMember(100), BufferMember(70), BufferMember(10), BufferMember(200)]
    assert lay_buffer(members, None) == ([448, 320, 256, 0], 548)
    # The first bucket ends behind 200 elements, and the second begins there, unaligned.
    assert lay_buffer(members, 200) == ([392, 264, 200, 0], 492)
    # A tied parameter is alone, behind the padding that was meant for it.
    tied = [BufferMember(100, is_shared=True), *members[1:], BufferMember(10, is_shared=True)]
    assert lay_buffer(tied, None) == ([458, 330, 266, 10, 0], 558)


@pytest.mark.parametrize(
    ("given", "pp_rank", "chunk", "expected"),
    [
        ({}, 0, 0, None),
        ({"overlap_grad_reduce": True}, 0, 0, 40_000_000),
        ({"overlap_grad_reduce": True}, 1, 0, None),
        ({"overlap_grad_reduce": True}, 0, 1, None),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 5}, 0, 0, 5),
        ({"overlap_grad_reduce": True, "ddp_num_buckets": 4}, 0, 0, 25),
    ],
)
def test_buckets_are_as_large_as_megatrons_arguments_say(
    given: dict[str, Any], pp_rank: int, chunk: int, expected: int | None
) -> None:
    assert bucket_numel(given, dp=2, pp_rank=pp_rank, chunk=chunk, numel=100) == expected


def test_modules_whose_order_is_unknown_are_not_written_by_order(tmp_path: Path) -> None:
    source = gpt({**GPT_SHAPES, "decoder.layers.0.mixer.weight": (8,)})
    with pytest.raises(RefusedError, match=r"mixer\.weight.*order.*torch_dist"):
        lay_out(source, "torch")


def test_new_streams_are_those_of_torch_behind_a_seed() -> None:
    import torch

    from scalai.converters.megatron.rng_states import new_rng_states

    streams = new_rng_states(77, tp_rank=1, pp_rank=2, ep_rank=0, is_cuda=False)
    for stream, seed in (
        (streams["torch_rng_state"], 277),
        (streams["rng_tracker_states"]["data-parallel-rng"], 277),
        (streams["rng_tracker_states"]["model-parallel-rng"], 277 + 2718 + 1),
    ):
        expected = torch.Generator().manual_seed(seed).get_state()
        assert stream.content == expected.numpy().tobytes()


def test_foreign_values_of_the_arguments_stay_what_they_are(tmp_path: Path) -> None:
    enum = pickles.foreign("megatron.core.transformer.enums", "AttnBackend")(3)
    legacy = convert(gpt(attention_backend=enum), tmp_path / "legacy", tp=2, dp=3)
    arguments = legacy.values.arguments or {}
    assert arguments["attention_backend"] == enum
    assert (arguments["tensor_model_parallel_size"], arguments["world_size"]) == (2, 6)


def test_a_note_says_how_the_vocabulary_keeps_its_rows() -> None:
    target = lay_out(gpt(), "torch", tp=4)
    assert any("16 rows: load with --make-vocab-size-divisible-by 4" in n for n in target.notes)
