"""Equal tensors are not an equal model: what ``config.json`` says of one is read, and a model that
lacks something by it, or that Megatron does not compute, is refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.converters.between.config_described import described_config
from scalai.converters.between.mapping import find_mapping, named_mapping, read_mapping
from scalai.converters.between.megatron_described import shape_arguments, whole_arguments
from scalai.converters.between.model_config import config_arguments, contradictions
from scalai.converters.checkpoint import parameters_of
from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from support.checkpoints import state
from support.command import Capsys, run
from support.gpt_shapes import FFN, GROUPS, HEADS, WIDTH, Shapes, gpt, latent, llama, routed

pytestmark = pytest.mark.fault


def with_biases(shapes: Shapes) -> Shapes:
    """Return a model with biases of queries, keys and values."""
    biases = {name: s for name, s in llama(biases=True).items() if name.endswith("qkv.bias")}
    return {**shapes, **biases}


def with_query_norms(shapes: Shapes) -> Shapes:
    layers = (f"decoder.layers.{layer}.self_attention" for layer in range(2))
    names = (f"{layer}.{part}_layernorm.weight" for layer in layers for part in "qk")
    return {**shapes, **dict.fromkeys(names, (WIDTH,))}


ROPE = {"position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False}
NEOX = {"position_embedding_type": "rope", "swiglu": False, "add_bias_linear": True}
GPT = {**NEOX, "position_embedding_type": "learned_absolute"}
LLAMA = {"model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 4096}


def scaled(**rope: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_parameters": {"rope_theta": 500000.0, **rope}}


def arguments(config: Mapping[str, Any], shaped: Mapping[str, Any]) -> dict[str, Any]:
    return config_arguments(config, shaped, Path("hf"))[0]


@pytest.mark.parametrize(
    ("config", "shaped", "expected"),
    [
        (LLAMA, ROPE, {"rotary_base": 10000, "rotary_percent": 1.0, "swiglu": True}),
        ({**LLAMA, "rms_norm_eps": 1e-6}, ROPE, {"norm_epsilon": 1e-6}),
        ({**LLAMA, "rope_theta": 1e6}, ROPE, {"rotary_base": 1000000}),
        (scaled(rope_type="default"), ROPE, {"rotary_base": 500000}),
        (scaled(rope_type="linear", factor=2.0), ROPE, {"rotary_seq_len_interpolation_factor": 2}),
        (scaled(rope_type="llama3", factor=32.0), ROPE,
         {"use_rope_scaling": True, "rope_scaling_factor": 32.0}),
        ({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}, ROPE, {}),
        ({**LLAMA, "sliding_window": 4096}, ROPE, {"max_position_embeddings": 4096}),
        ({"model_type": "gpt_neox", "use_parallel_residual": False, "layer_norm_eps": 1e-5,
          "rotary_emb_base": 100}, NEOX,
         {"rotary_percent": 0.25, "rotary_base": 100, "bias_gelu_fusion": False}),
        ({"model_type": "gpt2"}, GPT, {"bias_gelu_fusion": True}),
        ({"model_type": "gpt2", "activation_function": "gelu", "attn_pdrop": 0.2}, GPT,
         {"bias_gelu_fusion": False, "attention_dropout": 0.2}),
    ],
)  # fmt: skip
def test_what_megatron_computes_goes_to_its_arguments(
    config: Mapping[str, Any], shaped: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    found = arguments(config, shaped)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "shaped", "words"),
    [
        ({"model_type": "gpt_neox"}, NEOX, "use_parallel_residual"),
        ({"use_parallel_residual": True}, NEOX, "use_parallel_residual"),
        (scaled(rope_type="yarn", factor=2.0), ROPE, "yarn"),
        (scaled(rope_type="llama3", factor=8.0, low_freq_factor=2.0), ROPE, "low_freq_factor 2.0"),
        (scaled(rope_type="linear", factor=2.5), ROPE, "2.5, no whole number"),
        ({**LLAMA, "rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, ROPE,
         "rope_parameters"),
        ({**LLAMA, "sliding_window": 1024}, ROPE, "sliding_window 1024"),
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, ROPE, "layer_types"),
        ({**LLAMA, "hidden_act": "gelu_pytorch_tanh"}, ROPE, "gelu_pytorch_tanh.*gated"),
        ({"hidden_act": "relu"}, NEOX, "'relu'"),
        ({**LLAMA, "logits_scaling": 8.0}, ROPE, "logits_scaling"),
        ({**LLAMA, "no_rope_layers": [1, 0]}, ROPE, "no_rope_layers"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, GPT, "inverse_layer"),
        ({**LLAMA, "rope_parameters": {"rope_theta": "x"}}, ROPE, "damaged"),
    ],
)  # fmt: skip
def test_what_megatron_does_not_compute_is_refused(
    config: Mapping[str, Any], shaped: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(RefusedError, match=rf"hf/config\.json.*{words}"):
        config_arguments(config, shaped, Path("hf"))


def test_biases_of_the_attention_alone_are_refused() -> None:
    whole = gpt()
    tensors = {name: Tensor(f"param/{name}", shape, "F32") for name, shape in whole.items()}
    assert shape_arguments(tensors, HEADS)["add_bias_linear"]
    bare = {name: of for name, of in tensors.items() if not name.endswith("linear_fc2.bias")}
    with pytest.raises(RefusedError, match=r"linear_proj\.bias.*attention_bias without mlp_bias"):
        shape_arguments(bare, HEADS)


def test_what_a_checkpoints_arguments_leave_out_or_nobody_knows_is_said() -> None:
    config = {**LLAMA, "rms_norm_eps": 1e-6, "mystery": 3}
    flags, unknown = config_arguments(config, {**ROPE, "qk_layernorm": True}, Path("hf"))[1]
    assert "--norm-epsilon 1e-06 --qk-layernorm" in flags
    assert "mystery 3" in unknown
    assert not config_arguments({**LLAMA, "rms_norm_eps": 1e-5}, ROPE, Path("hf"))[1]
    other = {**LLAMA, "model_type": "helium"}  # of Llama's names, and positions interleaved
    assert "model_type 'helium'" in config_arguments(other, ROPE, Path("hf"))[1][0]


def test_other_arguments_are_named() -> None:
    said = arguments({**LLAMA, "rope_theta": 1e6}, ROPE)
    assert not list(contradictions(said, {"rotary_base": 1000000}))
    (line,) = contradictions(said, {"rotary_base": 10000})
    assert "rotary_base is 10000" in line


@pytest.mark.parametrize(
    ("name", "value", "is_same"),
    [
        ("use_rope_scaling", True, False),
        ("use_rope_scaling", False, True),
        ("rotary_seq_len_interpolation_factor", 2, False),
        ("rotary_seq_len_interpolation_factor", 1, True),
        ("apply_layernorm_1p", True, False),
        ("window_size", (128, 0), False),
        ("window_size", None, True),
        ("activation_func_clamp_value", 1.0, False),
        ("glu_linear_offset", 1.0, False),
        ("softmax_scale", 1.0, False),
        ("moe_expert_capacity_factor", 1.0, False),
        ("moe_router_topk_scaling_factor", 1.0, True),
        ("use_mup", True, False),
    ],
)
def test_arguments_that_no_entry_asks_for_make_another_model(
    name: str, value: object, is_same: bool
) -> None:
    found = list(contradictions(arguments(LLAMA, ROPE), {name: value}))
    assert [name in line for line in found] == [True] * (not is_same)


YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.7,
    "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
}  # fmt: skip
DEEPSEEK = {
    "num_experts_per_tok": 2, "moe_intermediate_size": FFN, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "rms_norm_eps": 1e-6, "n_routed_experts": 4,
    "kv_lora_rank": 6, "qk_nope_head_dim": WIDTH, "qk_rope_head_dim": 2, "v_head_dim": 7,
}  # fmt: skip
THIRD = {
    **DEEPSEEK, "norm_topk_prob": True, "n_group": 2, "topk_group": 1, "q_lora_rank": 8,
    "routed_scaling_factor": 2.5, "rope_parameters": YARN,
}  # fmt: skip
SECOND = {**DEEPSEEK, "norm_topk_prob": False, "topk_method": "greedy", "q_lora_rank": None}


@pytest.mark.parametrize(
    ("kind", "config", "words"),
    [
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave false"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "norms of the attention have 1e-06"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "beta_fast": 1}}, "beta_fast 1"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": None}}, "without mscale"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "truncate": False}}, "truncate False"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "factor": 2}}, "'linear'"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 2}, "sum of their best 2, in Megatron of 1"),
        ("deepseek_v3", {"norm_topk_prob": False}, "num_experts_per_tok 2 and norm_topk_prob"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek_v3", {"n_shared_experts": 2}, "n_shared_experts 2, whose tensors are of 10"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "first_k_dense_replace 2"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        (
            "deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
            "sum of their best 1, in Megatron of 2",
        ),
    ],
)  # fmt: skip
def test_a_deepseek_that_megatron_does_not_compute_is_refused(
    kind: str, config: dict[str, Any], words: str
) -> None:
    is_third = kind == "deepseek_v3"
    source = state(shapes=latent(is_third=is_third, rank=8 if is_third else None))
    shaped = shape_arguments(parameters_of(source), HEADS)
    whole = {"model_type": kind, **(THIRD if is_third else SECOND)}
    assert config_arguments(whole, shaped, Path("hf"))[0]["moe_router_topk"] == 2
    with pytest.raises(RefusedError, match=words):
        config_arguments({**whole, **config}, shaped, Path("hf"))


def test_factors_of_the_softmax_are_compared() -> None:
    shaped = shape_arguments(parameters_of(state(shapes=latent())), HEADS)
    said = arguments({"model_type": "deepseek_v3", **THIRD, "rope_parameters": {
        **YARN, "mscale": None, "mscale_all_dim": None}}, shaped)  # fmt: skip
    known = whole_arguments(shaped, said, 0, 0)
    assert not list(contradictions(said, {**known, "rope_type": None}))  # yarn by default
    (line,) = contradictions(said, {**known, "mscale_all_dim": 1.0})
    assert "mscale_all_dim is 1.0" in line


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": FFN, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("kind", "shapes", "config"),
    [
        ("llama", llama(), {"rms_norm_eps": 1e-6, "num_key_value_heads": GROUPS, "head_dim": WIDTH,
          "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 32.0,
                              "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 8192}}),
        ("mistral", llama(), {"sliding_window": None, "max_position_embeddings": 64}),
        ("qwen2", llama(is_tied=True, biases=True), {"tie_word_embeddings": True}),
        ("mixtral", routed(), {"num_experts_per_tok": 1, "num_local_experts": 3,
                               "intermediate_size": FFN}),
        ("qwen2_moe", with_biases(routed(is_shared=True)),
         {**EXPERTS, "num_experts": 3, "shared_expert_intermediate_size": FFN}),
        ("qwen3_moe", with_query_norms(routed(dense=[1])), {**EXPERTS, "mlp_only_layers": [1]}),
        ("gemma", llama(is_tied=True), {"hidden_act": "gelu_pytorch_tanh"}),
        ("deepseek_v2", latent(is_third=False, rank=None), SECOND),
        ("deepseek_v3", latent(), THIRD),
        ("gpt2", gpt(), {"activation_function": "gelu_new", "n_positions": 7}),
        ("gpt_neox", gpt(positions=False), {"use_parallel_residual": False, "hidden_act": "gelu"}),
    ],
)  # fmt: skip
def test_a_written_config_makes_the_model_of_megatrons_arguments(
    kind: str, shapes: Shapes, config: dict[str, Any]
) -> None:
    source = state(shapes=shapes)
    shaped = shape_arguments(parameters_of(source), HEADS)
    said = config_arguments({"model_type": kind, **config}, shaped, Path("hf"))[0]
    known = whole_arguments(shaped, said, 0, 0)

    def written(**arguments: Any) -> tuple[dict[str, Any], list[str]]:
        values = replace(source.values, arguments={**known, **arguments})
        return described_config(replace(source, values=values), named_mapping(kind))

    found, (note,) = written()
    assert found["model_type"] == kind and found["architectures"][0] in note
    assert {name: found[name] for name in config} == config
    again = config_arguments(found, shaped, Path("hf"))[0]
    assert {name: again[name] for name in said} == said
    for other in ({"window_size": (128, 0)}, {"rotary_interleaved": True}):
        if kind != "gpt2" or "window_size" in other:
            none, (why,) = written(**other)
            assert not none and "is not written" in why and next(iter(other)) in why


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("llama", llama(biases=True)),
        ("qwen3", llama()),
        ("mistral", with_query_norms(llama())),
        ("qwen3_moe", with_query_norms(routed(is_shared=True))),
        ("qwen2_moe", {n: s for n, s in routed(is_shared=True).items() if "gate_w" not in n}),
    ],
)
def test_a_class_without_these_tensors_gets_no_config(kind: str, shapes: Shapes) -> None:
    source = state(shapes=shapes)
    known = whole_arguments(shape_arguments(parameters_of(source), HEADS), {}, 0, 0)
    source = replace(source, values=replace(source.values, arguments=known))
    found, (why,) = described_config(source, named_mapping(kind))
    assert not found and "not of these biases, norms and experts" in why
    found, _ = described_config(source, read_mapping(find_mapping("llama")))
    assert found.get("model_type") == {"llama": "qwen2", "mistral": "qwen3", "qwen3": "llama"}.get(
        kind
    )


# Whole conversions of a small Llama.
def tensors(layers: int = 2) -> dict[str, Any]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    found = {"model.embed_tokens.weight": normal(16, 8), "model.norm.weight": normal(8)}
    for number in range(layers):
        layer = f"model.layers.{number}."
        found |= {f"{layer}self_attn.{part}_proj.weight": normal(8, 8) for part in "qkvo"}
        found |= {f"{layer}mlp.{part}_proj.weight": normal(12, 8) for part in ("gate", "up")}
        found[f"{layer}mlp.down_proj.weight"] = normal(8, 12)
        for norm in ("input", "post_attention"):
            found[f"{layer}{norm}_layernorm.weight"] = normal(8)
    return found


def saved(directory: Path, content: Mapping[str, Any], **config: Any) -> Path:
    """Write a model as Hugging Face's classes do, and beside it a file of its job."""
    header, body = {}, b""
    for name, array in content.items():
        end = len(body) + array.nbytes
        header[name] = {
            "dtype": "F32", "shape": list(array.shape), "data_offsets": [len(body), end],
        }  # fmt: skip
        body += array.tobytes()
    text = json.dumps(header).encode()
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    whole = {
        "model_type": "llama", "tie_word_embeddings": True, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "hidden_act": "silu",
        "max_position_embeddings": 16, "rms_norm_eps": 1e-5, **config,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(whole))
    job = directory.parent / "job.toml"
    job.write_text("[megatron]\nnum_attention_heads = 2\nvocab_size = 16\n")
    return directory


