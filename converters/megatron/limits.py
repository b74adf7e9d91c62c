"""What a Megatron checkpoint's model allows, from its arguments and tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import PARAM, Values
from scalai.converters.megatron.fused_rows import Heads
from scalai.converters.megatron.names import expert_of, layer_of
from scalai.converters.megatron.rules import UNEVEN_STAGES, optimizer_axes
from scalai.converters.megatron.values import are_several_kinds
from scalai.core.degrees.degrees import ModelLimits
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor

_EMBEDDING = re.compile(rf"{PARAM}/(.*\.)?word_embeddings\.weight")
_UNEVEN = (
    *UNEVEN_STAGES, "num_layers_at_start_in_bf16",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


def limits_of(values: Values, tensors: Iterable[Tensor]) -> ModelLimits:
    """Return what the model allows. What nobody knows refuses nothing."""
    names = list(tensors)
    parameters = [t.name for t in names if t.name.startswith(f"{PARAM}/")]
    layers = {layer for name in parameters if (layer := layer_of(name)) is not None}
    experts = {expert for name in parameters if (expert := expert_of(name)) is not None}
    rows = [tensor.shape[0] for tensor in names if _EMBEDDING.fullmatch(tensor.name)]
    arguments = values.arguments or {}
    is_uneven = any(arguments.get(name) for name in _UNEVEN)
    return ModelLimits(
        num_attention_heads=_number(arguments.get("num_attention_heads")),
        num_query_groups=_number(arguments.get("num_query_groups"))
        if arguments.get("group_query_attention")
        else None,
        num_layers=len(layers) if layers and not is_uneven else None,
        padded_vocab_size=rows[0] if rows else None,
        num_experts=len(experts) or None,
        ffn_hidden_size=_number(arguments.get("ffn_hidden_size")),
        expert_tp=_number(arguments.get("expert_tensor_parallel_size")),
        fixed=tuple(_fixed(values)),
    )


def _fixed(values: Values) -> Iterator[tuple[str, int, str]]:
    """Yield the axes that must stay as they are, at which degree, and why."""
    arguments: Mapping[str, Any] = values.arguments or {}
    if "optimizer" not in arguments and are_several_kinds(values.param_groups):
        arguments = {**arguments, "optimizer": "muon"}  # a chain of Muon and Adam
    for axis, why in optimizer_axes(arguments):
        yield axis, values.degrees.get(axis, 1), why


def check_model(directory: Path, values: Values, tensors: Iterable[Tensor]) -> None:
    """Refuse a decoder of which layers or experts are missing: their tensors would leave no hole,
    because nothing else says that they exist.

    Raises:
        RefusedError: They are not counted through, or are not as many as the arguments say.
    """
    names = [t.name for t in tensors if t.name.startswith(f"{PARAM}/decoder.layers.")]
    arguments = values.arguments or {}
    for what, of, stated in (
        ("layers", layer_of, arguments.get("num_layers")),
        ("experts", expert_of, arguments.get("num_experts")),
    ):
        found = {number for name in names if (number := of(name)) is not None}
        expected = _number(stated) or len(found)
        missing = next((at for at, n in enumerate(sorted(found)) if n != at), len(found))
        if found and (len(found) != expected or missing != expected):
            lacking = f"; the first that is missing is {missing}" if missing < expected else ""
            raise RefusedError(
                f"{directory} has {len(found)} {what} by its tensors, and {expected} by its "
                f"arguments{lacking}. Use another checkpoint."
            )


def argument_heads(arguments: Mapping[str, Any]) -> Heads:
    """Return the attention heads and query groups of a model."""
    heads = _number(arguments.get("num_attention_heads"))
    is_grouped = bool(arguments.get("group_query_attention"))
    return Heads(heads, _number(arguments.get("num_query_groups")) if is_grouped else heads)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
