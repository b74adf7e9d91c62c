"""Global batches: the samples of each replica, and hashes to prove them equal.

The number of consumed samples is a job's one clock, independent of the layout. Data offsets,
batch-size ramp and learning-rate schedule are functions of it.
"""

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache
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
        paces: As of ``Shares``.

    Raises:
        RefusedError: The global batch cannot be cut into equal micro-batches, or not into equal
            shares without fillers.
    """

    global_batch_size: int
    micro_batch_size: int
    dp: int
    has_fillers: bool = False
    paces: tuple[int, ...] = ()

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
        return Shares(self.global_batch_size // self.micro_batch_size, self.dp, self.paces)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each replica for one optimizer step, fillers included; with ``paces`` by
        which losses are divided on all replicas."""
        return self.shares.passes

    @property
    def passed_samples(self) -> int:
        """Samples of all passes of a step: those of the global batch, and of fillers."""
        return self.num_micro_batches * self.micro_batch_size * self.dp

    def samples(self, consumed_samples: int, dp_rank: int) -> npt.NDArray[np.int64]:
        """Return the samples of the next step, [passes of the replica, micro_batch_size], as global
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
        quotas = shares.quotas
        begin = sum(quotas[:dp_rank]) if quotas else dp_rank * each + min(dp_rank, rest)
        numbers = np.arange(begin, begin + shares.of_replica(dp_rank))
        return self._with_filler(block, numbers, dp_rank)

    def _in_turn(self, block: npt.NDArray[np.int64], dp_rank: int) -> npt.NDArray[np.int64]:
        return self._with_filler(block, np.array(self.shares.dealt_to(dp_rank)), dp_rank)

    def _with_filler(
        self, block: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64], dp_rank: int
    ) -> npt.NDArray[np.int64]:
        """Return these micro-batches of a block of samples, the first one again for a filler."""
        filled = np.append(numbers, numbers[: self.shares.passes_of(dp_rank) - numbers.size])
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

    Attributes:
        paces: Time of a pass on each replica, in any unit: replicas make as many passes as ends the
            step soonest (``quotas``), and no fillers. Empty: all are alike.

    Raises:
        RefusedError: A replica would have none; or ``paces`` are of other replicas.
    """

    micro_batches: int
    dp: int
    paces: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.dp <= self.micro_batches:
            raise RefusedError(
                f"{self.micro_batches} micro-batches are too few for dp={self.dp}. Use a smaller "
                "DP or micro-batch."
            )
        if self.paces and (len(self.paces) != self.dp or min(self.paces) < 1):
            raise RefusedError(
                f"paces {self.paces} of dp={self.dp} replicas; expected a whole number above 0 for "
                "each."
            )

    @property
    def quotas(self) -> tuple[int, ...]:
        """Micro-batches of each replica by ``paces``; empty: as even as can be, with fillers."""
        return _quotas(self.micro_batches, self.paces) if self.paces else ()

    @property
    def is_even(self) -> bool:
        return self.micro_batches % self.dp == 0 and not self.quotas

    @property
    def passes(self) -> int:
        """Passes of a replica, fillers included. With ``quotas`` losses are divided by it."""
        return -(-self.micro_batches // self.dp)

    def passes_of(self, dp_rank: int) -> int:
        """Return the passes of a replica, fillers included."""
        return self.of_replica(dp_rank) if self.quotas else self.passes

    @property
    def weight(self) -> float:
        """Factor of a sum over all passes, divided by ``passes`` and replicas, fillers with zero,
        so that it is a mean over micro-batches."""
        return self.passes * self.dp / self.micro_batches

    def of_replica(self, dp_rank: int) -> int:
        """Return the micro-batches of a replica."""
        if quotas := self.quotas:
            return quotas[dp_rank]
        return (self.micro_batches - dp_rank - 1) // self.dp + 1

    def dealt_to(self, dp_rank: int) -> list[int]:
        """Return the numbers of a replica's micro-batches: in each turn each replica with a
        micro-batch left takes one."""
        if not (quotas := self.quotas):
            return [*range(dp_rank, self.micro_batches, self.dp)]
        return [
            sum(min(quota, turn) for quota in quotas) + sum(q > turn for q in quotas[:dp_rank])
            for turn in range(quotas[dp_rank])
        ]

    def is_filler(self, number: int, dp_rank: int) -> bool:
        """Return whether a replica's pass of this number, from 0 on, is a filler."""
        return number >= self.of_replica(dp_rank)

    def has_filler(self, dp_rank: int) -> bool:
        """Return whether a replica's last pass is a filler."""
        return self.is_filler(self.passes_of(dp_rank) - 1, dp_rank)

    def weight_of(self, dp_rank: int) -> float:
        """Return the factor of a replica's mean over its micro-batches in a mean over replicas, so
        that each micro-batch counts alike."""
        return self.of_replica(dp_rank) * self.dp / self.micro_batches


LEAST = 2
"""Fewest micro-batches of a replica: of fewer passes its pace would not be known."""


@lru_cache(maxsize=64)
def _quotas(micro_batches: int, paces: tuple[int, ...]) -> tuple[int, ...]:
    """Return the micro-batches of each replica with the shortest time of the longest one; empty:
    even shares take no longer.

    The next micro-batch goes to the replica that ends it first, the slowest of equal ones.
    """
    dp = len(paces)
    if micro_batches < LEAST * dp:
        return ()
    found = [LEAST] * dp
    ends = [((LEAST + 1) * pace, -pace, replica) for replica, pace in enumerate(paces)]
    heapq.heapify(ends)
    for _ in range(micro_batches - LEAST * dp):
        end, _, replica = ends[0]
        found[replica] += 1
        heapq.heapreplace(ends, (end + paces[replica], -paces[replica], replica))
    longest = max(quota * pace for quota, pace in zip(found, paces, strict=True))
    even = -(-micro_batches // dp) * max(paces)
    return tuple(found) if longest < even else ()


LONGER = 9 / 8
"""Most samples of the longest replica, over the fewest, for larger micro-batches."""


def fit_batches(
    global_batch_size: int, dp: int, micro_batch_size: int, *, has_fillers: bool = False,
    paces: tuple[int, ...] = (),
) -> Batches:  # fmt: skip
    """Spread a global batch over ``dp`` replicas, in micro-batches of the given size or the largest
    divisor below it.

    Args:
        has_fillers: ``dp`` need not divide the batch. Then micro-batches are as large as leaves the
            longest replica at most ``LONGER`` times the fewest samples.
        paces: As of ``Shares``.

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
        return Batches(global_batch_size, micro, dp, paces=paces)
    spreads = (
        Batches(global_batch_size, m, dp, True, paces)
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
