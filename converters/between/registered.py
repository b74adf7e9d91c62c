"""Tensors registered by a script beside its model; only Scalai's own generations keep them."""

from dataclasses import replace

import numpy as np

from scalai.converters.between.translation import LEFT_OUT
from scalai.converters.checkpoint import USER, Checkpoint, Placed
from scalai.core.tensors.collection import Collection


def without_registered(source: Checkpoint) -> Checkpoint:
    """Return a source without a script's registered tensors, with a note on each."""
    placed, tensors = source.placed, source.placed.collection.tensors
    is_kept = np.array([not t.name.startswith(f"{USER}/") for t in tensors], dtype=bool)
    if is_kept.all():
        return source
    number = np.cumsum(is_kept) - 1
    rows = np.flatnonzero(is_kept[placed.collection.tensor])
    chosen = placed.collection.select(rows)
    kept = tuple(tensor for tensor, keeps in zip(tensors, is_kept, strict=True) if keeps)
    left = sorted(tensor.name for tensor, keeps in zip(tensors, is_kept, strict=True) if not keeps)
    notes = [f"{LEFT_OUT}{name}, which a script registered and generations keep" for name in left]
    return replace(
        source,
        placed=Placed(
            Collection(kept, number[chosen.tensor], chosen.offset, chosen.shape),
            placed.file[rows], placed.begin[rows], placed.stride[rows], placed.files,
            placed.rounded()[rows],
        ),
        recorded=None if source.recorded is None else source.recorded[rows],
        notes=(*source.notes, *notes),
    )  # fmt: skip
