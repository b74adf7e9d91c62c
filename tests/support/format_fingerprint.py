"""Fingerprints, written from ``docs/format.md``: numpy and the standard library,
and nothing of Scalai."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MODULUS = (1 << 64) - 59
MASK, SEGMENT = (1 << 64) - 1, 128


def fingerprint(bits: Array, offset: Sequence[int], shape: Sequence[int]) -> int:
    """Return the fingerprint of a piece [...] of unsigned numbers at ``offset`` of a tensor."""
    columns = shape[-1] if shape else 1
    first = offset[-1] if offset else 0
    total = 0
    for index in np.ndindex(bits.shape[:-1]) if bits.size else ():
        row = 0
        for at, start, size in zip(index, offset, shape, strict=False):
            row = row * size + start + at
        values = bits[index].reshape(-1)
        total += _row(values, row, first, columns)
    return total % MODULUS


def _signed(key: bytes) -> int:
    digits = [int.from_bytes(key[at : at + 2], "little", signed=True) for at in (0, 2, 4, 6)]
    return sum(digit << 16 * place for place, digit in enumerate(digits))


MADE = hashlib.shake_256(b"scalai fingerprint, version 2").digest(8 * 129)
START = int.from_bytes(MADE[:8], "little")
B = [_signed(MADE[8 * at : 8 * at + 8]) for at in range(1, 129)]


def _a(number: int) -> int:
    value = (START + number * 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return _signed((value ^ value >> 31).to_bytes(8, "little"))


def _row(values: Array, row: int, first: int, columns: int) -> int:
    item = values.itemsize
    count = -(-columns * item // 4)
    data = bytearray(4 * count)
    data[first * item : first * item + values.nbytes] = values.astype(f"<u{item}").tobytes()
    words = np.frombuffer(bytes(data), "<i4").tolist()
    segments = -(-count // SEGMENT)
    total = 0
    for number in range(segments):
        inside = words[SEGMENT * number : SEGMENT * (number + 1)]
        key = _a((row * segments + number) & MASK)
        total += key * sum(b * word for b, word in zip(B, inside, strict=False))
    return total
