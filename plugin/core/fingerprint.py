"""A checksum of a tensor's content that does not depend on how the tensor is cut.

Every element has an odd 64-bit key: the hash of its row in the upper half, twice its flat index
plus one in the lower. The fingerprint is the sum of bit pattern times key, modulo 2**64. A sum can
be added up from pieces in any order, so each shard is summed where it lies. It is a checksum
against mistakes and damage, not against an adversary.

What it finds for certain, in tensors of up to 2**31 words: any change of one element, because an
odd key cannot cancel it, and any exchange of two unequal elements: their difference is below 2**32,
the keys differ below bit 32, so the product cannot vanish modulo 2**64. Larger changes are missed
with a chance of about 2**-32 or less.

Source: own; neither Tenplex/Scalai (arXiv 2312.05181) nor its public code proves a reconfiguration.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.boxes import NumberLine, box_text, distinct
from scalai.core.collection import Collection
from scalai.core.coverage import find_gaps, find_overlaps
from scalai.core.errors import ProofError
from scalai.core.region import Box, row_major

Words = npt.NDArray[Any]
"""Unsigned bit patterns: uint8, uint16, uint32 or uint64."""

Keys = npt.NDArray[np.uint64]

MODULUS = 1 << 64
SEGMENT = 4096
"""Columns of a long row that are summed as a row of their own."""
BLOCK = 1 << 15
"""Elements widened at a time, so that the widened copy stays in a core's second-level cache."""
PAIR_BLOCK = 1 << 18
"""Elements whose upper halves are split off at a time: more, because less is written."""
NARROW = 64
"""Rows of fewer columns are multiplied out: to sum each of them alone would cost more."""
PART_ROWS = 1 << 17
"""Rows whose keys are made at a time."""
COPY_BYTES = 1 << 20
"""What cannot be read row by row in place is copied in parts of at most this size."""
NAMED = 5
"""Tensors named in an error."""


