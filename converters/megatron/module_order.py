"""In which order Megatron's modules stand, by the names that a rank has for their parameters.

Buffers and optimizers are filled in the order of ``named_parameters``: of a module first its own
parameters, then those of its children in the order in which they were made.

Source: the models in megatron/core/models (gpt, T5, bert), transformer/transformer_layer.py,
attention.py, multi_latent_attention.py, multi_token_prediction.py and transformer/moe/moe_layer.py,
of core_v0.14.0 to core_v0.19.0 and of main in August 2026, which agree.
"""

import re

from scalai.core.errors import RefusedError

_ORDER = (
    "embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings",
    "encoder_relative_pos_emb", "decoder_relative_pos_emb", "encoder.layers",
    "encoder.final_layernorm", "decoder.layers", "decoder.final_layernorm", "mtp.layers",
    "lm_head", "output_layer", "binary_head", "pooler",
    "enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer", "final_layernorm",
    "input_layernorm", "self_attention.core_attention", "self_attention.linear_proj",
    "self_attention.linear_qkv", "self_attention.linear_q_proj",
    "self_attention.linear_qkv_down_proj", "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "self_attention.kv_layernorm",
    "pre_cross_attn_layernorm", "cross_attention.core_attention", "cross_attention.linear_proj",
    "cross_attention.linear_q", "cross_attention.linear_kv", "cross_attention.q_layernorm",
    "cross_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.fc1_latent_proj",
    "mlp.fc2_latent_proj", "mlp.experts", "mlp.shared_experts", "mlp.linear_fc1", "mlp.linear_fc2",
    "gate_weight", "softmax_offset", "relative_attention_bias", "dense", "layer_norm",
    "linear_fc1", "linear_fc2", "layer_norm_weight", "layer_norm_bias", "weight", "bias",
)  # fmt: skip
"""Modules and parameters in the order in which they are made; those of one parent together."""

Order = tuple[tuple[int, int], ...]


def in_order(name: str) -> Order:
    """Return a key by which a rank's names sort in the order of its modules.

    Raises:
        RefusedError: It is unknown where the modules of this name stand.
    """
    key: list[tuple[int, int]] = []
    rest = name
    while rest:
        number = re.match(r"(?:experts\.|local_experts\.)?(\d+)(?:\.|$)", rest)
        if number:
            key.append((-1, int(number[1])))
            rest = rest[number.end() :]
            continue
        known = next((one for one in _ORDER if _begins(rest, one)), None)
        if known is None:
            raise RefusedError(
                f"{name} is a parameter of modules whose order in Megatron is not known here, so "
                "its optimizer state cannot be written by order. Write torch_dist instead."
            )
        key.append((_ORDER.index(known), 0))
        rest = rest[len(known) :].removeprefix(".")
    return tuple(key)


def is_known(name: str) -> bool:
    """Tell whether ``in_order`` knows a name."""
    try:
        in_order(name)
    except RefusedError:
        return False
    return True


def _begins(name: str, known: str) -> bool:
    """Tell whether a name begins with this one, or with one of a group of it: ``weight3``."""
    return name.startswith(known) and re.match(r"(\.|\d+$|$)", name[len(known) :]) is not None
