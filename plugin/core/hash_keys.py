"""The keys of the universal hash, made of a seed, and what their digits count.

See ``core/universal_hash.py``.
"""

import hashlib
from dataclasses import dataclass
from operator import mul

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, eq=False, slots=True)
class Keys:
    """The keys that a seed gives.

    ``words`` are the digits of ``b`` [SEGMENT, DIGITS]; ``start`` is where SplitMix64 begins.
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
        """Return what SplitMix64 makes the keys of these segments of, [segments]: each is ``STEP``
        more than that of the segment before."""
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
WEIGHTS = tuple(
    1 << (half + DIGIT_BITS * (word + segment))
    for half in (HALF_BITS, 0)
    for word in range(DIGITS)
    for segment in range(DIGITS)
)
"""What the sums of digits count: [upper or lower half, digit of b, digit of a], row-major."""


def weigh(sums: list[int]) -> int:
    """Return the integer, not yet reduced, that sums of digits in the order of ``WEIGHTS`` are."""
    assert len(sums) == len(WEIGHTS)
    return sum(map(mul, sums, WEIGHTS))
