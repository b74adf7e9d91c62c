"""Hugging Face's ``config.json`` as Megatron's arguments.

Equal tensors may belong to different models, so the whole file is read. Entries in Megatron's terms
become arguments; models Megatron does not compute are refused; unknown entries are named.

Source: configuration_{llama,mistral,qwen2,qwen3,mixtral,qwen2_moe,qwen3_moe,gemma,gpt2,gpt_neox,
deepseek_v2,deepseek_v3}.py, modeling_{mixtral,qwen2_moe,gemma,deepseek_v2,deepseek_v3}.py and
modeling_rope_utils.py of transformers 5.24; the flags of megatron/training/arguments.py,
``load_args_from_checkpoint`` of checkpointing.py, megatron/core/fusions/fused_bias_gelu.py,
transformer/multi_latent_attention.py and transformer/moe/moe_utils.py (0.16.1).
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalai.core.errors import RefusedError, ScalaiError

Config = Mapping[str, Any]

_BY_SHAPE = {
    "head_dim", "hidden_size", "intermediate_size", "n_embd", "n_head", "n_inner", "n_layer",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "tie_word_embeddings",
    "vocab_size", "attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm", "num_experts",
    "num_local_experts", "moe_intermediate_size", "shared_expert_intermediate_size",
    "decoder_sparse_step", "mlp_only_layers",
}  # fmt: skip
"""Entries also given by the tensors' shapes and names."""
_NO_FUNCTION = {
    "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward",
    "classifier_dropout", "dtype", "eos_token_id", "gradient_checkpointing", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "keys_to_ignore_at_inference",
    "label2id", "max_window_layers", "output_attentions", "output_hidden_states",
    "pad_token_id", "pretraining_tp", "problem_type", "quantization_config",
    "reorder_and_upcast_attn", "return_dict", "scale_attn_weights", "sep_token_id",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "task_specific_params", "tokenizer_class", "torch_dtype",
    "transformers_version", "unk_token_id", "use_bfloat16", "use_cache", "use_sliding_window",
    "attn_implementation", "_attn_implementation_autoset", "output_router_logits",
    "router_jitter_noise", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef",
}  # fmt: skip
"""Entries without effect on the computation, or checked below."""
LATENT_CLASSES = ("deepseek_v2", "deepseek_v3")
"""Values of ``model_type`` with latent attention (MLA)."""
_OF_LATENT = {
    "aux_loss_alpha", "auto_map", "ep_size", "first_k_dense_replace", "kv_lora_rank",
    "moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts", "num_mtp_layers",
    "num_nextn_predict_layers", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim",
    "qk_rope_head_dim", "rope_interleave", "routed_scaling_factor", "scoring_func", "seq_aux",
    "topk_group", "topk_method", "v_head_dim",
}  # fmt: skip
"""Their entries: given by the tensors' shapes, without effect on the computation, or checked."""
_LATENT_EPSILON = 1e-6
"""Of the norms in their attention, whatever ``rms_norm_eps`` is."""
_READ_CLASSES = (
    *LATENT_CLASSES, "gemma", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe",
)  # fmt: skip
"""Values of ``model_type`` with known classes. Others may compute differently from tensors of the
same names, without an entry for it: interleaved positions, norms by one plus the weight."""
_NORMS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_BASES = ("rope_theta", "rotary_emb_base")
_PARTS = ("partial_rotary_factor", "rotary_pct")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop")
_DROPOUTS = ("hidden_dropout", "resid_pdrop", "embd_pdrop")
_SCALINGS = {
    "attention_multiplier", "attn_logit_softcapping", "clip_qkv", "embedding_multiplier",
    "final_logit_softcapping", "logit_scale", "logits_scaling", "no_rope_layer_interval",
    "no_rope_layers", "query_pre_attn_scalar", "residual_multiplier",
    "scale_attn_by_inverse_layer_idx", "add_cross_attention", "use_bidirectional_attention",
}  # fmt: skip
"""Entries that change the computation, without a counterpart in Megatron's GPT."""
_CLASS_DEFAULTS: Mapping[str, Config] = {
    "deepseek_v2": {
        "first_k_dense_replace": 0, "hidden_act": "silu", "n_shared_experts": 2,
        "moe_intermediate_size": 1407, "norm_topk_prob": False, "rms_norm_eps": 1e-6,
        "scoring_func": "softmax", "topk_method": "greedy",
    },
    "deepseek_v3": {
        "first_k_dense_replace": 3, "hidden_act": "silu", "moe_intermediate_size": 2048,
        "n_group": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "topk_group": 4, "topk_method": "noaux_tc",
    },
    "gpt_neox": {"use_parallel_residual": True, "rotary_pct": 0.25, "hidden_act": "gelu"},
    "gpt2": {"activation_function": "gelu_new"},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "mixtral": {"num_experts_per_tok": 2, "norm_topk_prob": True, "router_aux_loss_coef": 0.001},
    "qwen2_moe": {
        "num_experts_per_tok": 4, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
    },
    "qwen3_moe": {
        "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
    },
}  # fmt: skip
"""Defaults of classes that differ from Megatron's, for files without the entries."""
_LLAMA_3: Config = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""Values without flags in Megatron's ``--use-rope-scaling``."""
_YARN: Config = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
"""Values without flags in Megatron's ``--rope-type yarn``."""