def hash32(rows: npt.NDArray[Any]) -> Keys:
    """Return a 32-bit hash of each row number, as uint64; unequal for unequal rows below 2**32.

    Source: C. Wellons, "Prospecting for hash functions", lowbias32, a bijection of 32 bits.
    """
    value = rows.astype(np.uint64) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        value ^= value >> np.uint64(shift)
        value = (value * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return value ^ (value >> np.uint64(16))


def words_per_element(item_bytes: int) -> int:
    """Return how many words an element is: 8 bytes are two words of 4, the low one first."""
    return 2 if item_bytes == 8 else 1


def row_keys(box: Box, shape: tuple[int, ...], words: int = 1) -> Keys:
    """Return the key of the first word of every row of ``box``, [rows], in row-major order.

    A row runs over the last axis; the key of its word ``c`` is ``key + 2 * c`` (modulo 2**64). A
    tensor of 0 or 1 dims is one row. ``shape`` is the global tensor's, ``words`` what
    ``words_per_element`` says.

    The sum over a piece is therefore ``sum_rows(key * sum_c(x)) + 2 * sum_c(c * sum_rows(x))``.
    """
    rows = np.zeros(1, dtype=np.int64)
    for start, size, stride in zip(box.offset, box.shape[:-1], row_major(shape[:-1]), strict=False):
        rows = (rows[:, None] + (start + np.arange(size)) * stride).reshape(-1)
    columns = shape[-1] if shape else 1
    first = box.offset[-1] if box.offset else 0
    flat = (rows * columns + first).astype(np.uint64) * np.uint64(words)
    keys = (hash32(rows) << np.uint64(32)) + flat * np.uint64(2) + np.uint64(1)
    return np.asarray(keys, dtype=np.uint64)


def piece_fingerprint(values: Words, box: Box, shape: tuple[int, ...]) -> int:
    """Return the fingerprint of one piece of a tensor.

    Args:
        values: Bit patterns of the piece, of shape ``box.shape``, unsigned integers of 1, 2, 4 or 8
            bytes, any strides.
        box: Where the piece lies in the global tensor.
        shape: The global tensor's shape, in elements.
    """
    assert values.dtype.kind == "u" and values.shape == box.shape, (values.dtype, values.shape)
    if not values.size:
        return 0
    words = words_per_element(values.itemsize)
    total = 0
    for part, part_box in _parts(values, box):
        columns = part.shape[-1] if part.ndim else 1
        matrix = part.reshape(-1, columns)
        if words == 2:
            matrix = np.ascontiguousarray(matrix, dtype="<u8").view("<u4")
        total += _matrix_sum(matrix, row_keys(part_box, shape, words))
    return total % MODULUS


def combine(fingerprints: Iterable[int]) -> int:
    """Return the fingerprint of the union of disjoint pieces."""
    return sum(int(value) for value in fingerprints) % MODULUS


def tensor_fingerprints(
    collection: Collection, fingerprints: Iterable[int] | Keys
) -> dict[str, int]:
    """Add up the fingerprints of a whole state's pieces to those of its tensors.

    Args:
        collection: Pieces of all holders. Replicas (equal boxes) count once. Their distinct boxes
            must be disjoint, which ``check_coverage`` tells.
        fingerprints: One a row.

    Raises:
        ProofError: Two replicas of a box differ.
    """
    values = np.array([int(value) for value in fingerprints], dtype=np.uint64)
    totals = {tensor.name: 0 for tensor in collection.tensors}
    rows = np.flatnonzero(collection.numel())
    line = NumberLine.of(collection.tensors)
    boxes = line.place(collection.tensor[rows], collection.offset[rows], collection.shape[rows])
    first, number = distinct(boxes)
    differs = np.flatnonzero(values[rows] != values[rows[first]][number])
    if len(differs):
        row = rows[differs[0]]
        tensor, box = collection.box(row)
        known = int(values[rows[first[number[differs[0]]]]])
        raise ProofError(
            f"replicas of {box_text(box)} of {tensor.name!r} differ: fingerprints "
            f"{known:016x} and {int(values[row]):016x} ({len(differs)} such pieces). "
            "A rank trained on other values, or its memory was damaged: resume from an older "
            "generation."
        )
    for tensor_number, value in zip(boxes.tensor[first], values[rows[first]], strict=True):
        name = collection.tensors[tensor_number].name
        totals[name] = (totals[name] + int(value)) % MODULUS
    return totals


def sure_fingerprints(collection: Collection, fingerprints: Iterable[int] | Keys) -> dict[str, int]:
    """Return the fingerprints of those tensors that are whole and cut without overlaps, as
    ``tensor_fingerprints`` does: of others the pieces' do not tell."""
    unsure = {tensor.name for tensor, _ in find_gaps(collection)}
    unsure |= {tensor.name for tensor, _, _ in find_overlaps(collection)}
    is_sure = np.array([tensor.name not in unsure for tensor in collection.tensors], dtype=bool)
    rows = np.flatnonzero(is_sure[collection.tensor]) if len(collection) else collection.tensor
    values = np.array([int(value) for value in fingerprints], dtype=np.uint64)
    prints = tensor_fingerprints(collection.select(rows), values[rows])
    return {name: value for name, value in prints.items() if name not in unsure}


def compare(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Raise ``ProofError`` that names the tensors in which two states differ."""
    problems = []
    for words, names in (
        ("are missing afterwards", sorted(before.keys() - after.keys())),
        ("were not there before", sorted(after.keys() - before.keys())),
        ("differ", sorted(n for n in before.keys() & after.keys() if before[n] != after[n])),
    ):
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            problems.append(f"{len(names)} {words}: {', '.join(names[:NAMED])}{more}")
    if problems:
        raise ProofError(
            f"fingerprints of {len(before)} tensors before and {len(after)} after are not equal; "
            f"{'; '.join(problems)}. The state was not restored exactly: go back to the old "
            "generation."
        )


def _parts(values: Words, box: Box) -> Iterator[tuple[Words, Box]]:
    """Yield parts of a piece that have few rows and are a matrix in place, or else a small copy."""
    rows = values.size // values.shape[-1] if values.ndim else 1
    is_matrix = values.ndim <= 2 and (not values.ndim or values.strides[-1] == values.itemsize)
    in_place = is_matrix or values.flags.c_contiguous
    if rows <= PART_ROWS and (in_place or values.nbytes <= COPY_BYTES):
        yield values, box
        return
    axes = range(values.ndim - 1) if rows > PART_ROWS else range(values.ndim)
    axis = max(axes, key=lambda k: values.shape[k])
    middle = values.shape[axis] // 2
    for low, high in ((0, middle), (middle, values.shape[axis])):
        offset, extent = list(box.offset), list(box.shape)
        offset[axis], extent[axis] = offset[axis] + low, high - low
        index = (slice(None),) * axis + (slice(low, high),)
        yield from _parts(values[index], Box(tuple(offset), tuple(extent)))


def _matrix_sum(matrix: Words, keys: Keys) -> int:
    """Return the sum of ``matrix`` [rows, columns], whose row ``r`` starts with key ``keys[r]``."""
    columns = matrix.shape[1]
    if columns < NARROW:
        step = BLOCK // columns
        parts = range(0, len(matrix), step)
        return sum(_narrow_sum(matrix[r : r + step], keys[r : r + step]) for r in parts)
    if columns <= BLOCK // 2:
        return _blocks_sum(matrix, keys)
    whole = columns - columns % SEGMENT
    segments = np.arange(0, whole, SEGMENT, dtype=np.uint64) * np.uint64(2)
    rest_key = np.uint64(2 * whole % MODULUS)
    total = 0
    for row, key in zip(matrix, keys, strict=True):
        total += _blocks_sum(row[:whole].reshape(-1, SEGMENT), segments + key)
        total += _blocks_sum(row[None, whole:], (key + rest_key)[None])
    return total


def _narrow_sum(matrix: Words, keys: Keys) -> int:
    """Return the sum of a matrix of few columns: every element times its own key."""
    shifts = np.arange(matrix.shape[1], dtype=np.uint64) * np.uint64(2)
    return int(((keys[:, None] + shifts) * matrix.astype(np.uint64)).sum())


def _blocks_sum(matrix: Words, keys: Keys) -> int:
    """Return the sum of a matrix by its row sums and column sums: two additions an element."""
    columns = matrix.shape[1]
    if matrix.itemsize == 4 and columns % 2 == 0 and matrix.strides[1] == 4:
        return _pairs_sum(matrix.view(np.uint64), keys)
    # Sums over at most BLOCK elements of 16 bits fit into 32 bits, which are added twice as fast.
    wide = np.dtype(np.uint64 if matrix.itemsize == 4 else np.uint32)
    column_sums = np.zeros(columns, dtype=np.uint64)
    total = 0
    step = BLOCK // max(columns, 1)
    for row in range(0, len(matrix), step):
        block = matrix[row : row + step].astype(wide)
        row_sums = block.sum(axis=1, dtype=wide).astype(np.uint64)
        total += int((row_sums * keys[row : row + step]).sum())
        column_sums += block.sum(axis=0, dtype=wide)
    shifts = np.arange(columns, dtype=np.uint64) * np.uint64(2)
    return total + int((column_sums * shifts).sum())


def _pairs_sum(pairs: Words, keys: Keys) -> int:
    """Return the sum of a matrix of 4-byte words, given as pairs of neighbours [rows, columns / 2].

    Half as much to add: a pair is its first word plus 2**32 times its second one, so the sums of
    the pairs and of the second words give those of the first (all far below 2**64). Little-endian,
    as every machine that torch runs on.
    """
    half = np.uint64(32)
    step = max(PAIR_BLOCK // max(2 * pairs.shape[1], 1), 1)
    buffer = np.empty((min(step, len(pairs)), pairs.shape[1]), dtype=np.uint64)
    pair_sums, second_sums = np.zeros((2, pairs.shape[1]), dtype=np.uint64)
    total = 0
    for row in range(0, len(pairs), step):
        block = pairs[row : row + step]
        second = np.right_shift(block, half, out=buffer[: len(block)])
        row_sums = block.sum(axis=1) - np.uint64((1 << 32) - 1) * second.sum(axis=1)
        total += int((row_sums * keys[row : row + step]).sum())
        pair_sums += block.sum(axis=0)
        second_sums += second.sum(axis=0)
    first_sums = pair_sums - (second_sums << half)
    shifts = np.arange(pairs.shape[1], dtype=np.uint64) * np.uint64(4)
    return (
        total
        + int((first_sums * shifts).sum())
        + int((second_sums * (shifts + np.uint64(2))).sum())
    )
