"""The rows of a rank: its slots' pieces in order, as a collection and as views of the live memory.

Row order is the flattened order (slot, piece) of the slots that are held, or of those that are
wanted."""

from collections.abc import Sequence

import numpy as np
import torch

from scalai.core.collection import Collection
from scalai.core.dtypes import BITS, ITEM_BYTES, Bits
from scalai.core.errors import LayoutError
from scalai.core.region import Piece
from scalai.runtime.live import Slot
from scalai.runtime.torch_dtypes import INTEGERS


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
