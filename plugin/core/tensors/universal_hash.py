"""A universal hash of a tensor's content, added up from any pieces of it.

A tensor's rows (along its last axis; 0 or 1 dims are one row) are words of 4 bytes, the last filled
up with zeros: elements of 8 bytes are two words, the low one first. Each 128 words of a row are a
segment, and segments are numbered through all rows. With ``w[i, j]`` for word ``j`` of segment
``i``, a signed integer, and random keys ``a`` and ``b``, the hash is

    sum over i of a[i] * (sum over j of b[j] * w[i, j])   modulo P = 2**64 - 59, a prime

It is independent of the cut: elements outside of a piece count as zero, also within a word.

**Proven.** For any two different tensors of one shape and dtype the chance of equal hashes is at
most 2**-62, over keys of 64 independent random bits each. Words differ by less than P, so the
difference has an inverse. Take a differing segment, and a differing word in it. For any other keys,
this word's key makes the inner sums equal only by one residue of P, shared by at most two of the
2**64 keys. If the inner sums differ, the same is true of the outer sum and the segment's key. Each
level fails with at most 2 / 2**64, so one of both with 2**-62. Values, number of bits and places of
the difference do not matter.

**Assumed.** The fixed, public keys are as good as random for data made without them in hand. They
are made of a seed: ``b`` by SHAKE-256, ``a`` by SplitMix64 of the segment's number. So this proves
against mistakes and damage, not against an adversary.

**Implementation.** Keys are four signed digits of 16 bits, so that float64 products are exact: a
word times a digit is at most 2**46, and 128 of them add up to 2**53 at most. Matrix products of
digits are several times as fast as numpy's arithmetic of 64-bit integers.

Source: S. Halevi, H. Krawczyk, "MMH: Software message authentication in the Gbit/second rates"
(1997), family MMH*, from Carter and Wegman (1979): each of the two sums belongs to it. Their
combination is the lemma of Schwartz (1980) and Zippel (1979) for a polynomial of degree two. G.
Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (2014). Segments and
digits are own.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from operator import mul

import numpy as np
import numpy.typing as npt

from scalai.core.tensors.dtypes import Bits
from scalai.core.tensors.region import Box, RowNumbers, Table, tables

Numbers = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

P = (1 << 64) - 59
"""The modulus, the largest prime of 64 bits."""
SEGMENT = 128
"""Words of a segment, a power of two: more would not add up exactly."""
DIGITS = 4
"""Digits of a key, the lowest first."""
DIGIT_BITS = 16
HALF_BITS = 27
"""A segment's sum (at most 2**53) is split into a multiple of 2**27 and a rest of at most 2**26."""
SEED = b"scalai fingerprint, version 2"
STEP, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's."""

WEIGHTS = tuple(
    1 << (half + DIGIT_BITS * (word + segment))
    for half in (HALF_BITS, 0)
    for word in range(DIGITS)
    for segment in range(DIGITS)
)
"""Weights of the sums of digits: [upper or lower half, digit of b, digit of a], row-major."""
WORD_BYTES = 4
GATHERED = 4096
"""Segments whose halves, times digits, add up exactly: 26 + 15 + 12 bits."""
SUMS = 1 << 9
"""Number of such sums (at most 2**53) in 63 bits."""
ROUNDING = 1.5 * 2.0 ** (52 + HALF_BITS)
"""Adding and subtracting it rounds to a multiple of 2**27."""
BLOCK = 1 << 16
"""Words widened at a time: the copy stays in a core's second-level cache, and the product with four
columns of digits is small enough for OpenBLAS to stay on one core."""
TURNS = 2
"""Blocks widened in turn: storing to lines just stored to takes twice as long (measured on an EPYC
of the Zen 4 kind)."""
PADDED_BYTES = 1 << 18
"""Largest copied part of elements that are no whole words in memory."""
BUFFER_BYTES = 33 << 20
"""A little more than OpenBLAS maps for a product, on a processor without AVX-512. It touches little
of it."""
STEPS = np.arange(GATHERED, dtype=np.uint64) * np.uint64(STEP)


