"""Which data set of a blend gives the sample at a place, so that none is ever a whole sample ahead
of its share, or behind it."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from scalai.core.dataset.order import Places
from scalai.core.errors import RefusedError

LONGEST_PERIOD = 100_000
"""Weights whose sum is higher in lowest terms become shares of so many samples."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Shares of data sets as whole numbers: of ``period`` samples in a row each gives its number.

    The sequence of one period is computed once and repeated, so that any place is looked up. After
    ``k`` samples a data set of weight ``w`` has given ``k * w / period`` but for less than one.

    Attributes:
        numbers: Of each data set, in lowest terms.

    Source: Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980: with n data
    sets ``1 - 1 / (2 n - 2)`` can be kept. Steiner and Yeomans, "Level schedules for mixed-model,
    just-in-time processes", Management Science 39, 1993: then whoever must give first gives.
    """

    numbers: tuple[int, ...]
    _which: npt.NDArray[np.int16] = field(init=False, repr=False, compare=False)
    _rank: npt.NDArray[np.int32] = field(init=False, repr=False, compare=False)

    @classmethod
    def of(cls, weights: Sequence[float]) -> "Weights":
        """Return the shares by these weights: as they are, where their sum in lowest terms is at
        most ``LONGEST_PERIOD``, else the nearest that are: off by less than one sample in so many.

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
        """After so many samples the sequence begins again."""
        return sum(self.numbers)

    def at(self, places: Places) -> tuple[npt.NDArray[np.int16], Places]:
        """Return which data set gives each place, and the place of that data set, [places]."""
        periods, within = np.divmod(places, self.period)
        which = self._which[within]
        counts = np.asarray(self.numbers, dtype=np.int64)[which]
        return which, periods * counts + self._rank[within]

    def before(self, place: int) -> list[int]:
        """Return how many samples each data set gives before a place."""
        periods, within = divmod(place, self.period)
        begun = np.bincount(self._which[:within], minlength=len(self.numbers))
        return [
            periods * number + more
            for number, more in zip(self.numbers, begun.tolist(), strict=True)
        ]


def _sequence(numbers: Sequence[int]) -> Iterator[int]:
    """Yield the data sets of one period: of those that may give, the one that must give first."""
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