def convert(source: Path, target: Path) -> int:
    job = source.parent / "job.toml"
    return run("reshard", source, target, "--to", "torch_dist", "--mapping", "llama",
               "--args-from", job)  # fmt: skip


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_a_head_that_is_said_to_be_tied_and_differs_is_refused(
    tmp_path: Path, capsys: Capsys
) -> None:
    model = tensors()
    source = saved(tmp_path / "hf", {**model, HEAD: model[EMBEDDING] + 1})
    assert convert(source, tmp_path / "out") == 3
    assert "says tie_word_embeddings, and lm_head.weight is not" in capsys.readouterr().err
    # Also by a verifier to whom a target shows nothing of it.
    assert convert(saved(tmp_path / "tied", model), tmp_path / "mg") == 0
    assert run("verify", source, tmp_path / "mg", "--mapping", "llama") == 3
    kept = saved(tmp_path / "untied", {**model, HEAD: model[EMBEDDING] + 1},
                 tie_word_embeddings=False)  # fmt: skip
    assert convert(kept, tmp_path / "both") == 0
    assert run("verify", kept, tmp_path / "both", "--mapping", "llama") == 0


def test_a_copy_of_the_embedding_is_left_out(tmp_path: Path) -> None:
    model = tensors()
    source = saved(tmp_path / "hf", {**model, HEAD: model[EMBEDDING]})
    assert convert(source, tmp_path / "out") == 0
    assert run("verify", source, tmp_path / "out", "--mapping", "llama") == 0


