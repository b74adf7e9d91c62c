"""Hugging Face's ``config.json`` from Megatron's arguments and the tensors: the reverse of
``model_config``, whose reader judges the result.

Source: the classes of configurations in transformers 5.24 that ``model_config`` names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalai.converters.between.mapping import NameMapping
from scalai.converters.between.megatron_described import shape_arguments
from scalai.converters.between.model_config import (
    FLAGS,
    LATENT_CLASSES,
    config_arguments,
    contradictions,
)
from scalai.converters.checkpoint import Checkpoint, parameters_of
from scalai.core.errors import RefusedError
from scalai.core.tensors.dtypes import TORCH_NAMES

Arguments = Mapping[str, Any]

_WITH_QUERY_NORMS = {"qwen3", "qwen3_moe", *LATENT_CLASSES}
_WITH_BIASES = {"qwen2", "qwen2_moe"}
"""Classes with biases of queries, keys and values alone."""
_WITH_EXPERTS = {"mixtral", "qwen2_moe", "qwen3_moe", *LATENT_CLASSES}
_WITH_ALL_BIASES = {"gpt2", "gpt_neox", "llama"}
_DEFAULTS: Arguments = {
    **FLAGS, "rotary_base": 10000, "rotary_percent": 1.0, "attention_dropout": 0.1,
    "hidden_dropout": 0.1, "moe_router_topk": 2, "moe_router_pre_softmax": False,
}  # fmt: skip
"""Megatron's."""


def described_config(source: Checkpoint, mapping: NameMapping) -> tuple[dict[str, Any], list[str]]:
    """Return the content of ``config.json``, empty if none makes the same model, and notes.

    Args:
        source: Megatron's state, under our names.
        mapping: Its classes are the candidates, in order.
    """
    known = source.values.arguments
    if not mapping.classes:
        return {}, []
    if not known or known.get("num_attention_heads") is None:
        return {}, ["config.json is not written: the source has no Megatron arguments"]
    shaped = shape_arguments(parameters_of(source), known["num_attention_heads"])
    arguments = {**_DEFAULTS, **known, **{n: v for n, v in shaped.items() if v is not None}}
    if "swiglu" in known:
        arguments["swiglu"] = known["swiglu"]
    fitting = [kind for kind in mapping.classes if _fits(kind, arguments)]
    if not fitting:
        names = ", ".join(mapping.classes.values())
        return {}, [f"config.json is not written: not of these biases, norms and experts: {names}"]
    config = {
        "architectures": [mapping.classes[fitting[0]]], **_config(fitting[0], arguments, source)
    }  # fmt: skip
    try:
        said, _ = config_arguments(config, shaped, Path(mapping.where).parent)
        wrong = list(contradictions(said, {**arguments, **known}))
    except RefusedError as error:
        wrong = [str(error)]
    if wrong:
        return {}, [f"config.json is not written: {'; '.join(wrong)}"]
    return config, [
        f"config.json is of {config['architectures'][0]}, by Megatron's arguments, which have no "
        "bos_token_id and eos_token_id"
    ]


def _fits(kind: str, arguments: Arguments) -> bool:
    """Whether a class has the norms, biases and experts of these tensors."""
    has_norms, has_all = arguments["qk_layernorm"], arguments["add_bias_linear"]
    has_some = arguments["add_qkv_bias"] and not has_all
    return (
        has_norms == (kind in _WITH_QUERY_NORMS)
        and has_some == (kind in _WITH_BIASES)
        and (not has_all or kind in _WITH_ALL_BIASES)
        and bool(arguments.get("num_experts")) == (kind in _WITH_EXPERTS)
        and (kind == "qwen2_moe") == bool(arguments.get("moe_shared_expert_gate"))
        and (kind in LATENT_CLASSES) == bool(arguments.get("multi_latent_attention"))
    )