FLAGS = {
    "norm_epsilon": 1e-5, "bias_gelu_fusion": True, "use_rope_scaling": False,
    "rope_scaling_factor": 8.0, "rotary_seq_len_interpolation_factor": None, "quick_geglu": False,
    "moe_aux_loss_coeff": 0.0, "moe_router_num_groups": None, "moe_router_group_topk": None,
    "rope_type": None, "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
}  # fmt: skip
"""Arguments, with Megatron's defaults, not taken by ``--use-checkpoint-args``."""
_SHAPE_FLAGS = (
    "qk_layernorm", "moe_shared_expert_gate", "multi_latent_attention", "q_lora_rank",
    "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
)  # fmt: skip
"""Such arguments by the tensors' shapes."""
_REGULARIZING = {"attention_dropout", "hidden_dropout", "moe_aux_loss_coeff"}
_OFF: Config = {
    "apply_layernorm_1p": False, "apply_residual_connection_post_layernorm": False,
    "quick_geglu": False, "rotary_seq_len_interpolation_factor": None, "squared_relu": False,
    "use_rope_scaling": False, "window_size": None, "qk_l2_norm": False, "no_rope_freq": None,
    "softmax_type": "vanilla", "attention_output_gate": False,
    "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None,
    "moe_router_group_topk": None, "moe_expert_capacity_factor": None,
    "activation_func_clamp_value": None, "glu_linear_offset": 0.0, "softmax_scale": None,
    "use_mup": False,
}  # fmt: skip
"""Arguments off in all these classes, unless an entry turns them on."""
_ONE_IS_NONE = {
    "rotary_seq_len_interpolation_factor", "moe_router_topk_scaling_factor",
    "moe_router_num_groups", "moe_router_group_topk",
}  # fmt: skip
"""Those of ``_OFF`` that change nothing as 1."""


