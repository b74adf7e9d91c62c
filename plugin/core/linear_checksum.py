"""The fingerprint of older releases, version 1: it proves what they have saved, and nothing else.

Every element has an odd 64-bit key: the hash of its row in the upper half, twice its flat index
plus one in the lower. The fingerprint is the sum of bit pattern times key, modulo 2**64. Any change
of one element is found, and any exchange of two; but it is linear within a row, so that +k, -2k, +k
on neighbours pass, and moved bits whose places add up to the same.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.dtypes import Bits
from scalai.core.region import Box, RowNumbers, tables

Keys = npt.NDArray[np.uint64]

MODULUS = 1 << 64
BLOCK = 1 << 15
"""Elements widened at a time."""


def words_per_element(item_bytes: int) -> int:
    """Return how many words an element is: 8 bytes are two words of 4, the low one first."""
    return 2 if item_bytes == 8 else 1


def hash32(rows: npt.NDArray[Any]) -> Keys:
    """Return a 32-bit hash of each row number, as uint64.

    Source: C. Wellons, "Prospecting for hash functions", lowbias32, a bijection of 32 bits.
    """
    value = rows.astype(np.uint64) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        value ^= value >> np.uint64(shift)
        value = (value * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return value ^ (value >> np.uint64(16))


def row_keys(rows: RowNumbers, first: int, columns: int, words: int) -> Keys:
    """Return the key of word 0 of each row [rows]; that of its word ``c`` is ``key + 2 * c``.

    Args:
        rows: Numbers in the whole tensor.
        first: The place of the piece's first column in a row, in elements.
        columns: Of the whole tensor.
        words: What ``words_per_element`` says.
    """
    flat = (rows * columns + first).astype(np.uint64) * np.uint64(words)
    keys = (hash32(rows) << np.uint64(32)) + flat * np.uint64(2) + np.uint64(1)
    return np.asarray(keys, dtype=np.uint64)


def piece_checksum(values: Bits, box: Box, shape: tuple[int, ...]) -> int:
    """Return the checksum of one piece that is not empty; as ``universal_hash.piece_hash``."""
    words = words_per_element(values.itemsize)
    total = 0
    for table in tables(values, box, shape):
        keys = row_keys(table.rows, table.first, shape[-1] if shape else 1, words)
        matrix = table.matrix
        if words == 2:
            matrix = np.ascontiguousarray(matrix, dtype="<u8").view("<u4")
        columns = min(matrix.shape[1], BLOCK)
        down = BLOCK // columns
        for row in range(0, len(matrix), down):
            for column in range(0, matrix.shape[1], columns):
                block = matrix[row : row + down, column : column + columns].astype(np.uint64)
                total += _block_sum(block, keys[row : row + down] + np.uint64(2 * column))
    return total % MODULUS


def _block_sum(block: Keys, keys: Keys) -> int:
    """Return the sum of a block [rows, columns] by its row sums and its column sums."""
    shifts = np.arange(block.shape[1], dtype=np.uint64) * np.uint64(2)
    return int((block.sum(axis=1) * keys).sum()) + int((block.sum(axis=0) * shifts).sum())
