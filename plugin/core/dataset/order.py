"""Global orders of samples: every replica draws its share of one order, at any degrees.

A place counts over all passes and is evaluated by itself, so every rank draws its share of every
global batch from the number of consumed samples and from nothing else.
"""

import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scalai.core.dataset.drawn import COUNTED, Draw, split
from scalai.core.degrees.batches import BatchRamp
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.core.tensors.universal_hash import mix

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShuffledBlocks:
    """The order of Megatron-LM's random sampler, as ``dp`` replicas draw it in micro-batches of
    ``micro_batch_size`` samples: block by block, each replica's micro-batch behind the one before.

    Attributes:
        samples: Samples of the data set.
        is_sharded: Each replica shuffles its own part of the data set; else all deal out one
            shuffled data set.

    Source: MegatronPretrainingRandomSampler, megatron/training/datasets/data_samplers.py (0.16).
    Differs in: every replica leaves the same incomplete block out at the end of a pass. There,
    where the samples leave some replicas one micro-batch more than others, those begin the next
    pass later.
    """

    samples: int
    micro_batch_size: int
    dp: int
    is_sharded: bool

    @property
    def block(self) -> int:
        """Samples of all replicas at once."""
        return self.micro_batch_size * self.dp

    @property
    def length(self) -> int:
        """Places of a pass: whole blocks."""
        return self.samples // self.block * self.block

    @property
    def shuffled(self) -> int:
        """Number of samples shuffled together: the size of a pass's permutation."""
        if self.is_sharded:
            return self.samples // self.block * self.micro_batch_size
        return self.samples // self.micro_batch_size * self.micro_batch_size

    def samples_at(self, places: Places, permutation: Places) -> Places:
        """Return the samples at places of a pass, [places].

        Args:
            places: Each from 0 to ``length``, without it.
            permutation: Of the pass, [shuffled].
        """
        number, within = np.divmod(places, self.block)
        replica, each = np.divmod(within, self.micro_batch_size)
        if self.is_sharded:
            of_replica = permutation[number * self.micro_batch_size + each]
            return np.asarray(of_replica + replica * self.shuffled, dtype=np.int64)
        dealt = number * self.block + each * self.dp + replica
        return np.asarray(permutation[dealt], dtype=np.int64)


def share_of(consumed: int, number: int, micro_batch_size: int, dp: int, dp_rank: int) -> Places:
    """Places over all passes of a replica's micro-batch, by its number behind the consumed samples,
    [micro_batch_size]."""
    begin = consumed + (number * dp + dp_rank) * micro_batch_size
    return np.arange(begin, begin + micro_batch_size, dtype=np.int64)


LONGEST = 1 << 62
"""Samples at most: the product of half an index and half a hash fits in 64 bits."""

