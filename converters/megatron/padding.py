"""How many rows Megatron gives a vocabulary, and what the next job has to be told to keep them.

Source: ``_vocab_size_with_padding`` of megatron/training/tokenizer/tokenizer.py (0.16.1).
"""

from collections.abc import Mapping
from typing import Any

from scalai.converters.checkpoint import PARAM, Checkpoint, Values
from scalai.converters.megatron.modules import EMBEDDING
from scalai.core.tensors.collection import Tensor

DIVISOR = 128
"""Megatron's default of ``--make-vocab-size-divisible-by``."""


def padded_rows(vocabulary: int, divisor: int, tp: int) -> int:
    """Return how many rows Megatron makes of a vocabulary."""
    multiple = divisor * tp
    return -(-vocabulary // multiple) * multiple


def padding_note(
    source: Checkpoint,
    tensors: Mapping[str, Tensor],
    degrees: Mapping[str, int],
    reference: Values | None,
) -> str | None:
    """Say which flag keeps the vocabulary's rows at the target's TP, where Megatron would make
    others, or may: its loader fills rows that a checkpoint lacks with zeros, and says nothing.

    Args:
        tensors, degrees: The target's.
        reference: Whose arguments count where the source has none.
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
    elif tp == was:
        return None
    return (
        f"the vocabulary stays padded to {rows} rows: load with --make-vocab-size-divisible-by "
        f"{rows // tp}, or Megatron may pad it otherwise, and losses differ"
    )
