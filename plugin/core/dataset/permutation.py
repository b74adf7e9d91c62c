"""A permutation of a data set that is evaluated at any index and never lies in memory.

Equal on every machine: integers alone, of which every operation is defined.
"""

import hashlib
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scalai.core.dataset.order import Places
from scalai.core.errors import RefusedError
from scalai.core.tensors.mixing import mix

LONGEST = 1 << 62
"""Samples at most: the product of half an index and half a hash fits in 64 bits."""

Words = npt.NDArray[np.uint64]
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Permutation:
    """The order in which a pass draws its samples: index in, sample out, one to one.

    A Feistel network of eight rounds on pairs (left, right) of a grid that is at most one row, a
    square root, larger than the data set. What falls outside of that goes through the network again
    until it falls inside (cycle walking).

    Attributes:
        length: Samples.
        seed, number: Which of the orders, any whole numbers: the data set's, and the pass.

    Raises:
        RefusedError: There are no samples, or more than ``LONGEST``.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002: "generalized
    Feistel" and "cycle-walking cipher". Differs in: the round function is splitmix64 under a key,
    because samples are to be mixed and nothing is to be kept secret; the walk sets out from the
    smallest grid.
    """

    length: int
    seed: int
    number: int
    _keys: Words = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.length <= LONGEST:
            raise RefusedError(
                f"a data set of {self.length} samples has no order; give one with 1 to {LONGEST}."
            )
        name = f"scalai order {self.length} {self.seed} {self.number}"
        keys = np.frombuffer(hashlib.sha512(name.encode()).digest(), "<u8")
        object.__setattr__(self, "_keys", keys.astype(np.uint64).reshape(-1, 2))

    def __call__(self, indices: Places) -> Places:
        """Return the samples at these indices, [indices].

        Raises:
            RefusedError: An index is negative, or not below ``length``.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < self.length:
            raise RefusedError(
                f"indices {indices.min()} to {indices.max()} are not in a data set of "
                f"{self.length} samples."
            )
        found = self._once(indices.astype(np.uint64))
        while (outside := np.flatnonzero(found >= np.uint64(self.length))).size:
            found[outside] = self._once(found[outside])
        return found.astype(np.int64)

    def _once(self, indices: Words) -> Words:
        """Put places of the grid through the network, [indices]."""
        width = math.isqrt(self.length - 1) + 1
        columns, rows = np.uint64(width), np.uint64(-(-self.length // width))
        right, left = np.divmod(indices, columns)
        for to_left, to_right in self._keys:
            left = _moved(left, right ^ to_left, columns)
            right = _moved(right, left ^ to_right, rows)
        return right * columns + left


def _moved(half: Words, by: Words, size: np.uint64) -> Words:
    """Add the hash of the other half, modulo the size of this one."""
    half = half + ((mix(by) >> _HALF) * size >> _HALF)
    return np.where(half < size, half, half - size)
