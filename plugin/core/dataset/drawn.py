"""Draws of steps from a pass over a data set, and the consumed places of passes.

A place is an index of the global order of a pass: all replicas together draw it, in any layout.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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


COUNTED = "samples"
"""Name of the data set of a job that tells only the number of samples of a step."""


class Number(NamedTuple):
    """A pass over a data set: the script's epoch, and the number of passes it began in this epoch
    before."""

    epoch: int
    repeat: int = 0

    def __str__(self) -> str:
        return str(self.epoch) if not self.repeat else f"{self.epoch}, repeat {self.repeat}"


@dataclass(frozen=True, slots=True)
class Draw:
    """One step's draw from a data set: the places ``start <= place < stop`` of a pass.

    Attributes:
        data_set: Name, the same in each round of the job.
        number: The pass.
        length: Places of the whole pass, the filling of its last batch included; None: not known.
        size: Samples of the data set; later places repeat the first ones, to fill the last batch.
            None: not known.
        is_dealt: The places come from samplers, and were not only counted.
        blend: Blend of which the data set is a part; its parts share the samples of a step. Empty:
            none.
    """

    data_set: str
    number: Number
    start: int
    stop: int
    length: int | None = None
    size: int | None = None
    is_dealt: bool = False
    blend: str = ""


@dataclass(frozen=True, slots=True)
class DrawnPass:
    """Consumed places of one pass over a data set, or of consecutive equal ones.

    Attributes:
        first, last: The pass; two numbers for several passes with the same places consumed, from
            their begin on.
        unproven: First place of the ledger; earlier ones were consumed, if at all, before it.
        taken: Places consumed by steps.
        twice: Places consumed by more than one step.
        length, size, is_dealt: As of ``Draw``.
    """

    data_set: str
    first: Number
    last: Number
    length: int | None
    size: int | None
    unproven: int
    taken: Intervals
    twice: Intervals
    is_dealt: bool

    @property
    def count(self) -> int:
        """Number of passes."""
        return sum(self.last) - sum(self.first) + 1

    @property
    def samples(self) -> int:
        """Number of consumed samples; samples seen twice count twice."""
        return len(self.taken) * self.count + len(self.twice)

    @property
    def skipped(self) -> Intervals:
        """Places skipped by steps."""
        return self.taken.holes(self.unproven)

    @property
    def is_plain(self) -> bool:
        """Consumed from its begin on, nothing skipped and nothing twice."""
        return (
            not self.unproven and not self.twice and self.taken == Intervals.of((0, self.taken.end))
        )

    def with_draw(self, draw: Draw) -> "DrawnPass":
        """The pass after a draw."""
        if max(self.taken.end, self.unproven) <= draw.start < draw.stop:  # as each step's
            taken, twice = self.taken.followed_by(draw.start, draw.stop), self.twice
        else:
            drawn = Intervals.of((draw.start, draw.stop))
            taken = self.taken | drawn
            twice = self.twice | ((self.taken | Intervals.of((0, self.unproven))) & drawn)
        return DrawnPass(
            self.data_set, self.first, self.last, draw.length, draw.size, self.unproven, taken,
            twice, self.is_dealt and draw.is_dealt,
        )  # fmt: skip

    def meets(self, following: "DrawnPass") -> bool:
        """Two entries are equal, and ``following`` is of the next epoch, or of the same epoch once
        more."""
        here, there = self.last, following.first
        along_epochs = (there.epoch, there.repeat) == (here.epoch + 1, 0) and not here.repeat
        along_repeats = there == (here.epoch, here.repeat + 1) and self.first.epoch == here.epoch
        is_alike = self.is_plain and following.is_plain and self._kind == following._kind
        return is_alike and (along_epochs or along_repeats)

    @property
    def _kind(self) -> tuple[str, int | None, int | None, bool, Intervals]:
        return self.data_set, self.length, self.size, self.is_dealt, self.taken

    def to_json(self) -> dict[str, Json]:
        return {
            "data_set": self.data_set, "pass": [*self.first, *self.last], "length": self.length,
            "size": self.size, "unproven": self.unproven, "taken": self.taken.to_json(),
            "twice": self.twice.to_json(), "is_dealt": self.is_dealt,
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Json) -> "DrawnPass":
        table = fields.mapped(value, "a pass")
        epoch, repeat, *last_one = fields.listed(table["pass"], "pass")
        first, last = number_of(epoch, repeat), number_of(*last_one)
        found = cls(
            data_set=fields.text(table["data_set"], "data_set"), first=first, last=last,
            length=maybe(table["length"], "length"), size=maybe(table["size"], "size"),
            unproven=fields.whole_number(table["unproven"], "unproven"),
            taken=Intervals.from_json(table["taken"], "taken"),
            twice=Intervals.from_json(table["twice"], "twice"), is_dealt=table["is_dealt"] is True,
        )  # fmt: skip
        if last < first or (last != first and not found.is_plain):
            raise ValueError(f"passes {first} to {last} stand as one and are not alike")
        return found


def split(
    data_set: str,
    start: int,
    stop: int,
    length: int | None,
    size: int | None = None,
    *,
    is_dealt: bool = False,
    blend: str = "",
) -> tuple[Draw, ...]:
    """Draws of a step from samples counted over all passes: ``start`` to ``stop`` over passes of
    ``length`` (None: a single one, without end); ``size`` as of ``Draw``, None: as long as a pass;
    the rest as of ``Draw``."""
    if length is None:
        return (Draw(data_set, Number(0), start, stop, is_dealt=is_dealt, blend=blend),)
    return tuple(
        Draw(
            data_set, Number(epoch), max(start - epoch * length, 0),
            min(stop - epoch * length, length), length, size or length, is_dealt, blend,
        )
        for epoch in range(start // length, -(-stop // length))
    )  # fmt: skip


def joined(passes: tuple[DrawnPass, ...], data_set: str) -> tuple[DrawnPass, ...]:
    """Join the two newest passes over a data set, if they are equal."""
    places = [place for place, each in enumerate(passes) if each.data_set == data_set][-2:]
    if len(places) < 2 or not passes[places[0]].meets(passes[places[1]]):
        return passes
    before, after = places
    both = replace(passes[before], last=passes[after].last)
    return (*passes[:before], both, *passes[before + 1 : after], *passes[after + 1 :])


def maybe(value: Json, name: str) -> int | None:
    """Read a number of places; None: not known."""
    return None if value is None else fields.whole_number(value, name)


def number_of(epoch: Json, repeat: Json) -> Number:
    return Number(fields.whole_number(epoch, "pass"), fields.whole_number(repeat, "pass"))
