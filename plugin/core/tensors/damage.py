"""Damage that a host has found in its part of a generation, and what of it is left: a piece that it
holds whole again since, because it has come from elsewhere, is not damaged any more."""

from collections.abc import Iterable
from dataclasses import dataclass

from scalai.core.tensors.boxes import uncovered
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.region import Box


@dataclass(frozen=True, slots=True)
class DamagedPiece:
    """The box of a tensor that is not what was committed, and how that was seen."""

    tensor: str
    box: Box
    reason: str


def still_damaged(found: Iterable[DamagedPiece], held: Collection) -> tuple[DamagedPiece, ...]:
    """Return those of the pieces that ``held``, in which no damaged one is, does not cover."""
    wanted = {piece.tensor for piece in found}
    boxes: dict[str, list[Box]] = {name: [] for name in wanted}
    names = [tensor.name for tensor in held.tensors]
    for row, number in enumerate(held.tensor.tolist()):
        if names[number] in wanted:
            boxes[names[number]].append(held.box(row)[1])
    return tuple(
        piece for piece in found if piece.box.numel and uncovered(piece.box, boxes[piece.tensor])
    )
