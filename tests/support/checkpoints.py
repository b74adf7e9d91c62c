"""Small checkpoints of two layers of a GPT, made without a framework."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointTarget,
    FilePiece,
    ReadOptions,
    Values,
    WriteOptions,
    place,
)
from scalai.converters.deepspeed.experts import Experts, Layer, Name
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.engine import Conversion, Limits
from scalai.converters.journal import RunPart
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.converters.megatron.common_state import COMMON_OBJECT, FORM
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import whole

LIMITS = Limits(memory_bytes=64 << 20, workers=1)
SHAPES = {
    "embedding.word_embeddings.weight": (8, 4),
    "decoder.layers.0.self_attention.linear_qkv.weight": (12, 4),
    "decoder.layers.0.mlp.linear_fc2.weight": (4, 16),
    "decoder.layers.0.mlp.linear_fc2.bias": (4,),
    "decoder.layers.1.self_attention.linear_qkv.weight": (12, 4),
    "decoder.layers.1.mlp.linear_fc2.weight": (4, 16),
    "decoder.layers.1.mlp.linear_fc2.bias": (4,),
    "decoder.final_layernorm.weight": (4,),
}
GROUP = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False}


GPT_LAYERS = 4
GPT_SHAPES: Mapping[str, tuple[int, ...]] = {
    "embedding.word_embeddings.weight": (16, 8),
    "embedding.position_embeddings.weight": (4, 8),
    **{
        f"decoder.layers.{layer}.{name}": shape
        for layer in range(GPT_LAYERS)
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
RATES = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
GPT_GROUPS = {**GROUP, **RATES}, {**GROUP, **RATES, "wd_mult": 0.0}
GPT_ARGUMENTS = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "world_size": 1,
    "expert_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None, "data_parallel_size": 1, "seed": 7,
    "transformer_impl": "local", "untie_embeddings_and_output_weights": False,
    "overlap_grad_reduce": False, "ddp_bucket_size": None,
}  # fmt: skip


def state(step: int = 3, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Checkpoint:
    """Return a state in memory: fp32 parameters with both moments, after some steps."""
    random = np.random.default_rng(step)
    pieces, files = [], []
    for name, shape in shapes.items():
        made = random.standard_normal((2, *shape)).astype(np.float32)
        kinds = {"param": made[0], "exp_avg": made[1], "exp_avg_sq": made[1] ** 2}
        for kind, of in kinds.items():
            content = of.tobytes()
            files.append(CheckpointFile(f"{kind}/{name}", len(content), content))
            tensor = Tensor(f"{kind}/{name}", shape, "F32")
            pieces.append(FilePiece(tensor, whole(shape), files[-1].path, 0))
        pieces.append(FilePiece(Tensor(f"step/{name}", (), "F32"), whole(()), "(step)", 0))
    content = np.float32(step).tobytes()
    files.append(CheckpointFile("(step)", len(content), content))
    values = Values(
        step=step,
        degrees={"tp": 1, "pp": 1},
        framework="megatron",
        is_split=True,
        scheduler={"num_steps": step},
        param_groups=({**GROUP, **RATES},),
        counters={"consumed_train_samples": 4 * step},
    )
    return Checkpoint("memory", Path("/nonexistent/memory"), place(pieces, files), values)


def gpt(shapes: Mapping[str, tuple[int, ...]] = GPT_SHAPES, **arguments: Any) -> Checkpoint:
    """Return a GPT with gated units, whose layers are alike."""
    made = state(shapes=shapes)
    values = replace(
        made.values,
        param_groups=GPT_GROUPS,
        arguments={**GPT_ARGUMENTS, **arguments},
        grad_scaler=None,
    )
    return replace(made, values=values)


def newest() -> Checkpoint:
    """Return a state of a job that keeps what ranks have in common as megatron-core 0.19 does."""
    source = state()
    return replace(source, values=replace(source.values, extra={FORM: COMMON_OBJECT}))


def lay_out(source: Checkpoint, layout: str = "torch_dist", **options: Any) -> CheckpointTarget:
    """Lay a checkpoint out in another layout. ``options``: degrees by axis, and those of
    ``WriteOptions``."""
    named = {name: options.pop(name, None) for name in ("is_split", "reference", "cuts")}
    return layout_named(layout).lay_out(source, WriteOptions(options, **named))


def carry(
    source: Checkpoint,
    directory: Path,
    layout: str = "torch_dist",
    *,
    part: RunPart | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    limits: Limits = LIMITS,
    **options: Any,
) -> Any:
    """Convert a checkpoint; return the report, None where another part finishes it. ``options``: as
    for ``lay_out``."""
    target = lay_out(source, layout, **options)
    return Conversion(source, target, directory, limits, part=part or RunPart()).run(progress)


def write(
    directory: Path,
    layout: str = "torch_dist",
    source: Checkpoint | None = None,
    **options: Any,
) -> Checkpoint:
    """Write a state as a checkpoint and open it."""
    carry(source or state(), directory, layout, **options)
    return open_in_order(directory)


def convert(
    source: Checkpoint, directory: Path, layout: str = "torch", **options: Any
) -> Checkpoint:
    """Write a checkpoint, in Megatron's legacy layout, and open it."""
    carry(source, directory, layout, **options)
    return open_checkpoint(directory)


def open_in_order(path: Path) -> Checkpoint:
    """Open a checkpoint whose optimizer was given the module's parameters in their order."""
    checkpoint = open_checkpoint(path)
    if not checkpoint.guessed:
        return checkpoint
    groups = checkpoint.values.extra[STATE].groups
    return open_checkpoint(path, ReadOptions(order=lambda _: groups))


def deepspeed_state(step: int = 3, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Checkpoint:
    """Return a state in memory with the names and values of a DeepSpeed job."""
    source = state(step, shapes)
    job = DeepSpeedJob(
        tag=f"global_step{step}",
        groups=(tuple(shapes),),
        module=tuple(shapes),
        module_values={},
        module_metadata=None,
        dtypes=dict.fromkeys(shapes, "F32"),
        aliases={},
        buffers=(),
        frozen=(),
        model={"global_steps": step, "global_samples": 4 * step, "ds_version": "0.19.8"},
        optimizer={},
        has_number_steps=False,
        is_bf16=False,
    )
    values = replace(source.values, framework="deepspeed", degrees={}, extra={STATE: job})
    return replace(source, values=values)


def experts_state() -> Checkpoint:
    """Return a state in memory of a DeepSpeed job with a layer of experts."""
    count = 4
    layer = Layer("moe", (".up.weight", ".up.bias"), count)
    names = [str(Name("moe", at, rest)) for at in range(count) for rest in layer.entries]
    dense = {"moe.deepspeed_moe.gate.wg.weight": (count, 5), "norm.weight": (5,)}
    experts = {name: (7, 5) if name.endswith("weight") else (7,) for name in names}
    source = deepspeed_state(shapes={**dense, **experts})
    (group,) = source.values.param_groups
    groups = group, {**group, "moe": True, "name": "ep_size_1"}
    job = replace(
        source.values.extra[STATE], groups=(tuple(dense), tuple(names)), experts=Experts((layer,))
    )
    values = replace(source.values, param_groups=groups, extra={STATE: job})
    return replace(source, values=values)