def _config(kind: str, a: Arguments, source: Checkpoint) -> dict[str, Any]:
    weights = parameters_of(source)
    dtype = TORCH_NAMES[next(iter(weights.values())).dtype]
    common = {
        "model_type": kind,
        "vocab_size": a["padded_vocab_size"],
        "tie_word_embeddings": not a["untie_embeddings_and_output_weights"],
        "dtype": dtype,
        "use_cache": True,
    }
    if positions := a.get("max_position_embeddings") or a.get("seq_length"):
        common["n_positions" if kind == "gpt2" else "max_position_embeddings"] = positions
    if kind == "gpt2":
        return {
            **common, "n_embd": a["hidden_size"], "n_layer": a["num_layers"],
            "n_head": a["num_attention_heads"], "n_inner": a["ffn_hidden_size"],
            "layer_norm_epsilon": a["norm_epsilon"],
            "activation_function": _gelu(a), "attn_pdrop": a["attention_dropout"],
            "resid_pdrop": a["hidden_dropout"], "embd_pdrop": a["hidden_dropout"],
        }  # fmt: skip
    config = {
        **common,
        "hidden_size": a["hidden_size"],
        "intermediate_size": a["moe_ffn_hidden_size" if kind == "mixtral" else "ffn_hidden_size"],
        "num_hidden_layers": a["num_layers"],
        "num_attention_heads": a["num_attention_heads"],
        "rope_parameters": _rope(a),
        "attention_dropout": a["attention_dropout"],
        "attention_bias": a["add_bias_linear"],
    }
    if kind == "gpt_neox":
        return {
            **config, "use_parallel_residual": False, "layer_norm_eps": a["norm_epsilon"],
            "hidden_act": _gelu(a), "hidden_dropout": a["hidden_dropout"],
        }  # fmt: skip
    if kind in LATENT_CLASSES:
        return {**config, **_latent(kind, a)}
    config |= {
        "num_key_value_heads": a["num_query_groups"],
        "head_dim": a["kv_channels"],
        "hidden_act": "gelu_pytorch_tanh" if kind == "gemma" else "silu",
        "rms_norm_eps": a["norm_epsilon"],
    }
    if kind == "mistral":
        config["sliding_window"] = None
    if kind == "llama":
        config["mlp_bias"] = a["add_bias_linear"]
    return {**config, **_experts(kind, a)} if a.get("num_experts") else config


def _latent(kind: str, a: Arguments) -> dict[str, Any]:
    pattern, width = a["moe_layer_freq"], a["moe_ffn_hidden_size"]
    found = {
        "num_key_value_heads": a["num_attention_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": a["norm_epsilon"],
        "q_lora_rank": a["q_lora_rank"],
        "kv_lora_rank": a["kv_lora_rank"],
        "qk_nope_head_dim": a["qk_head_dim"],
        "qk_rope_head_dim": a["qk_pos_emb_head_dim"],
        "v_head_dim": a["v_head_dim"],
        "n_routed_experts": a["num_experts"],
        "num_experts_per_tok": a["moe_router_topk"],
        "moe_intermediate_size": width,
        "n_shared_experts": (a["moe_shared_expert_intermediate_size"] or 0) // width,
        "first_k_dense_replace": 0 if pattern == 1 else [*pattern, 1].index(1),
        "routed_scaling_factor": float(a.get("moe_router_topk_scaling_factor") or 1.0),
        "norm_topk_prob": kind == "deepseek_v3" and a["moe_router_topk"] > 1,
    }
    groups, of_groups = a["moe_router_num_groups"], a["moe_router_group_topk"]
    if kind == "deepseek_v3":
        return {
            **found, "n_group": groups or 1, "topk_group": of_groups or 1, "rope_interleave": True,
            "num_nextn_predict_layers": 0,
        }  # fmt: skip
    method = "group_limited_greedy" if groups else "greedy"
    return {**found, "topk_method": method, "n_group": groups, "topk_group": of_groups}


def _experts(kind: str, a: Arguments) -> dict[str, Any]:
    chosen = {
        "num_experts_per_tok": a["moe_router_topk"],
        "router_aux_loss_coef": a["moe_aux_loss_coeff"],
    }
    if kind == "mixtral":
        return {**chosen, "num_local_experts": a["num_experts"]}
    pattern = a["moe_layer_freq"]
    dense = [n for n, is_routed in enumerate(pattern) if not is_routed] if pattern != 1 else []
    return {
        **chosen, "num_experts": a["num_experts"], "decoder_sparse_step": 1,
        "moe_intermediate_size": a["moe_ffn_hidden_size"], "mlp_only_layers": dense,
        "norm_topk_prob": not a["moe_router_pre_softmax"], "use_sliding_window": False,
        "shared_expert_intermediate_size": a["moe_shared_expert_intermediate_size"] or 0,
    }  # fmt: skip


def _gelu(arguments: Arguments) -> str:
    return "gelu_new" if arguments["bias_gelu_fusion"] else "gelu"


def _rope(arguments: Arguments) -> dict[str, Any]:
    found = {"rope_type": "default", "rope_theta": float(arguments["rotary_base"])}
    if arguments["rotary_percent"] != 1.0:
        found["partial_rotary_factor"] = arguments["rotary_percent"]
    if arguments.get("multi_latent_attention"):
        return found if arguments["rope_type"] == "rope" else {**found, **_yarn(arguments)}
    factor = arguments["rotary_seq_len_interpolation_factor"]
    if factor not in (None, 1):
        return {**found, "rope_type": "linear", "factor": float(factor)}
    if arguments["use_rope_scaling"]:
        return {
            **found, "rope_type": "llama3", "factor": float(arguments["rope_scaling_factor"]),
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    return found


def _yarn(arguments: Arguments) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "factor": float(arguments["rotary_scaling_factor"]),
        "mscale": arguments["mscale"], "mscale_all_dim": arguments["mscale_all_dim"],
        "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
    }  # fmt: skip