@dataclass(frozen=True, eq=False, slots=True)
class Keys:
    """The keys of a seed.

    ``words`` are the digits of ``b`` [SEGMENT, DIGITS]; ``start`` is SplitMix64's first state.
    """

    words: Floats
    start: int

    @classmethod
    def of(cls, seed: bytes) -> "Keys":
        """Make the keys of a seed; the same on every machine."""
        made = hashlib.shake_256(seed).digest(8 * (SEGMENT + 1))
        digits = np.frombuffer(made[8:], dtype="<i2").reshape(SEGMENT, DIGITS)
        return cls(digits.astype(np.float64), int.from_bytes(made[:8], "little"))

    def states(self, numbers: Numbers) -> Numbers:
        """Return SplitMix64's states for these segments, [segments]: each is ``STEP`` above the
        previous one.
        """
        return numbers * np.uint64(STEP) + np.uint64(self.start)

    def segments(self, states: Numbers) -> Floats:
        """Return the digits of the keys of segments, [segments, DIGITS]. Overwrites ``states``."""
        value = states
        shifted = np.empty_like(value)
        for shift, factor in ((30, FIRST_FACTOR), (27, SECOND_FACTOR)):
            value ^= np.right_shift(value, np.uint64(shift), out=shifted)
            value *= np.uint64(factor)
        value ^= np.right_shift(value, np.uint64(31), out=shifted)
        return value.view(np.int16).reshape(-1, DIGITS).astype(np.float64)


KEYS = Keys.of(SEED)


def weigh(sums: list[int]) -> int:
    """Return the unreduced integer of sums of digits in the order of ``WEIGHTS``."""
    assert len(sums) == len(WEIGHTS)
    return sum(map(mul, sums, WEIGHTS))


Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """Neighbouring words of rows in equal segments, cut alike.

    Words ``low <= word < high`` of a piece's rows are ``count`` segments of ``width`` words, or one
    segment's words from ``begin`` on; ``segment`` is the first one's place in its row.
    """

    low: int
    high: int
    segment: int
    count: int
    begin: int

    @property
    def width(self) -> int:
        return (self.high - self.low) // self.count