def test_a_config_says_enough_for_megatron_and_comes_back(tmp_path: Path, capsys: Capsys) -> None:
    source = saved(tmp_path / "hf", tensors(), rope_theta=500.0)
    there, back = tmp_path / "mg", tmp_path / "back"
    assert run("reshard", source, there, "--to", "torch_dist", "--mapping", "mistral") == 0
    assert "stays padded to 16 rows" in capsys.readouterr().out
    written = open_checkpoint(there).values.arguments
    assert written is not None and written["num_attention_heads"] == 2
    assert run("reshard", there, back, "--to", "safetensors", "--mapping", "mistral") == 0
    config = json.loads((back / "config.json").read_text())
    assert config["model_type"] == "mistral" and config["tie_word_embeddings"]
    assert config["rope_parameters"]["rope_theta"] == 500.0
    assert run("verify", source, back) == 0
    # A config's rows may be padded, so that they do not say how many are of tokens.
    again = "--mapping", "mistral", "--repad", "32"
    assert run("reshard", there, tmp_path / "more", "--to", "safetensors", *again) == 3
    assert "vocab_size under [megatron]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "config", "words"),
    [
        (
            "model.layers.1.mlp.down_proj",
            {},
            "are missing: model.layers.1.mlp.down_proj.weight",
        ),
        (
            "model.layers.0.input",
            {},
            "are missing: model.layers.0.input_layernorm.weight",
        ),
        ("model.layers.1.", {}, r"has 1 layers, and config.json says 2 (missing: [1])"),
        (
            "nothing",
            {"tie_word_embeddings": False},
            "lm_head.weight is not tied, and there is none",
        ),
    ],
)
def test_a_model_that_lacks_something_is_refused(
    tmp_path: Path, capsys: Capsys,
    missing: str, config: Mapping[str, Any], words: str,
) -> None:  # fmt: skip
    model = {name: of for name, of in tensors().items() if not name.startswith(missing)}
    source = saved(tmp_path / "hf", model, **config)
    assert convert(source, tmp_path / "out") == 3
    assert words in capsys.readouterr().err
    if missing != "nothing":
        assert run("verify", source) == 0
        assert "warning: " in capsys.readouterr().out


def test_arguments_of_another_model_are_refused_and_found(tmp_path: Path, capsys: Capsys) -> None:
    model = tensors()
    assert convert(saved(tmp_path / "a", model, rope_theta=500.0), tmp_path / "mg") == 0
    written = open_checkpoint(tmp_path / "mg").values.arguments
    assert written is not None and written["rotary_base"] == 500
    capsys.readouterr()
    assert run("verify", tmp_path / "a", tmp_path / "mg", "--mapping", "llama") == 0
    assert "warning" not in capsys.readouterr().out
    unread = saved(tmp_path / "unread", model, rope_theta=500.0, model_type="helium")
    assert run("verify", unread, tmp_path / "mg", "--mapping", "llama") == 0
    assert "warning: config.json says what is not known here" in capsys.readouterr().out
    other = saved(tmp_path / "b", model)
    assert run("verify", other, tmp_path / "mg", "--mapping", "llama") == 4
    assert "rotary_base is 500 by Megatron's arguments" in capsys.readouterr().out
    assert run("reshard", other, tmp_path / "no", "--to", "torch_dist", "--mapping", "llama",
               "--args-from", tmp_path / "mg") == 3  # fmt: skip
