"""The order of a job that draws its samples by Scalai's own rule: of one data set, or of a blend.

Any place is evaluated by itself, so that every rank draws its share of every global batch from the
number of samples that were consumed, and from nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from scalai.core.dataset.blending import Weights
from scalai.core.dataset.drawn import COUNTED, Draw, split
from scalai.core.dataset.order import Places
from scalai.core.dataset.permutation import Permutation
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json


class Order(Protocol):
    """A global order of samples."""

    def samples_at(self, places: Places) -> Places:
        """Return the samples at places over all passes, [places], each 0 or more."""
        ...

    def draws(self, start: int, stop: int) -> tuple[Draw, ...]:
        """Return what a step draws whose places are ``start`` to ``stop``."""
        ...

    def facts(self) -> Mapping[str, Mapping[str, Json]]:
        """Return by data set what must stay over the rounds of a job: else the order is another."""
        ...


@dataclass(frozen=True, slots=True)
class Shuffled:
    """One data set, pass by pass; each pass has an order of its own.

    A pass that begins within a global batch fills it up, so that each sample comes once a pass.

    Attributes:
        samples: How many there are.
        seed: Which orders.
        name: Of the data set, in the ledger.
        whole: A pass has whole blocks of so many samples, as of the global batch; the rest is
            dropped, which is another one each pass. 1: none is.
        is_shuffled: False: each pass is in the order of the data set.
        content: What a changed content of the data set would change, as its time or a hash of it.

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
        """As of ``Order``: each from 0 to ``samples``."""
        passes, within = np.divmod(np.asarray(places, dtype=np.int64), self.length)
        if not self.is_shuffled:
            return within
        found = np.empty_like(within)
        for number in np.unique(passes).tolist():
            chosen = passes == number
            found[chosen] = Permutation(self.samples, self.seed, number)(within[chosen])
        return found

    def draws(self, start: int, stop: int, blend: str = "") -> tuple[Draw, ...]:
        """As of ``Order``; ``blend`` as of ``Draw``."""
        return split(self.name, start, stop, self.length, self.samples, blend=blend)

    def facts(self) -> Mapping[str, Mapping[str, Json]]:
        """As of ``Order``."""
        seed = int(self.seed) if self.is_shuffled else None
        whole = {"size": int(self.samples), "whole": int(self.whole)}
        return {self.name: {**whole, "seed": seed, "content": self.content}}


@dataclass(frozen=True, slots=True)
class Blend:
    """Several data sets, of which each gives its share of the samples by weight.

    After any number of samples each data set has given its share of them but for less than one
    sample (``Weights``). A sample is its index in the concatenation of the data sets.

    Attributes:
        parts: The data sets, with names of their own.
        weights: Of each; they need not add up to 1.
        name: Of the blend, in the ledger.

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
        """Where each data set begins in their concatenation."""
        return tuple(np.cumsum([0, *(part.samples for part in self.parts[:-1])]).tolist())

    def samples_at(self, places: Places) -> Places:
        """As of ``Order``."""
        which, of_part = self._shares.at(np.asarray(places, dtype=np.int64))
        found = np.empty_like(of_part)
        for number, (part, offset) in enumerate(zip(self.parts, self.offsets, strict=True)):
            chosen = which == number
            found[chosen] = offset + part.samples_at(of_part[chosen])
        return found

    def draws(self, start: int, stop: int) -> tuple[Draw, ...]:
        """As of ``Order``: of each data set the places of its own that it gives."""
        ends = zip(self._shares.before(start), self._shares.before(stop), strict=True)
        return tuple(
            draw
            for part, (begin, end) in zip(self.parts, ends, strict=True)
            for draw in part.draws(begin, end, self.name)
        )

    def facts(self) -> Mapping[str, Mapping[str, Json]]:
        """As of ``Order``."""
        weights = self._shares.numbers
        return {
            part.name: {**part.facts()[part.name], "weight": [number, *weights]}
            for number, part in enumerate(self.parts)
        }