def config_arguments(
    config: Config, shaped: Mapping[str, Any], directory: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return Megatron's arguments by ``config.json``, and notes.

    Args:
        config: Content of the file; empty: no arguments.

    Raises:
        RefusedError: Megatron computes no such model with these tensors (names every entry); or the
            file is damaged.
    """
    try:
        return _arguments(config, shaped, directory) if config else ({}, [])
    except ScalaiError:
        raise
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise RefusedError(
            f"{directory}/config.json is damaged ({type(error).__name__}: {error}). Copy it again."
        ) from error


def _arguments(
    config: Config, shaped: Mapping[str, Any], directory: Path
) -> tuple[dict[str, Any], list[str]]:
    whole = {**_CLASS_DEFAULTS.get(str(config.get("model_type")), {}), **config}
    found = dict(_OFF) if whole.get("model_type") in _READ_CLASSES else {}
    is_latent = whole.get("model_type") in LATENT_CLASSES
    experts = _latent_experts if is_latent else _experts
    wrong = [
        *_blocks(whole),
        *_rotary(whole, shaped, found),
        *_activation(whole, shaped, found),
        *_window(whole),
        *experts(whole, shaped, found),
    ]
    if wrong:
        raise RefusedError(
            f"{directory}/config.json says {'; '.join(wrong)}: with these tensors Megatron "
            "computes another model. It cannot be converted for Megatron."
        )
    for name, entries in (
        ("norm_epsilon", _NORMS),
        ("max_position_embeddings", _POSITIONS),
        ("attention_dropout", _ATTENTION_DROPOUTS),
        ("hidden_dropout", _DROPOUTS),
    ):
        value = _first(whole, entries)
        if value is not None:
            found[name] = value
    found.setdefault("hidden_dropout", 0.0)
    return found, list(_notes(whole, found, shaped))


def contradictions(said: Mapping[str, Any], arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield differences between Megatron's arguments and ``config.json`` (``config_arguments``)."""
    for name in sorted(said.keys() - _REGULARIZING - {"max_position_embeddings"}):
        mine, theirs = said[name], arguments.get(name)
        if name == "rope_type" and theirs is None:
            theirs = "yarn"  # of MLATransformerConfig
        is_one = name in _ONE_IS_NONE and theirs == 1 and theirs is not True
        is_off = not mine and (not theirs or (mine is None and is_one))
        if name in arguments and not is_off and not _is_equal(mine, theirs):
            yield f"{name} is {theirs} by Megatron's arguments, and {mine} by config.json"


def _is_equal(one: Any, other: Any) -> bool:
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-9) if numbers else one == other


def _first(config: Config, entries: tuple[str, ...]) -> Any:
    return next((config[name] for name in entries if config.get(name) is not None), None)


def _blocks(config: Config) -> Iterator[str]:
    for name in ("use_parallel_residual", "parallel_attn"):
        if config.get(name):
            yield f"{name} (attention and MLP side by side)"
    if config.get("scale_attn_weights") is False:
        yield "scale_attn_weights false"
    for name in sorted(_SCALINGS & config.keys()):
        value = config[name]
        is_neutral = (value is not True and value in (None, False, 1, 0, [])) or (
            name == "no_rope_layers" and isinstance(value, list) and all(value)
        )
        if not is_neutral:
            yield f"{name} {value!r:.60}"


