"""Sets of places in a sequence of samples, as intervals: a million consecutive samples are one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from scalai.core import fields
from scalai.core.jsonable import Json

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Places ``start <= place < stop`` of each pair; pairs ascend, and none meets the next one.

    ``of`` makes it from any pairs.
    """

    pairs: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        ends = [end for pair in self.pairs for end in pair]
        if any(not 0 <= start < stop for start, stop in self.pairs) or ends != sorted(set(ends)):
            raise ValueError(f"{list(self.pairs)} are not ascending intervals that stay apart")

    @classmethod
    def of(cls, *pairs: Pair) -> "Intervals":
        """Places in any of these pairs; empty ones hold none."""
        return cls(tuple(_merged(pairs)))

    @classmethod
    def from_json(cls, value: Json, name: str) -> "Intervals":
        """Read the list of ``to_json``. Raises ``ValueError`` with ``name`` for anything else."""
        numbers = [fields.whole_number(each, name) for each in fields.listed(value, name)]
        if len(numbers) % 2:
            raise ValueError(f"{name} has a start without a stop")
        return cls(tuple(zip(numbers[::2], numbers[1::2], strict=True)))

    def to_json(self) -> list[int]:
        """Starts and stops in one list."""
        return [end for pair in self.pairs for end in pair]

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def __len__(self) -> int:
        """Number of places."""
        return sum(stop - start for start, stop in self.pairs)

    def __str__(self) -> str:
        return ", ".join(f"{start}:{stop}" for start, stop in self.pairs) or "none"

    @property
    def end(self) -> int:
        """Behind the last place; 0 of an empty set."""
        return self.pairs[-1][1] if self.pairs else 0

    def __or__(self, other: "Intervals") -> "Intervals":
        """Places of either."""
        return Intervals(tuple(_merged([*self.pairs, *other.pairs])))

    def __and__(self, other: "Intervals") -> "Intervals":
        """Places of both."""
        return Intervals(tuple(_shared(self.pairs, other.pairs)))

    def __sub__(self, other: "Intervals") -> "Intervals":
        """Places of this one alone."""
        return Intervals(tuple(_left(self.pairs, other.pairs)))

    def followed_by(self, start: int, stop: int) -> "Intervals":
        """Places with ``start`` to ``stop``, behind all others: as ``|``, at the cost of one
        pair."""
        if self.pairs and self.pairs[-1][1] == start:
            return Intervals((*self.pairs[:-1], (self.pairs[-1][0], stop)))
        return Intervals((*self.pairs, (start, stop)))

    def holes(self, begin: int = 0) -> "Intervals":
        """Missing places from ``begin`` to the last one."""
        return Intervals.of((begin, self.end)) - self if self.end > begin else Intervals()


def _merged(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Yield the union of pairs, ascending; adjacent ones become one."""
    begin, end = None, 0
    for start, stop in sorted(pair for pair in pairs if pair[0] < pair[1]):
        if begin is None:
            begin, end = start, stop
        elif start > end:
            yield begin, end
            begin, end = start, stop
        else:
            end = max(end, stop)
    if begin is not None:
        yield begin, end


def _shared(one: Sequence[Pair], two: Sequence[Pair]) -> Iterator[Pair]:
    """Yield the pairs of places in both sequences."""
    i = j = 0
    while i < len(one) and j < len(two):
        start, stop = max(one[i][0], two[j][0]), min(one[i][1], two[j][1])
        if start < stop:
            yield start, stop
        if one[i][1] <= two[j][1]:
            i += 1
        else:
            j += 1


def _left(pairs: Sequence[Pair], taken: Sequence[Pair]) -> Iterator[Pair]:
    """Yield the pairs of places without ``taken``."""
    j = 0
    for begin, stop in pairs:
        start = begin
        while j < len(taken) and taken[j][1] <= start:
            j += 1
        at = j
        while at < len(taken) and taken[at][0] < stop:
            if start < taken[at][0]:
                yield start, taken[at][0]
            start = taken[at][1]
            at += 1
        if start < stop:
            yield start, stop
