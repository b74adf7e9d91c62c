"""A small GPT as a checkpoint without a framework, and as Megatron's legacy layout writes it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import REPORT, Checkpoint, WriteOptions
from scalai.converters.engine import Conversion
from scalai.converters.layouts import layout_named, open_checkpoint
from support.checkpoints import GROUP, LIMITS, state

ITERATION = "iter_0000003"
LAYERS = 4
SHAPES: Mapping[str, tuple[int, ...]] = {
    "embedding.word_embeddings.weight": (16, 8),
    "embedding.position_embeddings.weight": (4, 8),
    **{
        f"decoder.layers.{layer}.{name}": shape
        for layer in range(LAYERS)
        for name, shape in {
            "self_attention.linear_qkv.layer_norm_weight": (8,),
            "self_attention.linear_qkv.weight": (16, 8),
            "self_attention.linear_qkv.bias": (16,),
            "self_attention.linear_proj.weight": (8, 8),
            "mlp.linear_fc1.layer_norm_weight": (8,),
            "mlp.linear_fc1.weight": (24, 8),
            "mlp.linear_fc2.weight": (8, 12),
        }.items()
    },
    "decoder.final_layernorm.weight": (8,),
}
BASE = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
GROUPS = {**GROUP, **BASE}, {**GROUP, **BASE, "wd_mult": 0.0}
ARGUMENTS = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "world_size": 1,
    "expert_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None, "data_parallel_size": 1, "seed": 7,
    "transformer_impl": "local", "untie_embeddings_and_output_weights": False,
    "overlap_grad_reduce": False, "ddp_bucket_size": None,
}  # fmt: skip
SHARED: dict[str, Any] = {"tp": 2, "pp": 2}


def gpt(shapes: Mapping[str, tuple[int, ...]] = SHAPES, **arguments: Any) -> Checkpoint:
    """Return a GPT with gated units, whose layers are alike."""
    made = state(shapes=shapes)
    values = replace(
        made.values,
        param_groups=GROUPS,
        arguments={**ARGUMENTS, **arguments},
        grad_scaler=None,
    )
    return replace(made, values=values)


def convert(
    source: Checkpoint,
    directory: Path,
    layout: str = "torch",
    is_split: bool | None = None,
    **degrees: int,
) -> Checkpoint:
    """Write a checkpoint and open it."""
    target = layout_named(layout).lay_out(source, WriteOptions(degrees, is_split=is_split))
    Conversion(source, target, directory, LIMITS).run()
    return open_checkpoint(directory)


def fingerprints(directory: Path) -> Any:
    """Return the fingerprints in the report of a conversion."""
    return json.loads((directory / REPORT).read_text())["fingerprints"]
