"""States and weights go to Hugging Face's names and come back, by the shipped mapping files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from scalai.converters import safetensors_index
from scalai.converters.between.adapting import TargetRequest, adapted
from scalai.converters.between.mapping import find_mapping, read_mapping
from scalai.converters.between.translation import in_our_names, in_their_names, is_in_our_names
from scalai.converters.checkpoint import CONFIG, Checkpoint
from scalai.converters.describe import read_tensor
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.model_limits import Heads
from scalai.converters.recorded import fingerprints
from scalai.core.errors import RefusedError, UsageError
from support.checkpoints import carry, state, write
from support.gpt_shapes import (
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    WIDTH,
    Shapes,
    gpt,
    latent,
    llama,
    routed,
)

MODELS = [
    pytest.param("gpt", gpt(), Heads(HEADS), id="gpt"),
    pytest.param("gpt", gpt(is_tied=False), Heads(HEADS), id="gpt-untied"),
    pytest.param("gpt_neox", gpt(is_tied=False, positions=False), Heads(HEADS), id="neox"),
    pytest.param("llama", llama(), Heads(HEADS, GROUPS), id="llama"),
    pytest.param("qwen2", llama(is_tied=True, biases=True), Heads(HEADS, GROUPS), id="qwen2"),
    pytest.param("mixtral", routed(), Heads(HEADS, GROUPS), id="mixtral"),
    pytest.param("qwen2_moe", routed(is_shared=True), Heads(HEADS, GROUPS), id="shared"),
    pytest.param("qwen3_moe", routed(dense=[1]), Heads(HEADS, GROUPS), id="some-dense"),
    pytest.param("gemma", llama(is_tied=True), Heads(HEADS, GROUPS), id="gemma"),
    pytest.param("deepseek_v2", latent(is_third=False, rank=None), Heads(HEADS), id="latent"),
    pytest.param("deepseek_v3", latent(), Heads(HEADS), id="latent-queries"),
]


@pytest.mark.parametrize(("name", "shapes", "heads"), MODELS)
def test_weights_moments_and_steps_come_back_bit_for_bit(
    name: str, shapes: Shapes, heads: Heads
) -> None:
    source, mapping = state(shapes=shapes), read_mapping(find_mapping(name))
    theirs, _ = in_their_names(source, mapping, heads)
    assert not is_in_our_names(theirs, mapping)
    assert not any("decoder" in tensor.name for tensor in theirs.placed.collection.tensors)
    back, _ = in_our_names(theirs, mapping, heads)
    assert fingerprints(back, 1) == fingerprints(source, 1)


@pytest.mark.parametrize("kind", ["param", "exp_avg"])
def test_gpt2_has_weights_transposed_and_queries_above_keys_above_values(kind: str) -> None:
    source, mapping = state(shapes=gpt()), read_mapping(find_mapping("gpt"))
    theirs, _ = in_their_names(source, mapping, Heads(HEADS))
    for part in ("weight", "bias"):
        ours = read_tensor(source, f"{kind}/decoder.layers.1.self_attention.linear_qkv.{part}")[1]
        by_head = ours.reshape(HEADS, 3, WIDTH, *ours.shape[1:])
        expected = np.concatenate([by_head[:, at].reshape(-1, *ours.shape[1:]) for at in range(3)])
        name = f"{kind}/transformer.h.1.attn.c_attn.{part}"
        np.testing.assert_array_equal(read_tensor(theirs, name)[1], expected.T)
    up = read_tensor(source, f"{kind}/decoder.layers.0.mlp.linear_fc1.weight")[1]
    np.testing.assert_array_equal(
        read_tensor(theirs, f"{kind}/transformer.h.0.mlp.c_fc.weight")[1], up.T
    )


def test_moments_of_queries_keys_and_values_are_cut_as_the_weight() -> None:
    source, mapping = state(shapes=llama()), read_mapping(find_mapping("llama"))
    theirs, _ = in_their_names(source, mapping, Heads(HEADS, GROUPS))
    rows = read_tensor(source, "exp_avg_sq/decoder.layers.0.self_attention.linear_qkv.weight")[1]
    by_group = rows.reshape(GROUPS, -1, WIDTH, HIDDEN)
    queries = HEADS // GROUPS
    for part, expected in {
        "q_proj": by_group[:, :queries], "k_proj": by_group[:, queries],
        "v_proj": by_group[:, queries + 1],
    }.items():  # fmt: skip
        name = f"model.layers.0.self_attn.{part}.weight"
        found = read_tensor(theirs, f"exp_avg_sq/{name}")[1]
        np.testing.assert_array_equal(found, expected.reshape(-1, HIDDEN))
        assert read_tensor(theirs, f"step/{name}")[1] == 3


def test_a_model_without_its_head_has_names_without_the_prefix() -> None:
    source, mapping = state(shapes=gpt()), read_mapping(find_mapping("gpt"))
    theirs, _ = in_their_names(source, mapping, Heads(HEADS))
    bare = renamed(theirs, "transformer.", "")
    assert not any("transformer" in tensor.name for tensor in bare.placed.collection.tensors)
    back, _ = in_our_names(bare, mapping, Heads(HEADS))
    assert fingerprints(back, 1) == fingerprints(source, 1)


def test_what_is_cut_over_ranks_is_cut_again(tmp_path: Path) -> None:
    source, mapping = state(shapes=gpt()), read_mapping(find_mapping("gpt"))
    carry(source, tmp_path / "tp2", tp=2)
    cut, _ = in_their_names(open_checkpoint(tmp_path / "tp2"), mapping, Heads(HEADS))
    whole, _ = in_their_names(source, mapping, Heads(HEADS))
    assert fingerprints(cut, 1) == fingerprints(whole, 1)


def test_parameters_stand_in_the_order_of_their_module() -> None:
    mapping = read_mapping(find_mapping("llama"))
    theirs, _ = in_their_names(state(shapes=llama(biases=True)), mapping, Heads(HEADS, GROUPS))
    kinds = (tensor.name.partition("/") for tensor in theirs.placed.collection.tensors)
    found = mapping.in_order(sorted(name for kind, _, name in kinds if kind == "param"))
    layer = [
        *(f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
        "self_attn.o_proj.weight",
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]
    assert found == [
        "model.embed_tokens.weight",
        *(f"model.layers.{number}.{name}" for number in range(2) for name in layer),
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_a_tensor_without_a_name_is_refused_unless_it_is_ignored() -> None:
    shapes = {**llama(), "decoder.layers.0.mlp.router.weight": (4, HIDDEN)}
    source, mapping = state(shapes=shapes), read_mapping(find_mapping("llama"))
    heads = Heads(HEADS, GROUPS)
    with pytest.raises(RefusedError, match=r"decoder\.layers\.0\.mlp\.router\.weight"):
        in_their_names(source, mapping, heads)
    known = replace(mapping, ignored=("decoder.layers.{layer}.mlp.router.weight",))
    theirs, _ = in_their_names(source, known, heads)
    assert any("left out: decoder.layers.0.mlp.router.weight" in note for note in theirs.notes)


def test_all_that_does_not_fit_is_named_at_once() -> None:
    mapping, heads = read_mapping(find_mapping("llama")), Heads(HEADS, GROUPS)
    theirs, _ = in_their_names(state(shapes=llama()), mapping, heads)
    for old, new in (
        ("layers.0.self_attn.o_proj", "layers.0.self_attn.sinks"),
        ("layers.1.self_attn.q_proj", "layers.1.self_attn.query"),
        ("input_layernorm", "norm_before"),
        ("model.norm", "model.last"),
    ):
        theirs = renamed(theirs, old, new)
    with pytest.raises(RefusedError) as refused:
        in_our_names(theirs, mapping, heads)
    nameless, missing = str(refused.value).split(" tensors are missing: ")
    for name in (
        "model.layers.0.self_attn.sinks.weight", "model.layers.1.self_attn.query.weight",
        "model.layers.*.norm_before.weight (2)", "model.last.weight",
    ):  # fmt: skip
        assert name in nameless, name
    for name in (
        "model.layers.1.self_attn.q_proj.weight", "model.norm.weight",
        "model.layers.{layer}.input_layernorm.weight",
    ):  # fmt: skip
        assert name in missing, name


@pytest.mark.parametrize(("name", "shapes"), [("mixtral", routed), ("deepseek_v3", latent)])
def test_norms_are_named_as_the_targets_modules_name_them(
    name: str, shapes: Callable[..., Shapes]
) -> None:
    heads = Heads(HEADS, GROUPS)
    mapping = read_mapping(find_mapping(name))
    of_te, of_megatron = (state(shapes=shapes(is_local=is_local)) for is_local in (False, True))
    theirs, _ = in_their_names(of_te, mapping, heads)
    again, _ = in_their_names(of_megatron, mapping, heads)
    assert fingerprints(again, 1) == fingerprints(theirs, 1)
    back, _ = in_our_names(theirs, mapping, heads, is_local=True)
    assert fingerprints(back, 1) == fingerprints(of_megatron, 1)


def test_a_missing_expert_is_missed_and_one_of_the_parts_too() -> None:
    shapes = {name: s for name, s in routed().items() if ".experts.experts.1." not in name}
    mapping, heads = read_mapping(find_mapping("qwen3_moe")), Heads(HEADS, GROUPS)
    theirs, _ = in_their_names(state(shapes=shapes), mapping, heads)
    theirs = replace(theirs, values=replace(theirs.values, framework="", extra={}))
    with pytest.raises(RefusedError, match="2 experts in layer 0, up to number 2"):
        in_our_names(theirs, mapping, heads)
    whole, _ = in_their_names(state(shapes=routed()), mapping, heads)
    one = renamed(whole, "layers.1.mlp.experts.2.up_proj", "layers.1.mlp.experts.2.u_proj")
    with pytest.raises(RefusedError, match=r"are missing: model\.layers\.1\..*2\.up_proj\.weight"):
        in_our_names(one, mapping, heads)


def test_layers_for_further_tokens_are_left_out_and_said() -> None:
    mapping, heads = read_mapping(find_mapping("deepseek_v3")), Heads(HEADS)
    source = state(shapes=latent())
    theirs, _ = in_their_names(source, mapping, heads)
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "n_routed_experts": 4}
    values = replace(theirs.values, framework="", extra={CONFIG: config})
    whole = renamed(replace(theirs, values=values), "layers.2.input_layernorm", "layers.2.enorm")
    back, _ = in_our_names(whole, mapping, heads)
    left = [note for note in back.notes if "further tokens" in note]
    assert len(left) == 1 and "model.layers.2.enorm.weight" in left[0]
    layers = {name.split(".layers.")[1][0] for name in fingerprints(back, 1) if ".layers." in name}
    assert layers == {"0", "1"}
    other = replace(values, extra={CONFIG: {**config, "num_nextn_predict_layers": 0}})
    with pytest.raises(RefusedError, match=r"has 3 layers, and config\.json says 2"):
        in_our_names(replace(whole, values=other), mapping, heads)


def test_tensors_that_suppose_other_arguments_are_refused(of_llama: Checkpoint) -> None:
    for name, arguments, words in (
        ("gemma", {"apply_layernorm_1p": False}, "apply_layernorm_1p is False"),
        ("llama", {"rotary_interleaved": True}, "rotary_interleaved is True"),
        ("torchtitan", {"rotary_interleaved": False}, "rotary_interleaved is False"),
        ("llama", {"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size is 32"),
    ):
        values = replace(of_llama.values, arguments={**ARGUMENTS, **arguments})
        request = TargetRequest("safetensors", read_mapping(find_mapping(name)))
        with pytest.raises(RefusedError, match=words):
            adapted(replace(of_llama, values=values), request)


def test_rows_without_a_token_are_said(of_llama: Checkpoint) -> None:
    values = replace(of_llama.values, arguments={**ARGUMENTS, "vocab_size": 13})
    request = TargetRequest("safetensors", read_mapping(find_mapping("llama")))
    weights, _ = adapted(replace(of_llama, values=values), request)
    assert any("16 rows for 13 tokens" in note for note in weights.notes)


def renamed(source: Checkpoint, old: str, new: str) -> Checkpoint:
    collection = source.placed.collection
    tensors = tuple(replace(t, name=t.name.replace(old, new)) for t in collection.tensors)
    placed = replace(source.placed, collection=replace(collection, tensors=tensors))
    return replace(source, placed=placed)


def test_heads_that_are_unknown_or_do_not_fit_are_named() -> None:
    source, mapping = state(shapes=llama()), read_mapping(find_mapping("llama"))
    with pytest.raises(UsageError, match=r"Add \[attention\] num_attention_heads"):
        in_their_names(source, mapping)
    with pytest.raises(UsageError, match="which 5 heads in 5 query groups do not divide"):
        in_their_names(source, mapping, Heads(5))


def test_a_mapping_of_another_model_and_a_wrong_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"none of that name among \['deepseek_v2', .*'gpt', .*'qwen3', .*\]"
    ):
        find_mapping("bert")
    path = tmp_path / "names.toml"
    for text, words in (
        ('[[tensor]]\nours = "a"\ntheirs = ["b", "c"]\n', "is no rule"),
        ('[[tensors]]\nours = "a"\n', r"\['tensors'\] mean nothing"),
        ("[[tensor", "is no mapping file"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_mapping(path)
    path.write_text('[[tensor]]\nours = "a"\ntheirs = "b"\n')
    with pytest.raises(UsageError, match="it is of another model"):
        is_in_our_names(state(), read_mapping(path))


ARGUMENTS = {
    "num_attention_heads": HEADS, "num_query_groups": GROUPS, "group_query_attention": True,
}  # fmt: skip


@pytest.fixture
def of_llama() -> Checkpoint:
    source = state(shapes=llama())
    return replace(source, values=replace(source.values, arguments=ARGUMENTS))


def export(source: Checkpoint, directory: Path, mapping: str | None = "llama") -> None:
    names = read_mapping(find_mapping(mapping)) if mapping else None
    source, _ = adapted(source, TargetRequest("safetensors", names))
    carry(source, directory, "safetensors")


def test_fused_tensors_are_cut_as_hugging_face_names_them(
    tmp_path: Path, of_llama: Checkpoint
) -> None:
    export(of_llama, tmp_path / "weights")
    found = load_file(tmp_path / "weights" / "model.safetensors")
    assert len(found) == 3 + 2 * 9
    gate_up = read_tensor(of_llama, "param/decoder.layers.0.mlp.linear_fc1.weight")[1]
    np.testing.assert_array_equal(found["model.layers.0.mlp.gate_proj.weight"], gate_up[:FFN])
    np.testing.assert_array_equal(found["model.layers.0.mlp.up_proj.weight"], gate_up[FFN:])


def test_weights_come_back_from_several_files(
    tmp_path: Path, of_llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_index, "FILE_BYTES", 2000)
    export(of_llama, tmp_path / "weights")
    assert len(list((tmp_path / "weights").glob("model-*.safetensors"))) > 2
    (tmp_path / "weights" / "config.json").write_text(
        f'{{"num_attention_heads": {HEADS}, "num_key_value_heads": {GROUPS}}}'
    )
    names = read_mapping(find_mapping("llama"))
    back, _ = adapted(open_checkpoint(tmp_path / "weights"), TargetRequest("torch_dist", names))
    expected = {n: v for n, v in fingerprints(of_llama, 1).items() if n.startswith("param/")}
    assert fingerprints(back, 1) == expected


def test_without_a_mapping_names_stay(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    export(source, tmp_path / "weights", None)
    back = open_checkpoint(tmp_path / "weights")
    expected = {n: v for n, v in fingerprints(source, 1).items() if n.startswith("param/")}
    assert fingerprints(back, 1) == expected
