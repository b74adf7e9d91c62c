"""Global batches: the samples of each replica, and hashes to prove them equal.

The number of consumed samples is a job's one clock, independent of the layout. Data offsets,
batch-size ramp and learning-rate schedule are functions of it.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scalai.core.errors import RefusedError
from scalai.core.tensors.universal_hash import mix


class SampleCut(Protocol):
    """A layout's cut of samples: micro-batch size and number of replicas."""

    @property
    def micro_batch_size(self) -> int: ...

    @property
    def dp(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Batches:
    """Spread of a global batch over ``dp`` replicas.

    Attributes:
        has_fillers: DP need not divide the micro-batches (``Shares``). Of a replica with one
            micro-batch less, the last one in all that follows is a filler: its first one again.

    Raises:
        RefusedError: The global batch cannot be cut into equal micro-batches, or not into equal
            shares without fillers.
    """

    global_batch_size: int
    micro_batch_size: int
    dp: int
    has_fillers: bool = False

    def __post_init__(self) -> None:
        if min(self.global_batch_size, self.micro_batch_size, self.dp) < 1:
            raise RefusedError(f"{self}: every size must be 1 or more.")
        block, name = self.micro_batch_size, f"micro_batch_size={self.micro_batch_size}"
        if not self.has_fillers:
            block, name = block * self.dp, f"micro_batch_size*dp={self.micro_batch_size}*{self.dp}"
        if self.global_batch_size % block:
            raise RefusedError(
                f"global_batch_size={self.global_batch_size} is not a multiple of {name}. "
                "Choose another micro-batch size or DP degree."
            )
        _ = self.shares  # refuses a replica without a micro-batch

    @property
    def shares(self) -> "Shares":
        """Micro-batches of each replica."""
        return Shares(self.global_batch_size // self.micro_batch_size, self.dp)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each replica for one optimizer step, fillers included."""
        return self.shares.passes

    @property
    def passed_samples(self) -> int:
        """Samples of all passes of a step: those of the global batch, and of fillers."""
        return self.num_micro_batches * self.micro_batch_size * self.dp

    def samples(self, consumed_samples: int, dp_rank: int) -> npt.NDArray[np.int64]:
        """Return the samples of the next step, [num_micro_batches, micro_batch_size], as global
        indices.

        Blocks of ``micro_batch_size * dp`` samples are dealt out in order, a micro-batch a replica:
        the global batch is the same set for every layout.

        Source: MegatronPretrainingSampler, megatron/training/datasets/data_samplers.py (0.16).
        """
        return self._in_turn(self._block(consumed_samples, dp_rank), dp_rank)

    def dealt_samples(
        self, consumed_samples: int, dp_rank: int, first: "SampleCut | None" = None
    ) -> npt.NDArray[np.int64]:
        """Return ``samples`` for a first layout that dealt blocks out sample by sample.

        Its micro-batches are dealt whole, one a replica: equal sizes give equal micro-batches in a
        step.

        Args:
            first: The first layout; None, or one whose micro-batch does not divide the global
                batch: this one.

        Source: DistributedSampler, torch/utils/data/distributed.py (2.13): rank r takes every
        ``dp``-th sample from the r-th on; differs in the last block of uneven shares, dealt to
        the replicas that are left alone.
        """
        if first is None or self.global_batch_size % first.micro_batch_size:
            first = self
        block = self._block(consumed_samples, dp_rank)
        rest = block.size // first.micro_batch_size % first.dp
        whole, last = np.split(block, [block.size - rest * first.micro_batch_size])
        dealt = whole.reshape(-1, first.micro_batch_size, first.dp).transpose(0, 2, 1).ravel()
        left = last.reshape(first.micro_batch_size, rest).T.ravel()
        return self._in_turn(np.concatenate([dealt, left]), dp_rank)

    def contiguous_samples(self, consumed_samples: int, dp_rank: int) -> npt.NDArray[np.int64]:
        """Return ``samples`` with one contiguous share of the global batch a replica, independent
        of the micro-batch if shares are even."""
        block, shares = self._block(consumed_samples, dp_rank), self.shares
        each, rest = divmod(shares.micro_batches, shares.dp)
        begin = dp_rank * each + min(dp_rank, rest)
        return self._with_filler(block, np.arange(begin, begin + shares.of_replica(dp_rank)))

    def _in_turn(self, block: npt.NDArray[np.int64], dp_rank: int) -> npt.NDArray[np.int64]:
        numbers = np.arange(dp_rank, self.shares.micro_batches, self.dp)
        return self._with_filler(block, numbers)

    def _with_filler(
        self, block: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return these micro-batches of a block of samples, the first one again for a filler."""
        filled = np.append(numbers, numbers[: self.num_micro_batches - numbers.size])
        return block.reshape(-1, self.micro_batch_size)[filled]

    def _block(self, consumed_samples: int, dp_rank: int) -> npt.NDArray[np.int64]:
        if not 0 <= dp_rank < self.dp:
            raise RefusedError(f"dp_rank={dp_rank} is not in 0 to {self.dp - 1}.")
        if consumed_samples < 0:
            raise RefusedError(f"consumed_samples={consumed_samples} is negative.")
        return np.arange(self.global_batch_size, dtype=np.int64) + consumed_samples


@dataclass(frozen=True, slots=True)
class Shares:
    """Micro-batches of one step over ``dp`` replicas, dealt in turn. All replicas make equally many
    passes; the last one is a filler on replicas with one micro-batch less.

    Raises:
        RefusedError: A replica would have none.
    """

    micro_batches: int
    dp: int

    def __post_init__(self) -> None:
        if not 1 <= self.dp <= self.micro_batches:
            raise RefusedError(
                f"{self.micro_batches} micro-batches are too few for dp={self.dp}. Use a smaller "
                "DP or micro-batch."
            )

    @property
    def is_even(self) -> bool:
        return self.micro_batches % self.dp == 0

    @property
    def passes(self) -> int:
        """Passes of a replica, fillers included."""
        return -(-self.micro_batches // self.dp)

    @property
    def weight(self) -> float:
        """Factor of a mean over all passes, fillers with zero, so that it is one over
        micro-batches."""
        return self.passes * self.dp / self.micro_batches

    def of_replica(self, dp_rank: int) -> int:
        """Return the micro-batches of a replica."""
        return (self.micro_batches - dp_rank - 1) // self.dp + 1

    def is_filler(self, number: int, dp_rank: int) -> bool:
        """Return whether a replica's pass of this number, from 0 on, is a filler."""
        return number >= self.of_replica(dp_rank)

    def weight_of(self, dp_rank: int) -> float:
        """Return the factor of a replica's mean over its micro-batches in a mean over replicas, so
        that each micro-batch counts alike."""
        return self.of_replica(dp_rank) * self.dp / self.micro_batches


LONGER = 9 / 8
"""Most samples of the longest replica, over the fewest, for larger micro-batches."""


def fit_batches(
    global_batch_size: int, dp: int, micro_batch_size: int, *, has_fillers: bool = False
) -> Batches:
    """Spread a global batch over ``dp`` replicas, in micro-batches of the given size or the largest
    divisor below it.

    Args:
        has_fillers: ``dp`` need not divide the batch. Then micro-batches are as large as leaves the
            longest replica at most ``LONGER`` times the fewest samples.

    Raises:
        RefusedError: ``dp`` does not divide the global batch, or is larger.
    """
    is_even = global_batch_size % dp == 0 if dp > 0 else False
    if min(global_batch_size, dp, micro_batch_size) < 1 or not (is_even or has_fillers):
        raise RefusedError(
            f"dp={dp} does not divide global_batch_size={global_batch_size} into micro-batches of "
            f"{micro_batch_size} or fewer. Use a DP that divides it."
        )
    most = min(micro_batch_size, global_batch_size // dp)
    if is_even:
        share = global_batch_size // dp
        micro = next(m for m in range(most, 0, -1) if share % m == 0)
        return Batches(global_batch_size, micro, dp)
    spreads = (
        Batches(global_batch_size, m, dp, True)
        for m in range(most, 0, -1)
        if global_batch_size % m == 0
    )
    fewest = -(-global_batch_size // dp)
    for spread in spreads:
        if spread.num_micro_batches * spread.micro_batch_size <= LONGER * fewest:
            return spread
    raise RefusedError(f"dp={dp} is larger than global_batch_size={global_batch_size}.")


def pass_length(samples: int, global_batch_size: int, *, drop_last: bool) -> int:
    """Return the samples of one pass over a data set, in whole global batches.

    Args:
        samples: Size of the data set.
        drop_last: Omit the incomplete batch at the end; else fill it from the beginning of the
            pass.
    """
    batches = samples // global_batch_size if drop_last else -(-samples // global_batch_size)
    return batches * global_batch_size


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """A global batch size from ``start`` up by ``increment`` over ``ramp_samples`` samples,
    independent of the layout.

    Source: RampupBatchsizeNumMicroBatchesCalculator, megatron/core/num_microbatches_calculator.py
    (0.16).
    """

    start: int
    increment: int
    ramp_samples: int
    global_batch_size: int

    def __post_init__(self) -> None:
        growth = self.global_batch_size - self.start
        if self.start < 1 or self.increment < 1 or growth < 0 or growth % self.increment:
            raise RefusedError(
                f"a batch size cannot grow from {self.start} to {self.global_batch_size} by "
                f"{self.increment}; the growth must be a multiple of the increment."
            )

    def size_at(self, consumed_samples: int) -> int:
        """Return the global batch size of the step behind so many consumed samples."""
        growth = self.global_batch_size - self.start
        if not growth or consumed_samples > self.ramp_samples:
            return self.global_batch_size
        each = self.ramp_samples / (growth // self.increment)
        return min(
            self.global_batch_size, self.start + int(consumed_samples / each) * self.increment
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every global batch size of the ramp, ascending."""
        return tuple(range(self.start, self.global_batch_size + 1, self.increment))

    @property
    def passed(self) -> tuple[int, ...]:
        """The ``sizes`` of actual steps from the first sample on: a step larger than a size's range
        skips the next sizes."""
        return tuple(size for _, size in self.stages)

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """The global batch sizes of actual steps, each with the consumed samples at its begin."""
        growth = self.global_batch_size - self.start
        if not growth or self.ramp_samples < 1:
            return ((0, self.global_batch_size),)
        each = self.ramp_samples / (growth // self.increment)
        consumed, found = 0, dict[int, int]()
        while consumed <= self.ramp_samples:
            size = self.start + int(consumed / each) * self.increment
            found.setdefault(size, consumed)
            # As many steps as are left of this size, at once.
            end = min((int(consumed / each) + 1) * each, self.ramp_samples + 1)
            consumed += max(1, math.ceil((end - consumed) / size)) * size
        found.setdefault(self.global_batch_size, consumed)
        return tuple((begin, size) for size, begin in found.items())


def sample_hashes(tokens: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """Return one hash a sample, [samples], from its tokens, [samples, sequence] integers.

    The order of the tokens counts; the hash of a token depends on its position by an odd key.
    """
    table = np.atleast_2d(np.asarray(tokens))
    if table.dtype.kind not in "iub" or table.ndim != 2:
        raise RefusedError(
            f"tokens are {table.dtype}{list(table.shape)}; expected integers [samples, sequence]."
        )
    keys = mix(np.arange(1, table.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    words = table.astype(np.int64, copy=False).view(np.uint64) + np.uint64(1)
    # Mixed again, so that a sum over samples notices tokens that changed places between them.
    return mix((words * keys).sum(axis=1, dtype=np.uint64) + np.uint64(table.shape[1]))


def combine_hashes(*hashes: npt.ArrayLike) -> int:
    """Add hashes of samples, micro-batches or replicas, mod 2^64: the order does not count."""
    total = np.uint64(0)
    for part in hashes:
        total = np.add(total, np.asarray(part, dtype=np.uint64).sum(dtype=np.uint64))
    return int(total)
