"""Megatron's arguments, schedule and parameter groups from the tensors and a few values.

For a checkpoint of another framework: shapes give most of the model, Megatron's defaults the rest.

Source: megatron/training/arguments.py, ``get_optimizer_param_scheduler`` of
megatron/training/training.py and ``_get_param_groups`` of megatron/core/optimizer/__init__.py
(0.16.1).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scalai.converters.between.mapping import Shape
from scalai.converters.megatron.beside_tensors import DEGREE_ARGUMENTS
from scalai.converters.megatron.modules import EMBEDDING, OUTPUT, expert_of, gated, layer_of
from scalai.converters.pickles import foreign
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import TORCH_NAMES

POSITIONS = "embedding.position_embeddings.weight"
LATENT = "self_attention.linear_kv_down_proj.weight"
_LATENT_NORMS = ("linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight")

OPTIMIZER_DEFAULTS: Mapping[str, Any] = {
    "lr": None, "min_lr": 0.0, "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_eps": 1e-8,
}  # fmt: skip
SCHEDULE_DEFAULTS: Mapping[str, Any] = {
    "lr_decay_style": "linear", "lr_warmup_fraction": None, "lr_warmup_iters": 0,
    "lr_warmup_samples": 0, "lr_decay_iters": None, "lr_decay_samples": None,
    "weight_decay_incr_style": "constant", "start_weight_decay": None, "end_weight_decay": None,
}  # fmt: skip


def shape_arguments(tensors: Mapping[str, Tensor], heads: int | None) -> dict[str, Any]:
    """Return the arguments that follow from the model's parameters.

    Args:
        tensors: Parameters by our names.
        heads: Number of attention heads; None: leave out heads and query groups.

    Raises:
        RefusedError: There is no embedding, the heads do not fit the shapes, or only the attention
            has biases.
    """
    if EMBEDDING not in tensors:
        raise RefusedError(
            f"there is no {EMBEDDING} among {len(tensors)} parameters (first {next(iter(tensors))})"
            ": names need a --mapping."
        )
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    _check_biases(shapes)
    rows, hidden = shapes[EMBEDDING]
    layers = {layer for name in shapes if (layer := layer_of(name)) is not None}
    experts = {expert for name in shapes if (expert := expert_of(name)) is not None}
    dtype = tensors[EMBEDDING].dtype
    is_learned = POSITIONS in shapes
    found: dict[str, Any] = {
        "num_layers": len(layers),
        "hidden_size": hidden,
        "ffn_hidden_size": _of_layer(shapes, "linear_fc2.weight", 1),
        "padded_vocab_size": rows,
        "position_embedding_type": "learned_absolute" if is_learned else "rope",
        "swiglu": bool(gated(shapes)),
        "add_bias_linear": _of_layer(shapes, "linear_proj.bias", 0) is not None,
        "add_qkv_bias": _of_layer(shapes, "linear_qkv.bias", 0) is not None,
        "qk_layernorm": _of_layer(shapes, "q_layernorm.weight", 0) is not None,
        "normalization": "LayerNorm" if "decoder.final_layernorm.bias" in shapes else "RMSNorm",
        "untie_embeddings_and_output_weights": OUTPUT in shapes,
        "bf16": dtype == "BF16",
        "fp16": dtype == "F16",
        "params_dtype": foreign("torch", TORCH_NAMES[dtype]),
        "num_experts": len(experts) or None,
    }
    is_latent = _of_layer(shapes, LATENT, 0) is not None
    if is_latent:
        found |= _latent(shapes, heads)
    if experts:
        found |= _expert_arguments(shapes, sorted(layers))
    if is_learned:
        found["max_position_embeddings"] = shapes[POSITIONS][0]
    if heads is not None:
        found["num_attention_heads"] = heads
        found |= {} if is_latent else _groups(shapes, hidden, heads)
    return found


def _check_biases(shapes: Mapping[str, Shape]) -> None:
    """Raise ``RefusedError`` for biases of attentions' outputs alone: Megatron has one flag for
    them and those of MLPs."""
    biased = next((name for name in shapes if name.endswith("linear_proj.bias")), None)
    ends = (name.removesuffix("weight") for name in shapes if name.endswith("linear_fc2.weight"))
    bare = next((f"{end}weight" for end in ends if f"{end}bias" not in shapes), None)
    if biased and bare:
        raise RefusedError(
            f"there is {biased}, and no bias beside {bare} (attention_bias without mlp_bias): "
            "Megatron's --add-bias-linear is for both. It cannot be converted for Megatron."
        )


def _expert_arguments(shapes: Mapping[str, Shape], layers: Sequence[int]) -> dict[str, Any]:
    ends = {end: shape for name, shape in shapes.items() if (end := name.partition(".mlp.")[2])}
    routed = {layer_of(name) for name in shapes if name.endswith(".mlp.router.weight")}
    shared = ends.get("shared_experts.linear_fc2.weight")
    return {
        "moe_ffn_hidden_size": ends["experts.experts.0.linear_fc2.weight"][1],
        "moe_shared_expert_intermediate_size": None if shared is None else shared[1],
        "moe_shared_expert_gate": "shared_experts.gate_weight" in ends,
        "moe_layer_freq": 1
        if routed.issuperset(layers)
        else [int(layer in routed) for layer in layers],
    }


def _of_layer(shapes: Mapping[str, Shape], ending: str, axis: int) -> int | None:
    found = (
        s[axis] for name, s in shapes.items() if name.endswith(ending) and "expert" not in name
    )
    return next(found, None)


def _groups(shapes: Mapping[str, Shape], hidden: int, heads: int) -> dict[str, Any]:
    rows, wide = (_of_layer(shapes, f"linear_{part}.weight", axis) for part, axis in
                  (("qkv", 0), ("proj", 1)))  # fmt: skip
    width = (wide or hidden) // heads
    groups, rest = divmod((rows or 0) - heads * width, 2 * width)
    if rest or groups < 1 or heads % groups:
        raise RefusedError(
            f"{rows} rows of linear_qkv are not those of {heads} heads of {width}: correct "
            "num_attention_heads under [megatron]."
        )
    return {
        "kv_channels": width,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
    }


def _latent(shapes: Mapping[str, Shape], heads: int | None) -> dict[str, Any]:
    """Return the sizes of latent attention (MLA)."""

    def size(module: str, axis: int) -> int:
        found = _of_layer(shapes, f"self_attention.{module}.weight", axis)
        if found is None:
            raise RefusedError(f"there is {LATENT}, and no {module}.weight of latent attention.")
        return found

    rank = size("linear_kv_up_proj", 1)
    is_plain = _of_layer(shapes, "linear_q_proj.weight", 0) is not None
    queries = "linear_q_proj" if is_plain else "linear_q_up_proj"
    positions = size("linear_kv_down_proj", 0) - rank
    found: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": None if is_plain else size(queries, 1),
        "kv_lora_rank": rank,
        "qk_pos_emb_head_dim": positions,
        "qk_layernorm": any(name.endswith(_LATENT_NORMS) for name in shapes),
    }
    if heads is None:
        return found
    of_query, of_value = size(queries, 0) // heads, size("linear_proj", 1) // heads
    content = of_query - positions
    if (
        (heads * of_query, heads * of_value) != (size(queries, 0), size("linear_proj", 1))
        or min(rank, positions, content, of_value) < 1
        or size("linear_kv_up_proj", 0) != heads * (content + of_value)
    ):
        raise RefusedError(
            f"the rows of {queries}, linear_kv_down_proj and linear_kv_up_proj are not those of "
            f"{heads} heads: correct num_attention_heads under [megatron]."
        )
    return {
        **found, "qk_head_dim": content, "v_head_dim": of_value, "group_query_attention": False,
        "num_query_groups": heads,
        # Of Megatron's own attention; Transformer Engine's is told both.
        "kv_channels": of_value,
    }  # fmt: skip


def whole_arguments(
    shaped: Mapping[str, Any], given: Mapping[str, Any], step: int, consumed: int
) -> dict[str, Any]:
    """Return arguments in a checkpoint's form.

    Args:
        given: The user's values, with priority.
        step, consumed: Optimizer steps done, and samples.
    """
    degrees = {name: 1 for name in DEGREE_ARGUMENTS.values()}
    return {
        "make_vocab_size_divisible_by": 128,
        "seed": 1234,
        "world_size": 1,
        **degrees,
        "virtual_pipeline_model_parallel_size": None,
        **OPTIMIZER_DEFAULTS,
        **SCHEDULE_DEFAULTS,
        **shaped,
        **_dense(shaped),
        **given,
        "iteration": step,
        "consumed_train_samples": consumed,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }


def _dense(shaped: Mapping[str, Any]) -> dict[str, Any]:
    """Return a size for models without a dense layer: Megatron asks for one."""
    has_none = shaped.get("num_experts") and shaped["ffn_hidden_size"] is None
    return {"ffn_hidden_size": shaped["moe_ffn_hidden_size"]} if has_none else {}


def schedule_of(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schedule's state for learning rate and weight decay; None: values are missing.

    It counts samples, as Megatron's does.
    """
    values: dict[str, Any] = {**OPTIMIZER_DEFAULTS, **SCHEDULE_DEFAULTS, **arguments}
    batch: Any = values.get("global_batch_size")
    iterations: Any = values.get("train_iters")
    samples: Any = values.get("train_samples")
    if values["lr"] is None or not (samples or (iterations and batch)):
        return None
    per, total = (batch, iterations) if iterations else (1, samples)
    unit = "iters" if iterations else "samples"
    decay = (values[f"lr_decay_{unit}"] or total) * per
    warmup = values[f"lr_warmup_{unit}"] * per
    if values["lr_warmup_fraction"] is not None:
        warmup = values["lr_warmup_fraction"] * decay
    start, end = (
        values["weight_decay"] if values[name] is None else values[name]
        for name in ("start_weight_decay", "end_weight_decay")
    )
    return {
        "max_lr": values["lr"],
        "lr_warmup_steps": warmup,
        "num_steps": values["consumed_train_samples"],
        "lr_decay_style": values["lr_decay_style"],
        "lr_decay_steps": decay,
        "min_lr": values["min_lr"],
        "start_wd": start,
        "end_wd": end,
        "wd_incr_style": values["weight_decay_incr_style"],
        "wd_incr_steps": total * per,
    }


def standard_groups(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return Megatron's two parameter groups: with decay, and without (biases and norms)."""
    values = {**OPTIMIZER_DEFAULTS, **arguments}
    return tuple(
        {
            "wd_mult": decays,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": values["lr"],
            "min_lr": values["min_lr"],
            "lr": values["lr"],
            "betas": (values["adam_beta1"], values["adam_beta2"]),
            "eps": values["adam_eps"],
            "weight_decay": values["weight_decay"] * decays,
            "bias_correction": True,
        }
        for decays in (1.0, 0.0)
    )
