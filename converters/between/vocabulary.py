"""The padded vocabulary: rows of the embedding and of the output layer without a token.

Megatron rounds the rows up to a multiple of ``make_vocab_size_divisible_by * tp``. Padding rows are
trained and take part in every softmax, so another number of them changes the losses. New rows are
zeros, in weights, masters and moments, as in Megatron's own loader for a ``torch_dist`` checkpoint
with fewer rows.

Source: ``_vocab_size_with_padding`` of megatron/training/tokenizer/tokenizer.py and
``allow_shape_mismatch`` of megatron/core/dist_checkpointing/strategies/torch.py (0.16.1).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from scalai.converters.checkpoint import (
    Checkpoint,
    CheckpointFile,
    FilePiece,
    PlacedTensors,
    parameters_of,
    place,
)
from scalai.converters.megatron.modules import EMBEDDING, OUTPUT
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.region import Box, whole

ZEROS = CheckpointFile("(zeros)", 8, bytes(8))
"""A file in memory for new rows, all at its first element."""

_PADDED = (EMBEDDING, OUTPUT, OUTPUT.replace("weight", "bias"))


def repadded(source: Checkpoint, rows: int, vocabulary: int | None) -> Checkpoint:
    """Return a checkpoint with the vocabulary padded to other rows.

    Args:
        source: The checkpoint, under our names.
        rows: Number of rows; keeps the existing ones, or drops the last.
        vocabulary: Number of tokens; None: unknown.

    Raises:
        RefusedError: The vocabulary is unknown, rows of tokens would be dropped, or there is no
            embedding.
    """
    named = parameters_of(source)
    if EMBEDDING not in named:
        raise RefusedError(f"{source.directory} has no {EMBEDDING}, whose rows --repad changes.")
    before = named[EMBEDDING].shape[0]
    if vocabulary is None:
        raise RefusedError(
            f"{source.directory} has {before} rows of the vocabulary and does not say how many are "
            "of tokens. Say it as vocab_size under [megatron] in a TOML file for --args-from."
        )
    if not vocabulary <= min(rows, before):
        raise RefusedError(
            f"--repad {rows}: the vocabulary has {vocabulary} tokens and {before} rows, so tokens "
            "would have none. Give more rows, or correct vocab_size."
        )
    if rows == before:
        return source
    note = (
        f"the vocabulary is padded to {rows} rows instead of {before} ({vocabulary} of tokens): "
        "losses will differ, for each row takes part in the softmax"
    )
    if rows > before:
        note += "; the new rows, their masters and moments are zeros"
    changed = {t.name for t in source.placed.collection.tensors if _is_padded(t)}
    return replace(
        source,
        placed=_cut(source.placed, rows),
        recorded=None,
        stated={},
        duplicates=None if source.duplicates is None else _cut(source.duplicates, rows),
        values=replace(
            source.values,
            arguments=_with_rows(source.values.arguments, rows),
            counters=_with_rows(source.values.counters, rows) or {},
        ),
        notes=(*source.notes, note),
        changed=source.changed | changed,
    )


def _is_padded(tensor: Tensor) -> bool:
    return split_name(tensor.name)[1] in _PADDED and len(tensor.shape) > 0


def _with_rows(values: Mapping[str, Any] | None, rows: int) -> Mapping[str, Any] | None:
    if values is None or "padded_vocab_size" not in values:
        return values
    return {**values, "padded_vocab_size": rows}


def _cut(placed: PlacedTensors, rows: int) -> PlacedTensors:
    padded = {tensor: replace(tensor, shape=(rows, *tensor.shape[1:]))
              for tensor in placed.collection.tensors if _is_padded(tensor)}  # fmt: skip
    pieces = [piece for row in range(len(placed.collection)) for piece in _kept(placed, row, rows)]
    for old, new in padded.items():
        if rows > old.shape[0]:
            box = Box(
                (old.shape[0], *[0] * (len(new.shape) - 1)),
                (rows - old.shape[0], *new.shape[1:]),
            )
            pieces.append(FilePiece(new, box, ZEROS.path, 0, (0,) * len(new.shape)))
    return place(pieces, [*placed.files, ZEROS])


def _kept(placed: PlacedTensors, row: int, rows: int) -> Iterator[FilePiece]:
    piece = placed.piece(row)
    if not _is_padded(piece.tensor):
        yield piece
        return
    tensor = replace(piece.tensor, shape=(rows, *piece.tensor.shape[1:]))
    common = piece.box.intersect(whole(tensor.shape))
    if common is not None:
        # Rows are dropped at the end, so the rest begins at the same place.
        yield replace(piece, tensor=tensor, box=common)