Words = npt.NDArray[np.uint64]
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Permutation:
    """The order in which a pass draws its samples: index in, sample out, one to one.

    A Feistel network of eight rounds on pairs (left, right) of a grid at most one row, a square
    root, larger than the data set. A result outside goes through the network again until it falls
    inside (cycle walking).

    Attributes:
        length: Number of samples.
        seed, number: Any whole numbers: the data set's, and the pass.

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


LONGEST_PERIOD = 100_000
"""Longest period, in samples: weights with a higher sum in lowest terms are rounded to it."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Shares of data sets as whole numbers: of ``period`` samples in a row each gives its number.

    The sequence of one period is computed once and repeated. After ``k`` samples a data set of
    weight ``w`` has given ``k * w / period`` but for less than one.

    Attributes:
        numbers: Share of each data set, in lowest terms.

    Source: Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980: with n data
    sets ``1 - 1 / (2 n - 2)`` can be kept. Steiner and Yeomans, "Level schedules for mixed-model,
    just-in-time processes", Management Science 39, 1993: then whoever must give first gives.
    """

    numbers: tuple[int, ...]
    _which: npt.NDArray[np.int16] = field(init=False, repr=False, compare=False)
    _rank: npt.NDArray[np.int32] = field(init=False, repr=False, compare=False)

    @classmethod
    def of(cls, weights: Sequence[float]) -> "Weights":
        """Shares by these weights: exact, where their sum in lowest terms is at most
        ``LONGEST_PERIOD``, else the nearest ones, off by less than one sample a period.

        Raises:
            RefusedError: One is not positive, or is no number.
        """
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise RefusedError(
                f"weights {list(weights)} of a blend must be positive. Leave a data set out that "
                "is not to be drawn from."
            )
        # As they are written: 0.1 is a tenth.
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(each.denominator for each in exact))
        numbers = [int(each * scale) for each in exact]
        if sum(numbers) // math.gcd(*numbers) > LONGEST_PERIOD:
            numbers = _apportioned(exact)
        common = math.gcd(*numbers)
        return cls(tuple(number // common for number in numbers))

    def __post_init__(self) -> None:
        which = np.fromiter(_sequence(self.numbers), dtype=np.int16, count=self.period)
        rank = np.empty(self.period, dtype=np.int32)
        for number, count in enumerate(self.numbers):
            rank[which == number] = np.arange(count, dtype=np.int32)
        object.__setattr__(self, "_which", which)
        object.__setattr__(self, "_rank", rank)

    @property
    def period(self) -> int:
        """Samples of one sequence."""
        return sum(self.numbers)

    def at(self, places: Places) -> tuple[npt.NDArray[np.int16], Places]:
        """Data set of each place, and the place in its own order, [places]."""
        periods, within = np.divmod(places, self.period)
        which = self._which[within]
        counts = np.asarray(self.numbers, dtype=np.int64)[which]
        return which, periods * counts + self._rank[within]

    def before(self, place: int) -> list[int]:
        """Samples of each data set before a place."""
        periods, within = divmod(place, self.period)
        begun = np.bincount(self._which[:within], minlength=len(self.numbers))
        return [
            periods * number + more
            for number, more in zip(self.numbers, begun.tolist(), strict=True)
        ]


def _sequence(numbers: Sequence[int]) -> Iterator[int]:
    """Yield the data sets of one period: among those allowed to give, the one with the earliest
    deadline."""
    period, slack = sum(numbers), max(1, 2 * len(numbers) - 2)
    early = slack - 1
    waiting = sorted(
        (-(-(slack * (each + 1) - early) * period // (slack * number)) - 1, which, each)
        for which, number in enumerate(numbers)
        for each in range(number)
    )
    ready: list[tuple[int, int]] = []
    at = 0
    for place in range(period):
        while at < period and waiting[at][0] <= place:
            _, which, each = waiting[at]
            latest = (slack * each + early) * period // (slack * numbers[which])
            heapq.heappush(ready, (latest, which))
            at += 1
        yield heapq.heappop(ready)[1]


def _apportioned(weights: Sequence[Fraction]) -> list[int]:
    """Return shares of ``LONGEST_PERIOD`` samples: the largest remainders are rounded up; a data
    set has one at least, which the heaviest one gives."""
    total = sum(weights)
    exact = [weight * LONGEST_PERIOD / total for weight in weights]
    shares = [max(1, math.floor(each)) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda each: shares[each] - exact[each])
    for each in by_remainder[: max(0, LONGEST_PERIOD - sum(shares))]:
        shares[each] += 1
    shares[exact.index(max(exact))] -= sum(shares) - LONGEST_PERIOD
    return shares


class GlobalOrder(Protocol):
    """A global order of samples."""

    def samples_at(self, places: Places) -> Places:
        """Samples at places over all passes, [places], each 0 or more."""
        ...

    def draws(self, start: int, stop: int) -> tuple[Draw, ...]:
        """Draws of a step at the places ``start`` to ``stop``."""
        ...

    def facts(self) -> Mapping[str, Mapping[str, Json]]:
        """Facts by data set; a job must keep them over its rounds, or its order is another."""
        ...


@dataclass(frozen=True, slots=True)
class Shuffled:
    """One data set, pass by pass; each pass has an order of its own.

    A pass may begin within a global batch, so each sample comes once a pass.

    Attributes:
        samples: Number of samples.
        seed: Seed of the orders.
        name: Name of the data set in the ledger.
        whole: Samples of a block, such as a global batch: a pass has whole blocks, and drops its
            rest, another one each pass. 1: no rest.
        is_shuffled: False: each pass is in the order of the data set.
        content: Mark of the content, such as its time or a hash.

    Raises:
        RefusedError: There is no whole block.
    """

    samples: int
    seed: int = 0
    name: str = COUNTED
    whole: int = 1
    is_shuffled: bool = True
    content: str = ""

    def __post_init__(self) -> None:
        if self.whole < 1 or self.length < 1:
            raise RefusedError(
                f"data set {self.name!r} has {self.samples} samples, of which a pass has whole "
                f"blocks of {self.whole}: there is none. Give more samples, or drop no rest."
            )

    @property
    def length(self) -> int:
        """Places of a pass."""
        return self.samples // self.whole * self.whole

    def samples_at(self, places: Places) -> Places:
        """As of ``GlobalOrder``: each from 0 to ``samples``."""
        passes, within = np.divmod(np.asarray(places, dtype=np.int64), self.length)
        if not self.is_shuffled:
            return within
        found = np.empty_like(within)
        for number in np.unique(passes).tolist():
            chosen = passes == number
            found[chosen] = Permutation(self.samples, self.seed, number)(within[chosen])
        return found

    def draws(self, start: int, stop: int, blend: str = "") -> tuple[Draw, ...]:
        """As of ``GlobalOrder``; ``blend`` as of ``Draw``."""
        return split(self.name, start, stop, self.length, self.samples, blend=blend)

    def facts(self) -> Mapping[str, Mapping[str, Json]]:
        """As of ``GlobalOrder``."""
        seed = int(self.seed) if self.is_shuffled else None
        whole = {"size": int(self.samples), "whole": int(self.whole)}
        return {self.name: {**whole, "seed": seed, "content": self.content}}


@dataclass(frozen=True, slots=True)
class Blend:
    """Several data sets; each gives its share of the samples by weight.

    After any number of samples each data set has given its share of them but for less than one
    sample (``Weights``). A sample is its index in the concatenation of the data sets.

    Attributes:
        parts: Data sets, with names of their own.
        weights: Weight of each; any sum.
        name: Name of the blend in the ledger.

    Raises:
        RefusedError: Two have one name, there is none, or a weight is not positive.
    """

    parts: tuple[Shuffled, ...]
    weights: tuple[float, ...]
    name: str = "blend"
    _shares: Weights = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if len({*names}) < len(names) or len(names) != len(self.weights) or not names:
            raise RefusedError(
                f"a blend of data sets {names} with weights {list(self.weights)}: each needs one "
                "weight and a name of its own."
            )
        object.__setattr__(self, "_shares", Weights.of(self.weights))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Index of each data set's first sample in the concatenation."""
        return tuple(np.cumsum([0, *(part.samples for part in self.parts[:-1])]).tolist())

    def samples_at(self, places: Places) -> Places:
        """As of ``GlobalOrder``."""
        which, of_part = self._shares.at(np.asarray(places, dtype=np.int64))
        found = np.empty_like(of_part)
        for number, (part, offset) in enumerate(zip(self.parts, self.offsets, strict=True)):
            chosen = which == number
            found[chosen] = offset + part.samples_at(of_part[chosen])
        return found

    def draws(self, start: int, stop: int) -> tuple[Draw, ...]:
        """As of ``GlobalOrder``, at the places of each data set's own order."""
        ends = zip(self._shares.before(start), self._shares.before(stop), strict=True)
        return tuple(
            draw
            for part, (begin, end) in zip(self.parts, ends, strict=True)
            for draw in part.draws(begin, end, self.name)
        )

    def facts(self) -> Mapping[str, Mapping[str, Json]]:
        """As of ``GlobalOrder``."""
        weights = self._shares.numbers
        return {
            part.name: {**part.facts()[part.name], "weight": [number, *weights]}
            for number, part in enumerate(self.parts)
        }


