"""Fingerprints of live memory: by numpy on the host, by the device's own arithmetic where the
memory is there."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from scalai.core.fingerprint import piece_fingerprint, row_keys, words_per_element
from scalai.core.region import Box, Piece
from scalai.runtime.live import Slot
from scalai.runtime.rows import host_bits, piece_view
from scalai.store.files import blocks, slices

BLOCK = 1 << 24
"""Elements that a device widens to 64 bits at a time: 128 MiB."""


def live_fingerprints(rows: Sequence[tuple[Slot, Piece]]) -> npt.NDArray[np.uint64]:
    """Return the fingerprint of each row of live memory, [rows]. Blocks until the device is
    done."""
    pending = [_row_fingerprint(slot, piece) for slot, piece in rows]
    # One wait for the device at the end instead of one a row.
    values = [int(value) % (1 << 64) for value in pending]
    return np.array(values, dtype=np.uint64)


def _row_fingerprint(slot: Slot, piece: Piece) -> "int | torch.Tensor":
    view, shape = piece_view(slot, piece), slot.tensor.shape
    if view.device.type == "cpu":
        return piece_fingerprint(host_bits(view), piece.box, shape)
    return device_fingerprint(view, piece.box, shape)


def device_fingerprint(bits: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Return ``core.fingerprint.piece_fingerprint`` of a piece, computed where it lies, as a 0-d
    int64.

    Queued on the current stream, without waiting. Integers wrap modulo 2**64; the sign is the
    caller's to drop.

    Args:
        bits: The piece as signed integers of the element's width [box.shape], any strides.
        box: Where the piece lies in the global tensor.
        shape: The global tensor's shape, in elements.
    """
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    words = words_per_element(bits.element_size())
    for part in blocks(box.shape, BLOCK):
        if not part.numel:
            continue
        values = _words(bits[slices(part)], words)
        offset = tuple(a + b for a, b in zip(box.offset, part.offset, strict=True))
        keys = row_keys(Box(offset, part.shape), shape, words).view(np.int64)
        columns = torch.arange(values.shape[1], dtype=torch.int64, device=bits.device)
        total += (torch.from_numpy(keys).to(bits.device) * values.sum(dim=1)).sum()
        total += 2 * (columns * values.sum(dim=0)).sum()
    return total


def _words(values: torch.Tensor, words: int) -> torch.Tensor:
    """Return bit patterns as non-negative int64 words [rows, columns * words]."""
    table = values.reshape(-1, values.shape[-1] if values.dim() else 1).to(torch.int64)
    if words == 2:
        table = torch.stack((table, table >> 32), dim=-1).reshape(len(table), -1)
    return table & ((1 << (64 // words if words == 2 else 8 * values.element_size())) - 1)
