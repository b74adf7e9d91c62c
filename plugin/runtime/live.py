"""What a framework's adapter gives the runtime: the live state of one rank, as slots over its own
memory.

The rows of a rank are its slots' pieces in order: the flattened order (slot, piece) of the slots
that are held, or of those that are wanted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from scalai.core.errors import LayoutError
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.dtypes import BITS, ITEM_BYTES, Bits
from scalai.core.tensors.region import Piece, row_major, whole
from scalai.runtime.torch_dtypes import INTEGERS, dtype_name


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """Live memory of this rank that is part of a global tensor.

    ``buffer`` [elements] is a flat, detached view of the framework's own memory, of the tensor's
    dtype; ``pieces`` say which boxes of ``tensor`` lie where in it. ``is_held``: this rank vouches
    for these elements, they may be written.
    ``is_wanted``: a restore must fill them. Stale copies are wanted, not held; a range of a
    parameter that is wanted whole elsewhere is held, not wanted. ``is_volatile``: it may change
    between two updates, as a buffer does in a forward pass.
    """

    tensor: Tensor
    buffer: torch.Tensor
    pieces: tuple[Piece, ...]
    is_held: bool = True
    is_wanted: bool = True
    is_volatile: bool = False


def whole_slot(name: str, value: torch.Tensor, *, is_volatile: bool) -> Slot:
    """Return the slot of a contiguous tensor that this rank has whole."""
    shape = tuple(value.shape)
    tensor = Tensor(name, shape, dtype_name(value.dtype))
    piece = Piece(whole(shape), 0, row_major(shape))
    return Slot(tensor, value.detach().view(-1), (piece,), is_volatile=is_volatile)


class LiveState(Protocol):
    """The training state of one rank of a live job. Nothing here communicates with other ranks."""

    @property
    def coordinate(self) -> str:
        """Position of this rank on the parallel axes, such as ``tp0-pp1-dp0``: the key of its
        ``rank_state``."""

    def slots(self) -> Sequence[Slot]:
        """List all tensors of this rank. Called once, after the model and the optimizer are built;
        the buffers stay valid and in place until the process ends."""

    def scalars(self) -> Mapping[str, Json]:
        """Return what is not a tensor and equal on all ranks that have it (schedule, loss scale,
        parameter groups).

        Nested mappings of all ranks are united; where two ranks differ the lowest rank's value
        stays."""

    def load_scalars(self, scalars: Mapping[str, Json]) -> None:
        """Put back what the union of all ranks' ``scalars()`` was."""

    def rank_state(self) -> Json:
        """Return what belongs to this rank alone (random number generators)."""

    def load_rank_state(self, state: Json | None, step: int) -> str:
        """Put back this coordinate's state, or derive a new one from ``step`` where there is None
        (the degrees changed).

        Returns one line for the log that says which."""


def held_rows(slots: Sequence[Slot]) -> list[tuple[Slot, Piece]]:
    """List the pieces that this rank vouches for."""
    return [(slot, piece) for slot in slots if slot.is_held for piece in slot.pieces]


def wanted_rows(slots: Sequence[Slot]) -> list[tuple[Slot, Piece]]:
    """List the pieces that a restore must fill."""
    return [(slot, piece) for slot in slots if slot.is_wanted for piece in slot.pieces]


def collection_of(rows: Sequence[tuple[Slot, Piece]]) -> Collection:
    """Return rows as a collection, for the other side of a process border."""
    return Collection.of((slot.tensor, piece.box) for slot, piece in rows)


def piece_view(slot: Slot, piece: Piece) -> torch.Tensor:
    """Return the bits of a piece in the live memory, as signed integers [box.shape], no copy.

    Raises:
        LayoutError: The piece does not lie inside the slot's buffer, or the dtypes differ in width.
    """
    item, buffer = ITEM_BYTES[slot.tensor.dtype], slot.buffer
    if buffer.dim() != 1 or buffer.element_size() != item or not buffer.is_contiguous():
        raise LayoutError(
            f"the buffer of {slot.tensor.name!r} is {buffer.dtype}{list(buffer.shape)} with "
            f"strides {buffer.stride()}; expected a flat contiguous one of {item}-byte elements. "
            "This is a slip of the framework's adapter."
        )
    shape = piece.box.shape
    last = piece.start + sum(
        (size - 1) * stride for size, stride in zip(shape, piece.stride, strict=True)
    )
    if piece.box.numel and not 0 <= piece.start <= last < buffer.numel():
        raise LayoutError(
            f"a piece of {slot.tensor.name!r} ends at element {last} of a buffer of "
            f"{buffer.numel()}. This is a slip of the framework's adapter."
        )
    flat = buffer.view(INTEGERS[item])
    return flat.as_strided(shape, piece.stride, flat.storage_offset() + piece.start)


def host_bits(view: torch.Tensor) -> Bits:
    """Return a view of host memory as unsigned integers for numpy, no copy."""
    bits: Bits = view.numpy().view(np.dtype(BITS[view.element_size()]))
    return bits
