"""Which places of the global order a replica reads: its share of every global batch, in order."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from scalai.core.dataset.global_batches import GlobalBatches
from scalai.core.dataset.order import Places
from scalai.core.degrees.batches import fit_batches

MAX_PLACE = 1 << 62
"""Behind it no place of the global order is evaluated."""


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
    """What replica ``dp_rank`` of ``dp`` draws: of each global batch a contiguous part, all of one
    size, as ``scalai.OrderedBatches`` draws it.

    Its samples are numbered from the job's first one on, so that ``1 / dp`` of the places before a
    global batch are its own. A replica that has another degree from some step on goes on there.

    Raises:
        RefusedError: ``dp`` does not divide every global batch.
    """

    dp_rank: int
    dp: int
    batches: GlobalBatches
    _begin: Places = field(init=False, repr=False, compare=False)
    _size: Places = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for _, size in self.batches.stages:
            fit_batches(size, self.dp, size)
        begin, size = np.array(self.batches.stages, dtype=np.int64).T
        object.__setattr__(self, "_begin", begin)
        object.__setattr__(self, "_size", size)

    def before(self, place: int) -> int:
        """Return how many of its samples lie before a place of the global order."""
        stage = np.searchsorted(self._begin, place, side="right") - 1
        begin, share = int(self._begin[stage]), int(self._size[stage]) // self.dp
        batches, rest = divmod(place - begin, share * self.dp)
        of_batch = min(max(rest - share * self.dp_rank, 0), share)
        return begin // self.dp + batches * share + of_batch

    def places(self, low: int, high: int) -> Places:
        """Return the places of its samples ``[low, high)``, [high - low]."""
        samples = np.arange(low, high, dtype=np.int64)
        stage = np.searchsorted(self._begin // self.dp, samples, side="right") - 1
        begin, size = self._begin[stage], self._size[stage]
        batch, within = np.divmod(samples - begin // self.dp, size // self.dp)
        return np.asarray(
            begin + batch * size + size // self.dp * self.dp_rank + within, dtype=np.int64
        )
