"""The shape of the model in a Megatron checkpoint.

Its tensors give all sizes but a few: the heads of an attention, the length of a sequence and the
experts of a token. These are in Megatron's arguments; the workers of an elastic job report them for
its generations (``TOLD``).

Source: megatron/core/models/gpt/gpt_layer_specs.py and transformer/{attention,mlp}.py (0.16.1).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scalai.converters.checkpoint import PARAM, Checkpoint
from scalai.converters.generation_layout import PARTS
from scalai.converters.megatron.arguments import TOLD_FACT
from scalai.converters.megatron.model_limits import check_model
from scalai.converters.megatron.modules import EMBEDDING, OUTPUT, expert_of, is_trained, layer_of
from scalai.core.errors import RefusedError, UsageError
from scalai.core.planner.shape import ModelShape
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.region import Index

_POSITIONS = "embedding.position_embeddings.weight"
_ATTENTION, _MLP, _SHARED = "self_attention.linear_", "mlp.", "shared_experts."
_KNOWN = re.compile(
    r"embedding\.(word|position)_embeddings\.weight|output_layer\.weight"
    r"|decoder\.final_layernorm\.(weight|bias)"
    r"|decoder\.layers\.\d+\.("
    r"(input|pre_mlp)_layernorm\.(weight|bias)"
    r"|self_attention\.(linear_qkv\.(layer_norm_)?|linear_proj\.|[qk]_layernorm\.)(weight|bias)"
    r"|mlp\.((experts\.experts\.\d+|shared_experts)\.)?linear_fc[12]\.(layer_norm_)?(weight|bias)"
    r"|mlp\.router\.\w+|mlp\.shared_experts\.gate_weight)"
)
_PRECISIONS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A checkpoint's facts about its training.

    Attributes:
        global_batch: Samples of a step; None: unknown.
    """

    shape: ModelShape
    precision: str
    has_dropout: bool
    global_batch: int | None


@dataclass(frozen=True, slots=True)
class _Counts:
    """Layers, experts of one of them, and layers with any."""

    layers: int
    experts: int
    moe_layers: int


def read_model(checkpoint: Checkpoint, seq: int | None, vocab: int | None) -> StoredModel:
    """Return the model of a Megatron checkpoint, or of a generation of a Megatron job.

    Args:
        seq: Tokens of a sample; None: as in the checkpoint.
        vocab: Rows of the embedding; None: as in the checkpoint.

    Raises:
        RefusedError: The model is of a kind without a cost model, or a value is stated nowhere;
            names it, and the way out.
    """
    where = f"{checkpoint.directory} ({checkpoint.layout})"
    tensors = {
        split_name(tensor.name)[1]: tensor
        for tensor in checkpoint.placed.collection.tensors
        if split_name(tensor.name)[0] == PARAM and is_trained(tensor.name)
    }
    check_model(checkpoint.directory, checkpoint.values, tensors.values())
    sizes = _sizes(tensors, where)
    arguments = _arguments(checkpoint)
    try:
        shape = _shape(sizes, _counts(tensors), arguments, where, seq, vocab)
    except UsageError as error:
        raise RefusedError(f"{where}: {error} {_way_out()}") from error
    precision = _PRECISIONS.get(tensors[EMBEDDING].dtype, "bf16")
    dropouts = [arguments.get(f"{part}_dropout") for part in ("hidden", "attention")]
    return StoredModel(
        shape=shape,
        precision="fp8" if arguments.get("fp8") else precision,
        # Megatron's default is dropout.
        has_dropout=any(not isinstance(rate, int | float) or rate > 0 for rate in dropouts),
        global_batch=_number(arguments, "global_batch_size"),
    )


