"""The fingerprint of older releases, version 1, of memory on a device."""

import numpy as np
import torch

from scalai.core.linear_checksum import row_keys, words_per_element
from scalai.core.region import Box, row_numbers
from scalai.store.files import blocks, slices


def device_checksum(
    bits: torch.Tensor, box: Box, shape: tuple[int, ...], block: int
) -> torch.Tensor:
    """Compute ``core.linear_checksum.piece_checksum`` of a piece where it lies, as a 0-d int64.

    Integers wrap modulo 2**64; the sign is the caller's to drop. ``block``: elements that are
    widened at a time; else as ``runtime.fingerprints.device_fingerprint``.
    """
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    words = words_per_element(bits.element_size())
    for part in blocks(box.shape, block):
        if not part.numel:
            continue
        values = _words(bits[slices(part)], words)
        offset = tuple(a + b for a, b in zip(box.offset, part.offset, strict=True))
        rows = row_numbers(Box(offset, part.shape), shape)
        first, width = (offset[-1], shape[-1]) if shape else (0, 1)
        keys = row_keys(rows, first, width, words).view(np.int64)
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
