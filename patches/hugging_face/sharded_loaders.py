"""The loaders of Hugging Face's trainers, in one order on any number of ranks.

Hugging Face's loaders deal alike (``DataLoaderShard`` and ``BatchSamplerShard`` of
accelerate/data_loader.py, 1.15): consecutive samples to a replica, one micro-batch after the other.
Differs in: global batches are whole, the last one filled from the beginning of the epoch or
dropped, so each step has the same samples on any number of replicas.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.distributed
from torch.utils.data import BatchSampler

from scalai.core.degrees.batches import Batches, fit_batches, pass_length
from scalai.core.errors import RefusedError
from scalai.patches.data.clock import Clock
from scalai.patches.data.loaders import Feed, LoaderPass, is_placed
from scalai.runtime.session import Session

SEEDED = ("SeedableRandomSampler", "SequentialSampler")
"""Samplers with an order from seed and epoch alone: Accelerate's, and torch's."""


class EpochBatches(BatchSampler):
    """One replica's micro-batches of an epoch.

    Args:
        sampler: Gives the samples of the epoch, all of them to every replica.
        batches: How a global batch is spread.
        dp_rank: The replica.
        drop_last: Whether the incomplete global batch at the end is dropped.

    Attributes:
        size: Samples of the data set.
        samples: Of an epoch: whole global batches.

    Raises:
        RefusedError: The order is not one of ``SEEDED``, or there is no whole global batch.
    """

    def __init__(self, sampler: Any, batches: Batches, dp_rank: int, *, drop_last: bool) -> None:
        name = type(sampler).__name__
        if name not in SEEDED:
            raise RefusedError(
                f"the order of samples is that of {name}, which does not follow from seed and "
                f"epoch alone. Use one of {', '.join(SEEDED)} (use_seedable_sampler of "
                "Accelerate's DataLoaderConfiguration), or run without --elastic."
            )
        super().__init__(sampler, batches.micro_batch_size, drop_last)
        self._batches, self._dp_rank, self.size = batches, dp_rank, len(sampler)
        self.samples = pass_length(len(sampler), batches.global_batch_size, drop_last=drop_last)
        if not self.samples:
            raise RefusedError(
                f"the data set has {len(sampler)} samples, fewer than a global batch of "
                f"{batches.global_batch_size}, and drop_last drops them. Use a smaller batch."
            )

    def __iter__(self) -> Iterator[list[int]]:
        return self.after(0)

    def __len__(self) -> int:
        steps = self.samples // self._batches.global_batch_size
        return steps * self._batches.num_micro_batches

    def after(self, consumed: int, until: int | None = None) -> Iterator[list[int]]:
        """Yield the micro-batches of an epoch behind its consumed samples, up to an end."""
        order = np.resize(np.fromiter(self.sampler, dtype=np.int64), self.samples)
        for begin in range(consumed, until or len(order), self._batches.global_batch_size):
            for places in self._batches.samples(begin, self._dp_rank):
                yield order[places % len(order)].tolist()


def check_ranks(session: Session, counted: int, who: str) -> None:
    """Check a trainer's number of data-parallel ranks.

    Args:
        counted: Processes counted by the trainer.
        who: Name of the trainer, for the message.

    Raises:
        RefusedError: Every rank would train on the same samples.
    """
    if counted != session.dp:
        raise RefusedError(
            f"{who} counts {counted} process(es), the round has DP{session.dp}. Without GPUs begin "
            "with accelerate.PartialState(cpu=True), or give Trainer --use_cpu."
        )


def round_batches(session: Session, micro_batch_size: int, accumulation: int, who: str) -> Batches:
    """Return this round's micro-batches.

    Args:
        micro_batch_size, accumulation: The script's, of the first round.
        who: Name of the trainer, for the message.

    Raises:
        RefusedError: The round has other degrees than data parallelism, or does not divide the
            global batch.
    """
    if session.tp * session.pp != 1:
        raise RefusedError(
            f"TP{session.tp} PP{session.pp}: of a job of {who} the number of data-parallel ranks "
            "changes alone. Leave tp and pp out of [degrees]."
        )
    usual = session.facts.get("first_micro_batch_size", micro_batch_size)
    stated = micro_batch_size * accumulation * session.dp
    total = session.facts.get("global_batch_size", stated)
    has_fillers = is_placed(session)
    if session.micro_batch_size is not None:
        return Batches(total, session.micro_batch_size, session.dp, has_fillers)
    return fit_batches(total, session.dp, usual, has_fillers=has_fillers)


class ShardedBatches(BatchSampler):
    """The batches of a prepared loader: an epoch's own for the engine's training, else
    Accelerate's.

    Args:
        loader: The prepared loader.
        plain: Accelerate's batches.
        batch_sampler: Torch's, of all ranks.
        feed: The process's loaders.
        rank: The data-parallel rank.
    """

    def __init__(
        self, loader: Any, plain: Any, batch_sampler: BatchSampler, feed: Feed, rank: int
    ) -> None:
        self.plain: Any = plain
        self.batch_sampler = batch_sampler
        self._clock = feed.clocks.add()
        self._loader, self.feed, self._rank = loader, feed, rank
        self._is_seed_shared = False
        super().__init__(batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last)

    # Accelerate asks how many samples all ranks draw, and cuts metrics by it at an epoch's end.

    @property
    def num_processes(self) -> int:
        """Ranks dealt to by Accelerate."""
        return getattr(self.plain, "num_processes", 1)

    @property
    def split_batches(self) -> bool:
        """True if ``batch_size`` is the size over all ranks."""
        return getattr(self.plain, "split_batches", False) and not self.is_elastic

    @property
    def batch_size(self) -> int:
        """Samples of a batch: this round's micro-batch for the engine's training."""
        if self.is_elastic and self.feed.batches is not None:
            return self.feed.batches.micro_batch_size
        return self._stated

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self._stated = size

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def is_elastic(self) -> bool:
        """True if the engine trains on the samples, as far as known."""
        feed = self.feed
        return (
            feed.batches is not None
            and feed.is_training(self._clock)
            and feed.is_micro_batch(getattr(self.plain, "batch_size", self._stated))
        )

    @property
    def epoch(self) -> int:
        """The epoch, as the script set it or Accelerate counts it."""
        return int(self._loader.iteration)

    def count_on(self) -> None:
        """Make Accelerate count epochs behind the last finished one, for a script at a checkpoint
        of an earlier round."""
        if self._clock.over is not None:
            self._loader.iteration = self._clock.over.epoch + 1

    def skip(self) -> None:
        """Count a consumed epoch: Accelerate counts only epochs with a batch."""
        self._loader.iteration += 1

    def micro_batches(self, consumed: int) -> Iterator[list[int]]:
        """Yield this rank's micro-batches of an epoch behind its consumed samples.

        The first call waits for the other ranks.

        Raises:
            RefusedError: Ranks have different seeds.
        """
        assert self.feed.batches is not None
        epoch = EpochBatches(self.sampler, self.feed.batches, self._rank, drop_last=self.drop_last)
        self._clock.size, self._clock.length = epoch.size, epoch.samples
        seed = getattr(self.sampler, "initial_seed", None)
        if seed is not None and not self._is_seed_shared:
            _check_shared(self._clock.name, seed)
            self._is_seed_shared = True
        self.feed.on_pass(self._clock.name, {"size": epoch.size, "seed": seed})
        return epoch.after(consumed, self._clock.until)

    def __iter__(self) -> Iterator[list[int]]:
        return LoaderPass(self)

    def __len__(self) -> int:
        if self.is_elastic and type(self.sampler).__name__ in SEEDED:
            return self.feed.length(len(self.sampler), drop_last=self.drop_last)  # type: ignore[arg-type]
        return len(self.plain)


def _check_shared(name: str, seed: int) -> None:
    """Refuse different seeds: each rank would draw from an order of its own.

    Accelerate sets the seed behind its synchronization (``SeedableRandomSampler.__iter__``), so
    nothing makes the seeds equal.
    """
    if not torch.distributed.is_initialized():
        return
    seeds: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seeds, seed)
    if len({*seeds}) > 1:
        raise RefusedError(
            f"the sampler of {name} has seed {seeds[0]} on rank 0, and others elsewhere: "
            f"{sorted({*seeds} - {seeds[0]})}. Each rank would draw from an order of its own, some "
            "samples twice and some never. Seed alike before Accelerator.prepare (set_seed without "
            "device_specific), or say data_seed of DataLoaderConfiguration."
        )


def put_in_order(loader: Any, feed: Feed, rank: int) -> None:
    """Make a prepared loader draw ``ShardedBatches``; one without an order stays as it is."""
    base = getattr(loader, "base_dataloader", None)
    plain = getattr(base, "batch_sampler", None)
    batch_sampler = getattr(plain, "batch_sampler", plain)  # of Accelerate's shard, or torch's own
    if type(loader).__name__ != "DataLoaderShard" or not isinstance(batch_sampler, BatchSampler):
        feed.decline(f"a {type(loader).__name__} has no order that could be taken up")
        return
    # The loader does not let an attribute be set again; nothing has used it yet.
    vars(base)["batch_sampler"] = ShardedBatches(loader, plain, batch_sampler, feed, rank)
