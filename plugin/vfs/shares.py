"""Which places of the global order a replica reads: its share of every global batch, in order."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scalai.core.dataset.order import Places


class Order(Protocol):
    """The order in which all replicas together draw the samples of a data set, pass after pass."""

    @property
    def length(self) -> int:
        """Places of a pass."""

    def samples_at(self, places: Places) -> Places:
        """Return the samples at these places, which count over all passes, [places]."""


@dataclass(frozen=True, slots=True)
class Sequential:
    """The order in which the samples lie."""

    length: int

    def samples_at(self, places: Places) -> Places:
        return np.asarray(places % self.length, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Share:
    """What replica ``dp_rank`` of ``dp`` draws: of each global batch a contiguous part, one sample
    more or less than the others where ``dp`` does not divide the batch.

    Its samples are numbered from the job's first one on. So a replica that has another degree from
    some step on goes on at the number of samples of its share that lie before that step.
    """

    dp_rank: int
    dp: int
    global_batch_size: int

    @property
    def begin(self) -> int:
        """Where its part of a batch begins."""
        return self.global_batch_size * self.dp_rank // self.dp

    @property
    def size(self) -> int:
        """How many samples of a batch it draws."""
        return self.global_batch_size * (self.dp_rank + 1) // self.dp - self.begin

    def before(self, place: int) -> int:
        """Return how many of its samples lie before a place of the global order."""
        batches, rest = divmod(place, self.global_batch_size)
        return batches * self.size + min(max(rest - self.begin, 0), self.size)

    def places(self, low: int, high: int) -> Places:
        """Return the places of its samples ``[low, high)``, [high - low]."""
        batch, within = np.divmod(np.arange(low, high, dtype=np.int64), max(self.size, 1))
        return np.asarray(batch * self.global_batch_size + self.begin + within, dtype=np.int64)