def _arguments(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return Megatron's arguments, or the workers' report of them."""
    if checkpoint.values.arguments is not None:
        return checkpoint.values.arguments
    stored = checkpoint.values.extra.get(PARTS)
    facts = stored.generation.about.get("facts", {}) if stored is not None else {}
    told = facts.get(TOLD_FACT)
    return told if isinstance(told, Mapping) else {}


def _sizes(tensors: Mapping[str, Tensor], where: str) -> dict[str, Index]:
    """Return the shapes of the parameters, one of each kind: those of a layer under its name
    without a number, of an expert likewise.

    Raises:
        RefusedError: A parameter is of an unknown part, layers differ, or one is missing.
    """
    strange = sorted(name for name in tensors if not _KNOWN.fullmatch(name))
    if strange:
        raise RefusedError(
            f"{where} has {strange[0]!r}, which is of no part of a model that is modelled. "
            f"{_way_out()}"
        )
    sizes: dict[str, Index] = {}
    for name, tensor in tensors.items():
        kind = _kind(name)
        if sizes.setdefault(kind, tensor.shape) != tensor.shape:
            raise RefusedError(
                f"{where}: {name} is {list(tensor.shape)}, and {list(sizes[kind])} in another "
                f"layer; layers of several sizes are not modelled. {_way_out()}"
            )
    counts = _counts(tensors)
    needed = [EMBEDDING, f"{_ATTENTION}qkv.weight", f"{_ATTENTION}proj.weight"]
    parts = [""] * (counts.layers > counts.moe_layers) + ["experts."] * bool(counts.experts)
    parts += [_SHARED] * any(kind.startswith(f"{_MLP}{_SHARED}linear_fc") for kind in sizes)
    needed += [f"{_MLP}{part}linear_fc{number}.weight" for part in parts for number in (1, 2)]
    needed += [_POSITIONS] * (_POSITIONS in sizes)
    missing = [name for name in needed if len(sizes.get(name, ())) != 2]
    if missing:
        raise RefusedError(f"{where} has no matrix {missing[0]!r}: it is no GPT. {_way_out()}")
    return sizes


def _counts(names: Iterable[str]) -> _Counts:
    layers = {layer for name in names if (layer := layer_of(name)) is not None}
    experts = {(layer_of(name), expert_of(name)) for name in names if expert_of(name) is not None}
    each, routed = ({pair[place] for pair in experts} for place in (1, 0))
    return _Counts(len(layers), len(each), len(routed))


def _kind(name: str) -> str:
    """Return a parameter's name within its layer, without the number of the expert."""
    if layer_of(name) is None:
        return name
    return _NUMBER.sub("*", name).partition("decoder.layers.*.")[2].replace("experts.*.", "")


def _shape(
    sizes: Mapping[str, Index],
    counts: _Counts,
    arguments: Mapping[str, Any],
    where: str,
    seq: int | None,
    vocab: int | None,
) -> ModelShape:
    rows, hidden = sizes[EMBEDDING]
    positions = sizes.get(_POSITIONS, (0,))[0]
    queries = sizes[f"{_ATTENTION}proj.weight"][1]
    heads = _heads(sizes, arguments, queries)
    seq = seq or _number(arguments, "seq_length") or positions or None
    top_k = _number(arguments, "moe_router_topk") if counts.experts else 0
    missing = [
        what
        for what, value in (
            ("num_attention_heads", heads),
            ("seq_length (--seq-length)", seq),
            ("moe_router_topk", top_k),
        )
        if value is None
    ]
    if missing or heads is None or seq is None or top_k is None:
        raise RefusedError(
            f"{where} does not say {', '.join(missing)}: it holds no arguments of Megatron's that "
            f"do. By its tensors it has layers = {counts.layers}, hidden = {hidden}, vocab = "
            f"{rows}. {_way_out()}"
        )
    if not queries or queries % heads:
        raise UsageError(f"{heads} heads do not divide the {queries} columns of the attention.")
    head_dim = queries // heads
    groups, rest = divmod(sizes[f"{_ATTENTION}qkv.weight"][0] - queries, 2 * head_dim)
    if rest or groups < 1:
        raise UsageError(f"{heads} heads of {head_dim} do not divide the rows of linear_qkv.")
    expert_ffn, shared_ffn, dense_ffn = (
        sizes.get(f"{_MLP}{part}linear_fc2.weight", (0, 0))[1] for part in ("experts.", _SHARED, "")
    )
    has_bias = f"{_ATTENTION}proj.bias" in sizes
    return ModelShape(
        layers=counts.layers, hidden=hidden, heads=heads, ffn=dense_ffn or expert_ffn,
        vocab=vocab or rows, seq=seq, kv_groups=groups, head_dim=head_dim, positions=positions,
        is_gated=_is_gated(sizes), is_tied=OUTPUT not in sizes, has_bias=has_bias,
        has_qkv_bias=not has_bias and f"{_ATTENTION}qkv.bias" in sizes,
        has_norm_bias="decoder.final_layernorm.bias" in sizes,
        experts=counts.experts, moe_layers=counts.moe_layers, top_k=top_k, expert_ffn=expert_ffn,
        shared_ffn=shared_ffn,
    )  # fmt: skip


def _heads(sizes: Mapping[str, Index], arguments: Mapping[str, Any], queries: int) -> int | None:
    """Return the number of heads: a norm of theirs has the width of one."""
    norm = sizes.get("self_attention.q_layernorm.weight")
    by_norm = queries // norm[0] if norm and norm[0] else 0
    return by_norm or _number(arguments, "num_attention_heads")


def _is_gated(sizes: Mapping[str, Index]) -> bool:
    """Whether the first matrix of a feed-forward part has a gate's rows, too."""
    parts: Iterable[str] = (f"{_MLP}{part}" for part in ("", "experts.", _SHARED))
    part = next(part for part in parts if f"{part}linear_fc2.weight" in sizes)
    return sizes[f"{part}linear_fc1.weight"][0] == 2 * sizes[f"{part}linear_fc2.weight"][1]


def _number(arguments: Mapping[str, Any], name: str) -> int | None:
    value: Any = arguments.get(name)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return int(value) if is_number and int(value) > 0 else None


def _way_out() -> str:
    return (
        "Give the job's own flags behind --, or state the model in TOML under [model] "
        "(docs/degrees.md)."
    )
