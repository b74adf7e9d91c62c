"""Copies of tied layers that a stage has and does not use.

A stage has a whole copy of a tied layer, also of those parameters that its own function of the
layer leaves alone, as a head leaves the embedding's positions. DeepSpeed keeps no such parameters
equal (``_synchronize_tied_weights`` of runtime/pipe/module.py, 0.19.8), and no file says which they
are; but they never had a gradient, so their moments are zero.
"""

from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import MAIN, PARAM, STEP, Piece
from scalai.converters.deepspeed.pipeline import unit_of
from scalai.core.collection import split_name

SAMPLED = 4096
"""Elements of a moment's piece that are looked at, spread over it."""


def parameter_of(piece: Piece) -> str:
    """Return the name of the parameter that a piece, of any kind, belongs to."""
    return split_name(piece.tensor.name)[1]


def unused_copies(directory: Path, pieces: Sequence[Piece], before: Collection[str]) -> set[str]:
    """Return the parameters of which this stage has copies that never had a gradient.

    Args:
        directory: Where the files lie.
        pieces: Of one rank of the stage.
        before: The units of earlier stages.
    """
    found: dict[str, bool] = {}
    for piece in pieces:
        kind, name = split_name(piece.tensor.name)
        if kind not in (PARAM, MAIN, STEP) and unit_of(name) in before:
            is_zero = piece.tensor.dtype == "F32" and not _sample(directory, piece).any()
            found[name] = found.get(name, True) and is_zero
    return {name for name, is_unused in found.items() if is_unused}


def _sample(directory: Path, piece: Piece) -> npt.NDArray[Any]:
    """Return some elements of a contiguous fp32 piece."""
    count = prod(piece.box.shape)
    data = np.memmap(directory / piece.file, np.uint8, "r", piece.begin, (4 * count,))
    return data.view(np.float32)[:: max(count // SAMPLED, 1)]