def runs(first: int, words: int) -> Iterator[SegmentRun]:
    """Cut the words of a row from ``first`` on into the end of a segment, whole segments, and a
    begin.
    """
    head = min(-first % SEGMENT, words)
    middle = (words - head) // SEGMENT * SEGMENT
    for low, high, count in (
        (0, head, 1),
        (head, head + middle, middle // SEGMENT),
        (head + middle, words, 1),
    ):
        if high > low:
            at = first + low
            yield SegmentRun(low, high, at // SEGMENT, count, at % SEGMENT)


def words_of_row(columns: int, item_bytes: int) -> int:
    """Return the number of words in a row of this many elements."""
    return -(-columns * item_bytes // WORD_BYTES)


def segments_of_row(columns: int, item_bytes: int) -> int:
    """Return the number of segments in a row of this many elements.

    Segment ``s`` of row ``r`` of a tensor has the number ``r * segments + s``.
    """
    return -(-words_of_row(columns, item_bytes) // SEGMENT)


def as_words(table: Table) -> Iterator[tuple[Words, int, RowNumbers]]:
    """Yield rows of elements as words [rows, words], with the place of the first word in its row
    and the rows' numbers.

    In place if the elements make up whole words, else in small copies with zeros around them.
    """
    matrix, item = table.matrix, table.matrix.itemsize
    place, ahead = divmod(table.first * item, WORD_BYTES)
    is_whole = not ahead and matrix.shape[1] * item % WORD_BYTES == 0
    if is_whole and matrix.flags.aligned and (item == WORD_BYTES or matrix.strides[1] == item):
        view = matrix.view(np.int32)
        if view.flags.aligned:
            yield view, place, table.rows
            return
    across = PADDED_BYTES // item
    down = max(across // matrix.shape[1], 1)
    for row in range(0, len(matrix), down):
        for column in range(0, matrix.shape[1], across):
            block = matrix[row : row + down, column : column + across]
            place, ahead = divmod((table.first + column) * item, WORD_BYTES)
            words = -(-(ahead + block.shape[1] * item) // WORD_BYTES)
            padded = np.zeros((len(block), words * WORD_BYTES // item), dtype=block.dtype)
            padded[:, ahead // item : ahead // item + block.shape[1]] = block
            yield padded.view(np.int32), place, table.rows[row : row + down]


def piece_hash(values: Bits, box: Box, shape: tuple[int, ...], keys: Keys | None = None) -> int:
    """Return the hash of one piece of a tensor.

    Args:
        values: Bit patterns of the piece [box.shape], unsigned, any strides. Not empty.
        box: Place of the piece in the global tensor.
        shape: Shape of the global tensor, in elements.
        keys: Keys of another seed.

    Raises:
        MemoryError: There is no room for the buffers.
    """
    _make_room()
    item = values.itemsize
    rows = values.size // values.shape[-1] if values.ndim else 1
    total = Hash(values.nbytes // WORD_BYTES + 2 * rows, keys or KEYS)
    segments = np.uint64(segments_of_row(shape[-1] if shape else 1, item))
    for table in tables(values, box, shape):
        for words, first, numbers in as_words(table):
            total.add(words, first, numbers.astype(np.uint64) * segments)
    return total.value()


@cache
def _make_room() -> None:
    """Make OpenBLAS allocate its buffer, once a process.

    Without room OpenBLAS would end the process; raises ``MemoryError`` instead.
    """
    np.empty(BUFFER_BYTES, dtype=np.uint8)
    np.dot(np.zeros((BLOCK // SEGMENT, SEGMENT)), np.zeros((SEGMENT, DIGITS)))


def _is_transposed(words: Words) -> bool:
    """Return True if neighbours in a column are adjacent, and those in a row are not."""
    return words.strides[0] == words.itemsize < words.strides[-1]


class Hash:
    """The hash of a piece, while its words are being added."""

    def __init__(self, words: int, keys: Keys) -> None:
        """``words``: upper bound of the words to be added."""
        self._keys = keys
        self._wide = np.empty(min(TURNS * BLOCK, max(words, SEGMENT)))
        self._widened = 0
        gathered = min(GATHERED, words)
        self._states = np.empty(gathered, dtype=np.uint64)
        self._sums = np.empty((gathered, DIGITS))
        self._count = 0
        self._digits = np.zeros((2, DIGITS, DIGITS), dtype=np.int64)
        self._added = 0
        self._total = 0

    def add(self, words: Words, first: int, rows: Numbers) -> None:
        """Add words [rows, words], from word ``first`` of the tensor's rows on.

        ``rows`` [rows] are the numbers of their first segments.
        """
        for run in runs(first, words.shape[1]):
            digits = self._keys.words[run.begin : run.begin + run.width]
            table = words[:, run.low : run.high].reshape(len(words), run.count, run.width)
            states = self._keys.states(rows + np.uint64(run.segment))
            if _is_transposed(words):
                for at in range(run.count):
                    self._gather_rows(table[:, at : at + 1], digits, states + STEPS[at])
            elif run.high - run.low > BLOCK // 2:
                for row, state in zip(table[:, None], states[:, None], strict=True):
                    for at in range(0, run.count, GATHERED):
                        self._gather(row[:, at : at + GATHERED], digits, state)
                        state += np.uint64(STEP * GATHERED % (1 << 64))
            else:
                self._gather_rows(table, digits, states)

    def _gather_rows(self, table: Words, digits: Floats, states: Numbers) -> None:
        down = GATHERED // table.shape[1]
        for row in range(0, len(table), down):
            self._gather(table[row : row + down], digits, states[row : row + down])

    def _gather(self, block: Words, digits: Floats, first: Numbers) -> None:
        """Multiply a block [rows, segments, words] by the words' keys.

        It has one row, or few enough segments to be widened at once. ``first`` [rows] is the state
        of each row's first segment.
        """
        rows, segments, width = block.shape
        count = rows * segments
        if self._count + count > len(self._states):
            self._multiply()
        begin, end = self._count, self._count + count
        states = self._states[begin:end].reshape(rows, segments)
        np.add(first[:, None], STEPS[:segments], out=states)
        if rows == 1:
            block, segments = block[0], 1
        step = min(BLOCK, len(self._wide)) // (segments * width)
        for at in range(0, len(block), step):
            part = block[at : at + step]
            if self._widened + part.size > len(self._wide):
                self._widened = 0
            wide = self._wide[self._widened : self._widened + part.size]
            self._widened += part.size
            if _is_transposed(part):
                matrix = wide.reshape(width, -1).T  # in its order in memory
                np.copyto(matrix, part.reshape(matrix.shape))
            else:
                matrix = wide.reshape(-1, width)
                np.copyto(wide.reshape(part.shape), part)
            low, high = begin + at * segments, begin + (at + len(part)) * segments
            np.dot(matrix, digits, out=self._sums[low:high])
        self._count = end

    def _multiply(self) -> None:
        lower = self._sums[: self._count]
        upper = lower + ROUNDING
        upper -= ROUNDING
        lower -= upper
        digits = self._keys.segments(self._states[: self._count])
        self._digits[0] += (np.dot(upper.T, digits) * 2.0**-HALF_BITS).astype(np.int64)
        self._digits[1] += np.dot(lower.T, digits).astype(np.int64)
        self._count = 0
        self._added += 1
        if self._added == SUMS:
            self._carry()

    def _carry(self) -> None:
        self._total += weigh(self._digits.ravel().tolist())
        self._digits[:] = 0
        self._added = 0

    def value(self) -> int:
        """Return the hash of all added words."""
        if self._count:
            self._multiply()
        self._carry()
        return self._total % P


def mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return splitmix64 of each word: every bit of the input changes half of the bits.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    words = words + np.uint64(STEP)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    return words ^ (words >> np.uint64(31))
