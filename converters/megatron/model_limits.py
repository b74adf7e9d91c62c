"""Facts about a Megatron checkpoint's model: limits of its degrees, heads, rows of fused tensors,
the padding of its vocabulary.

Source: ``linear_qkv`` of megatron/core/transformer/attention.py and the gated ``linear_fc1`` of
mlp.py (0.16.1).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import PARAM, Checkpoint, Values
from scalai.converters.megatron.beside_tensors import are_several_kinds
from scalai.converters.megatron.modules import EMBEDDING, expert_of, layer_of
from scalai.converters.megatron.rules import UNEVEN_STAGES, interleaved_axes, optimizer_axes
from scalai.core.degrees.degrees import ModelLimits
from scalai.core.errors import RefusedError, UsageError
from scalai.core.tensors.collection import Tensor

FUSED_PARTS = {"qkv": 3, "gate_up": 2, "": 1}
"""Parts of a fused tensor."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads and query groups of a model; None: unknown."""

    heads: int | None = None
    groups: int | None = None

    def or_else(self, other: "Heads") -> "Heads":
        """Return these, or ``other`` if they are unknown."""
        return self if self.heads is not None else other


def rows_of_parts(fused: str, count: int, heads: Heads, what: str) -> Sequence[Sequence[range]]:
    """Return, for each part of a fused tensor, its rows in order.

    Args:
        fused: A key of ``FUSED_PARTS``.
        count: Number of all rows.
        heads: Heads of the attention.
        what: Name of the tensor in errors.

    Raises:
        UsageError: Heads are needed and not known, or do not fit the rows.
    """
    if fused == "gate_up":
        return [range(count // 2)], [range(count // 2, count)]
    if fused != "qkv":
        return [[range(count)]]
    if heads.heads is None:
        raise UsageError(
            f"to cut {what} the number of attention heads is needed, and neither checkpoint says "
            "it. Add [attention] num_attention_heads and num_query_groups to the mapping file."
        )
    groups = heads.groups or heads.heads
    width, rest = divmod(count, heads.heads + 2 * groups)
    if rest or heads.heads % groups:
        raise UsageError(
            f"{what} has {count} rows, which {heads.heads} heads in {groups} query groups do not "
            "divide. Correct [attention] in the mapping file, or num_attention_heads."
        )
    queries = heads.heads // groups
    rows: tuple[list[range], list[range], list[range]] = ([], [], [])
    for group in range(groups):
        low = group * (queries + 2) * width
        for part, begin, many in zip(rows, (0, queries, queries + 1), (queries, 1, 1), strict=True):
            part.append(range(low + begin * width, low + (begin + many) * width))
    return rows


_EMBEDDING = re.compile(rf"{PARAM}/(.*\.)?word_embeddings\.weight")
_UNEVEN = (
    *UNEVEN_STAGES, "num_layers_at_start_in_bf16",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


def limits_of(values: Values, tensors: Iterable[Tensor]) -> ModelLimits:
    """Return the model's limits; an unknown one refuses nothing."""
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
    """Yield the fixed axes, their degree, and why."""
    arguments: Mapping[str, Any] = values.arguments or {}
    if "optimizer" not in arguments and are_several_kinds(values.param_groups):
        arguments = {**arguments, "optimizer": "muon"}  # a chain of Muon and Adam
    tp = values.degrees.get("tp", 1)
    for axis, why in (*optimizer_axes(arguments), *interleaved_axes(arguments)):
        yield axis, values.degrees.get(axis, tp if axis == "etp" else 1), why


def check_model(directory: Path, values: Values, tensors: Iterable[Tensor]) -> None:
    """Refuse a decoder without some layers or experts: their tensors would leave no hole.

    Raises:
        RefusedError: Their numbers have gaps, or their count differs from the arguments'.
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
    heads = _number(arguments.get("num_attention_heads"))
    is_grouped = bool(arguments.get("group_query_attention"))
    return Heads(heads, _number(arguments.get("num_query_groups")) if is_grouped else heads)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


DIVISOR = 128
"""Megatron's default of ``--make-vocab-size-divisible-by``."""


def padded_rows(vocabulary: int, divisor: int, tp: int) -> int:
    multiple = divisor * tp
    return -(-vocabulary // multiple) * multiple


def padding_note(
    source: Checkpoint,
    tensors: Mapping[str, Tensor],
    degrees: Mapping[str, int],
    reference: Values | None,
) -> str | None:
    """Return the flag that keeps the vocabulary's rows at the target's TP, if Megatron would make
    others, or may: its loader silently fills missing rows with zeros.

    Args:
        tensors, degrees: The target's.
        reference: Source of arguments, if the source has none.
    """
    embedding = tensors.get(f"{PARAM}/{EMBEDDING}")
    if embedding is None:
        return None
    rows, was, tp = embedding.shape[0], source.values.degrees.get("tp", 1), degrees.get("tp", 1)
    stated = source.values.arguments or (reference.arguments if reference is not None else None)
    arguments: Mapping[str, Any] = stated or {}
    vocabulary = arguments.get("vocab_size")
    divisor = arguments.get("make_vocab_size_divisible_by") or DIVISOR
    if vocabulary:
        if padded_rows(vocabulary, divisor, tp) == rows:
            return None
    elif tp == was and source.values.framework == "megatron":
        return None
    return (
        f"the vocabulary stays padded to {rows} rows: load with --make-vocab-size-divisible-by "
        f"{rows // tp}, or Megatron may pad it otherwise, and losses differ"
    )
