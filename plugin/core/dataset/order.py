"""The order of samples that a framework draws at its first degrees, as one that any degrees draw.

Places count over all passes; what a place is in a pass follows from the first degrees, and who
draws it from the present ones.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShuffledBlocks:
    """The order of Megatron-LM's random sampler, as ``dp`` replicas draw it in micro-batches of
    ``micro_batch_size`` samples: block by block, each replica's micro-batch behind the one before.

    Attributes:
        samples: Of the data set.
        is_sharded: Whether each replica shuffles its own part of the data set, else all deal out
            one shuffled data set.

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
        """Samples that all replicas draw at once."""
        return self.micro_batch_size * self.dp

    @property
    def length(self) -> int:
        """Places of a pass: whole blocks."""
        return self.samples // self.block * self.block

    @property
    def shuffled(self) -> int:
        """How many samples are shuffled together: a pass needs a permutation of so many."""
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
    """Return the places, over all passes, of a replica's micro-batch of this number behind the
    consumed samples, [micro_batch_size]."""
    begin = consumed + (number * dp + dp_rank) * micro_batch_size
    return np.arange(begin, begin + micro_batch_size, dtype=np.int64)