@dataclass(frozen=True, slots=True)
class GlobalBatches:
    """Global batches of one size after the other.

    Attributes:
        stages: First place and size of each stage; ascending, from 0 on. The last one has no end.

    Raises:
        RefusedError: A size is not positive.
    """

    stages: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        sizes = [size for _, size in self.stages]
        if min(sizes) < 1:
            raise RefusedError(f"global batches of {sizes} samples: each has 1 or more.")

    @classmethod
    def of(cls, batch: int | BatchRamp) -> "GlobalBatches":
        """Batches of one size, or of a growing size."""
        return cls(batch.stages if isinstance(batch, BatchRamp) else ((0, batch),))

    def size_at(self, consumed_samples: int) -> int:
        """Samples of the batch at this place."""
        begins = [begin for begin, _ in self.stages]
        return self.stages[bisect_right(begins, consumed_samples) - 1][1]

    def places(self, number: int) -> tuple[int, int]:
        """Begin and end of the global batch of this number, from 0 on."""
        ends = [begin for begin, _ in self.stages[1:]]
        for (begin, size), end in zip(self.stages, ends, strict=False):
            batches = (end - begin) // size
            if number < batches:
                return begin + number * size, begin + (number + 1) * size
            number -= batches
        begin, size = self.stages[-1]
        return begin + number * size, begin + (number + 1) * size

    def after(self, consumed_samples: int) -> Iterator[tuple[int, int]]:
        """Yield where each global batch from there on begins, and its size; without end."""
        while True:
            size = self.size_at(consumed_samples)
            yield consumed_samples, size
            consumed_samples += size