def _rotary(config: Config, shaped: Mapping[str, Any], found: dict[str, Any]) -> Iterator[str]:
    if shaped.get("position_embedding_type") != "rope":
        return
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(part, dict) for part in scaling.values()):
        yield f"rope_parameters {scaling!r:.80}"
        return
    whole = {**config, **{name: value for name, value in scaling.items() if value is not None}}
    base, part = _first(whole, _BASES), _first(whole, _PARTS)
    found["rotary_base"] = int(base) if base == int(base or 0) else base if base else 10000
    found["rotary_percent"] = 1.0 if part is None else float(part)
    found["rotary_interleaved"] = False
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if shaped.get("multi_latent_attention"):
        yield from _latent_rotary(whole, str(kind), scaling, found)
    elif kind == "linear":
        factor = float(scaling["factor"])
        found["rotary_seq_len_interpolation_factor"] = int(factor)
        if factor != int(factor):
            yield f"rope scaling by {factor}, no whole number"
    elif kind == "llama3":
        found |= {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
        for name, value in _LLAMA_3.items():
            if scaling.get(name, value) != value:
                yield f"{name} {scaling[name]} (Megatron has {value})"
    elif kind != "default":
        yield f"rope scaling of the type {kind!r}"


def _latent_rotary(
    config: Config, kind: str, scaling: Config, found: dict[str, Any]
) -> Iterator[str]:
    """Set the positions of latent attention: a part of each head, its neighbours turned."""
    if config.get("rope_interleave") is False:
        yield "rope_interleave false"
    if found["rotary_percent"] != 1.0:
        yield f"partial_rotary_factor {found['rotary_percent']}"
    if (epsilon := _first(config, _NORMS)) != _LATENT_EPSILON:
        yield f"rms_norm_eps {epsilon} (norms of the attention have {_LATENT_EPSILON})"
    # Not interpolated, both factors of the softmax and the angles are one.
    found |= {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    if kind == "yarn":
        longest = _first(config, _POSITIONS)
        first = scaling.get("original_max_position_embeddings") or longest
        by_angles, by_softmax = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if by_softmax and not by_angles:
            yield f"mscale_all_dim {by_softmax} without mscale"
        found |= {
            **_YARN,
            "rope_type": "yarn",
            "rotary_scaling_factor": float(scaling.get("factor") or longest / first),
            "mscale": float(by_angles) if by_softmax and by_angles else 1.0,
            "mscale_all_dim": float(by_softmax or 0.0),
        }
        stated = {**scaling, "original_max_position_embeddings": first}
        for name, value in _YARN.items():
            if (stated.get(name) or value) != value:
                yield f"{name} {stated[name]} (Megatron has {value})"
        for name, value in (("attention_factor", None), ("truncate", True)):
            if scaling.get(name, value) != value:
                yield f"{name} {scaling[name]}"
    elif kind != "default":
        yield f"rope scaling of the type {kind!r}"


def _activation(config: Config, shaped: Mapping[str, Any], found: dict[str, Any]) -> Iterator[str]:
    name = _first(config, _ACTIVATIONS)
    is_gated = bool(shaped.get("swiglu"))
    if config.get("model_type") == "gemma":
        found |= {"apply_layernorm_1p": True, "swiglu": False}
        if not is_gated or name not in (*_TANH, "gelu"):
            yield f"the activation {name!r}"
        return
    if name is None:
        return
    if is_gated and name in ("silu", "swish"):
        found["swiglu"] = True
    elif is_gated and name == "quick_gelu":
        found |= {"swiglu": False, "quick_geglu": True}
    elif not is_gated and name == "relu2":
        found["squared_relu"] = True
    elif not is_gated and name == "gelu":
        # The fused one uses tanh.
        found["bias_gelu_fusion"] = False
    elif not is_gated and name in _TANH and shaped.get("add_bias_linear"):
        found["bias_gelu_fusion"] = True
    else:
        yield f"the activation {name!r}{' of a gated MLP' * is_gated}"


def _experts(config: Config, shaped: Mapping[str, Any], found: dict[str, Any]) -> Iterator[str]:
    if not shaped.get("num_experts"):
        return
    chosen = config.get("num_experts_per_tok")
    if not isinstance(chosen, int) or "norm_topk_prob" not in config:
        yield f"num_experts_per_tok {chosen} and norm_topk_prob {config.get('norm_topk_prob')}"
        return
    # The chosen experts' share of the softmax over all, made one, is the softmax over the chosen.
    found |= {"moe_router_topk": chosen, "moe_router_pre_softmax": not config["norm_topk_prob"]}
    found["moe_aux_loss_coeff"] = float(config.get("router_aux_loss_coef") or 0.0)


def _latent_experts(
    config: Config, shaped: Mapping[str, Any], found: dict[str, Any]
) -> Iterator[str]:
    """Set the router of DeepSeek's classes: 2 takes the softmax's share of the chosen as it is, 3
    divides the chosen's sigmoids by their sum."""
    is_third = config["model_type"] == "deepseek_v3"
    chosen, shared = config.get("num_experts_per_tok"), config.get("n_shared_experts")
    first, frequency = config["first_k_dense_replace"], config.get("moe_layer_freq", 1)
    layers = [int(layer >= first) for layer in range(shaped["num_layers"])]
    if frequency != 1 or shaped["moe_layer_freq"] not in (layers, *([1] * all(layers))):
        yield (
            f"first_k_dense_replace {first} and moe_layer_freq {frequency}, while layers "
            f"{shaped['moe_layer_freq']} have experts"
        )
    width = shaped["moe_shared_expert_intermediate_size"]
    if not shared or shared * config["moe_intermediate_size"] != width:
        yield f"n_shared_experts {shared}, whose tensors are of {width}"
    methods = ("noaux_tc",) if is_third else ("greedy", "group_limited_greedy")
    if config["scoring_func"] != ("sigmoid" if is_third else "softmax"):
        yield f"scoring_func {config['scoring_func']!r}"
    if config["topk_method"] not in methods:
        yield f"topk_method {config['topk_method']!r}"
    if not isinstance(chosen, int) or bool(config["norm_topk_prob"]) != (is_third and chosen > 1):
        yield f"num_experts_per_tok {chosen} and norm_topk_prob {config['norm_topk_prob']}"
        return
    groups, of_groups = config.get("n_group") or 1, config.get("topk_group") or 1
    has_groups = config["topk_method"] != "greedy" and of_groups < groups
    best = 2 if is_third else 1
    if has_groups and chosen // of_groups != best:
        yield (
            f"n_group {groups}, topk_group {of_groups} and num_experts_per_tok {chosen} (groups "
            f"compare by the sum of their best {best}, in Megatron of {chosen // of_groups})"
        )
    factor = float(config.get("routed_scaling_factor") or 1.0)
    found |= {
        "moe_router_topk": chosen,
        **({} if is_third else {"moe_router_pre_softmax": True}),  # sigmoids need none
        "moe_router_score_function": config["scoring_func"],
        "moe_router_enable_expert_bias": is_third,
        "moe_router_topk_scaling_factor": None if factor == 1 else factor,
        "moe_router_num_groups": groups if has_groups else None,
        "moe_router_group_topk": of_groups if has_groups else None,
    }


def _window(config: Config) -> Iterator[str]:
    window = config.get("sliding_window")
    is_used = window is not None and config.get("use_sliding_window") is not False
    longest = _first(config, _POSITIONS)
    if is_used and (longest is None or window < longest):
        yield f"sliding_window {window}"
    layers = set(config.get("layer_types") or ()) - {"full_attention"}
    if layers - ({"sliding_attention"} if not is_used or window is None else set()):
        yield f"layer_types {sorted(map(str, layers))}"


def _notes(config: Config, found: Mapping[str, Any], shaped: Mapping[str, Any]) -> Iterator[str]:
    flags = [_flag(name, found[name]) for name in FLAGS
             if name in found and not _is_equal(found[name], FLAGS[name])]  # fmt: skip
    flags += [_flag(name, shaped[name]) for name in _SHAPE_FLAGS if shaped.get(name)]
    if config.get("model_type") == "gemma":
        yield (
            "Gemma needs a script that makes its GPTModel: no flags of Megatron-LM are for its "
            "GELU by tanh in a gated MLP (gated_linear_unit, activation_func) and its embeddings "
            "times the root of hidden_size; norms are by --apply-layernorm-1p"
        )
    if flags:
        yield (
            f"by config.json load with {' '.join(flags)}: Megatron's --use-checkpoint-args does "
            "not take these"
        )
    yield from unknown_notes(config)


def unknown_notes(config: Config) -> Iterator[str]:
    """Yield a note on unknown entries of a ``config.json``."""
    known = {
        *_BY_SHAPE, *_NO_FUNCTION, *_SCALINGS, *_NORMS, *_ACTIVATIONS, *_BASES, *_PARTS,
        *_POSITIONS, *_ATTENTION_DROPOUTS, *_DROPOUTS, "rope_parameters", "rope_scaling",
        "sliding_window", "layer_types", "use_parallel_residual", "parallel_attn",
    }  # fmt: skip
    if config.get("model_type") in LATENT_CLASSES:
        known |= _OF_LATENT
    if config.get("model_type") in (None, *_READ_CLASSES):
        known.add("model_type")
    unknown = [f"{name} {config[name]!r:.40}" for name in sorted(config.keys() - known)]
    if unknown:
        yield f"config.json says what is not known here, look whether it matters: {unknown}"


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if value is False:
        return f"--no-{flag[2:]}"
    return flag if value is True else f"{flag} {value}"
