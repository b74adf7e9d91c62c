"""Fingerprints of live memory: by numpy on the host, by a device's own arithmetic for its
memory.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from scalai.core.tensors.fingerprint import piece_fingerprint
from scalai.core.tensors.region import Box, Piece, row_numbers
from scalai.core.tensors.universal_hash import (
    DIGITS,
    FIRST_FACTOR,
    GATHERED,
    HALF_BITS,
    KEYS,
    ROUNDING,
    SECOND_FACTOR,
    STEP,
    WORD_BYTES,
    P,
    SegmentRun,
    runs,
    segments_of_row,
    weigh,
)
from scalai.runtime.live import Slot, host_bits, piece_view
from scalai.store.files import blocks, slices

BLOCK = 1 << 24
"""Elements widened to 64 bits at a time by a device: 128 MiB."""
NARROW = 32
"""Least columns in the number of rows at a time: a row's own sums take room."""
PLACES = tuple(1 << bits for bits in (26, 0))
"""Weights of a sum's parts, kept apart by a device so that none outgrows 63 bits."""


def live_fingerprints(rows: Sequence[tuple[Slot, Piece]]) -> npt.NDArray[np.uint64]:
    """Return the fingerprint of each row of live memory, [rows]. Blocks until the device is
    done.
    """
    pending = [_row_fingerprint(slot, piece) for slot, piece in rows]
    # One wait for the device at the end instead of one a row.
    values = [value if isinstance(value, int) else fingerprint_of(value) for value in pending]
    return np.array(values, dtype=np.uint64)


def _row_fingerprint(slot: Slot, piece: Piece) -> "int | torch.Tensor":
    view, shape = piece_view(slot, piece), slot.tensor.shape
    if view.device.type == "cpu":
        return piece_fingerprint(host_bits(view), piece.box, shape)
    return device_fingerprint(view, piece.box, shape)


def device_fingerprint(bits: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Compute ``piece_fingerprint`` of a piece in place.

    Queued on the current stream, without waiting. Returns int64 numbers for ``fingerprint_of``.

    Args:
        bits: Piece as signed integers of the element's width [box.shape], any strides.
        box: Place of the piece in the global tensor.
        shape: Shape of the global tensor, in elements.
    """
    total = torch.zeros((2, 2, DIGITS, DIGITS), dtype=torch.int64, device=bits.device)
    segments = segments_of_row(shape[-1] if shape else 1, bits.element_size())
    columns = box.shape[-1] if shape else 1
    for part in blocks(box.shape, min(BLOCK, BLOCK // NARROW * max(columns, 1))):
        if not part.numel:
            continue
        offset = tuple(a + b for a, b in zip(box.offset, part.offset, strict=True))
        numbers = row_numbers(Box(offset, part.shape), shape) * segments
        words, first = _words(bits[slices(part)], offset[-1] if offset else 0)
        rows = torch.from_numpy(numbers).to(bits.device)
        for run in runs(first, words.shape[1]):
            total += _run_sums(words, run, rows)
    return total


def fingerprint_of(numbers: torch.Tensor) -> int:
    """Return the fingerprint of ``device_fingerprint``'s numbers. Blocks until it is there."""
    parts = numbers.reshape(len(PLACES), -1).tolist()
    return sum(weigh(sums) * place for sums, place in zip(parts, PLACES, strict=True)) % P


def _words(values: torch.Tensor, first: int) -> tuple[torch.Tensor, int]:
    """Return rows of elements as words, int32 [rows, words], zero-padded, and the place of the
    first word in its row.

    ``first``: place of the first element.
    """
    columns = values.shape[-1] if values.dim() else 1
    # Contiguous memory may have any stride along a dimension of one; a table of it has not.
    table = values.contiguous().as_strided((values.numel() // columns, columns), (columns, 1))
    item = values.element_size()
    place, ahead = divmod(first * item, WORD_BYTES)
    start = table.storage_offset() * item
    if ahead or table.shape[1] * item % WORD_BYTES or start % max(item, WORD_BYTES):
        words = -(-(ahead + table.shape[1] * item) // WORD_BYTES)
        padded = table.new_zeros((len(table), words * WORD_BYTES // item))
        padded[:, ahead // item : ahead // item + table.shape[1]] = table
        table = padded
    return table.view(torch.int32), place


def _run_sums(words: torch.Tensor, run: SegmentRun, rows: torch.Tensor) -> torch.Tensor:
    """Return the sums of digits of a run, [PLACES, halves, digits of b, digits of a], as
    ``universal_hash.Hash``.

    ``rows`` [rows] are the numbers of the rows' first segments.
    """
    table = words[:, run.low : run.high].reshape(-1, run.width)
    digits = _word_digits(words.device)[run.begin : run.begin + run.width]
    sums = table.to(torch.float64) @ digits
    counting = torch.arange(run.segment, run.segment + run.count, device=words.device)
    keys = _segment_digits((rows[:, None] + counting).reshape(-1))
    upper = sums + ROUNDING - ROUNDING
    halves = torch.stack((upper * 2.0**-HALF_BITS, sums - upper))
    if len(sums) > GATHERED:
        rest = -len(sums) % GATHERED
        halves, keys = (torch.nn.functional.pad(t, (0, 0, 0, rest)) for t in (halves, keys))
    gathered = min(len(sums), GATHERED)
    products = halves.reshape(2, -1, gathered, DIGITS).transpose(-1, -2) @ keys.reshape(
        -1, gathered, DIGITS
    )
    exact = products.to(torch.int64)
    return torch.stack((exact >> 26, exact & ((1 << 26) - 1))).sum(dim=2)


def _segment_digits(numbers: torch.Tensor) -> torch.Tensor:
    """Return the digits of segments' keys, [segments, DIGITS], as ``Keys.segments``; integers wrap
    at 2**64.
    """
    value = numbers * _signed(STEP) + _signed(KEYS.start)
    for shift, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR)):
        value = (value ^ _shifted(value, shift)) * _signed(factor)
    value = value ^ _shifted(value, 31)
    return value.view(torch.int16).reshape(-1, DIGITS).to(torch.float64)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right without sign extension."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@cache
def _word_digits(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(KEYS.words).to(device)
