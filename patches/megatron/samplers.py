"""Megatron-LM's samplers under hooks: one order and the same rows at any layout, and the places
drawn by each step.

* Places are read from the sampler: blocks of ``micro_batch_size * dp`` samples in the order of its
  data set, with a share for each rank. Loaders with several workers ask ahead of the steps, so
  samples wait for their step.
* The random sampler follows replicas and micro-batch: with data sharding each replica has its own
  part of the data, and the end of an epoch follows from both. Here each replica draws its share of
  the order at the first degrees; at those, it is the sampler's own.
* ``--full-validation``: a rank's share of a validation set, and the number of times it has each
  row, follow from micro-batch and DP. Here every evaluation begins with the first row and takes all
  rows.
* ``--fim-data``: one stream of random numbers permutes a process's samples in the order of reads.
  Here each sample has its own, as in Megatron-LM's masked data sets (``MaskedWordPieceDataset``):
  ``seed + place``.

Source: megatron/training, 0.16 to 0.20: datasets/data_samplers.py, ``evaluate`` of training.py,
``GPTFIMDataset`` of datasets/fim_dataset.py.
"""

import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from math import gcd
from typing import Any

import numpy as np
import torch
import wrapt
from torch.utils.data import DataLoader

from scalai.core.dataset.drawn import Draw, Number, split
from scalai.core.dataset.order import Places, ShuffledBlocks, share_of
from scalai.core.degrees.batches import Shares
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.hooking import Args, Call, Kwargs
from scalai.patches.megatron import shares
from scalai.patches.megatron.data_facts import facts_of

KEPT_PASSES = 2
"""Kept permutations: a micro-batch may lie in two passes."""


def micro_batches(sampler: Any, first: ShuffledBlocks) -> Iterator[list[int]]:
    """Yield a replica's micro-batches of the current pass, and count consumed samples as the
    sampler does: the loader asks it again at the end of each pass.

    Args:
        sampler: A ``MegatronPretrainingRandomSampler``.
        first: The order of the first degrees.

    Raises:
        RefusedError: By ``refuse_two_seeds``.
    """
    size, dp = sampler.micro_batch_size, sampler.data_parallel_size
    begins, epoch = sampler.consumed_samples, sampler.consumed_samples // first.length
    sampler.epoch = epoch
    if _has_seeds(sampler):
        refuse_two_seeds(sampler, first)
        sampler.dataset.set_epoch(epoch)
    for number in count():
        at = begins + number * size * dp
        if at // first.length != epoch:
            return
        places = share_of(begins, number, size, dp, sampler.data_parallel_rank)
        sampler.consumed_samples += size * dp
        yield _samples_at(places, first)


def refuse_two_seeds(sampler: Any, first: ShuffledBlocks) -> None:
    """Check for micro-batches of two passes, if each pass makes its samples with other seeds.

    Raises:
        RefusedError: There would be one, at the end of this pass or of a later one.
    """
    block = sampler.micro_batch_size * sampler.data_parallel_size
    left = first.length - sampler.consumed_samples % first.length
    if _has_seeds(sampler) and (left % block or first.length % block):
        raise RefusedError(
            f"--dataloader-type cyclic: an epoch has {first.length} samples, of which {left} are "
            f"left, and {sampler.data_parallel_size} replicas draw {block} at once, which does not "
            "divide both; the data set makes each epoch's samples with other seeds. Use a DP and a "
            "micro-batch that do, or --dataloader-type single."
        )


def refuse_seeds(sampler: Any) -> None:
    """Check the data set for seeds by pass, where steps do not end with a pass.

    Raises:
        RefusedError: It has them.
    """
    if _has_seeds(sampler):
        raise RefusedError(
            "--dataloader-type cyclic: the data set makes each epoch's samples with other seeds, "
            f"and {sampler.data_parallel_size} replicas do not divide the batch. Use a DP that "
            "does, or --dataloader-type single."
        )


def refuse_too_few(sampler: Any) -> None:
    """Check the data set for one micro-batch of every replica: else a pass is empty, and the
    sampler divides by its length.

    Raises:
        RefusedError: It is too small.
    """
    each, replicas = sampler.micro_batch_size, sampler.data_parallel_size
    if sampler.total_samples < each * replicas:
        raise RefusedError(
            f"--dataloader-type cyclic: a data set has {sampler.total_samples} samples, and "
            f"{replicas} replicas with micro-batches of {each} draw {each * replicas} at once. Use "
            "a smaller DP or micro-batch, or more data."
        )


def _has_seeds(sampler: Any) -> bool:
    return type(sampler.dataset).__name__ == "RandomSeedDataset"


def _own_order(sampler: Any) -> ShuffledBlocks:
    return ShuffledBlocks(
        sampler.total_samples, sampler.micro_batch_size, sampler.data_parallel_size,
        sampler.data_sharding,
    )  # fmt: skip


def _shuffled(batches: Iterator[Sequence[int]], order: ShuffledBlocks) -> Iterator[Sequence[int]]:
    for places in batches:
        yield type(places)(_samples_at(np.asarray(places), order))  # type: ignore[call-arg]


def _samples_at(places: Places, first: ShuffledBlocks) -> list[int]:
    epochs, within = np.divmod(places, first.length)
    found = np.empty_like(within)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        found[chosen] = first.samples_at(within[chosen], _permutation(first.shuffled, epoch))
    samples: list[int] = found.tolist()
    return samples


@lru_cache(maxsize=KEPT_PASSES)
def _permutation(samples: int, epoch: int) -> Places:
    generator = torch.Generator()
    generator.manual_seed(epoch)
    permutation: Places = torch.randperm(samples, generator=generator).numpy()
    return permutation


TRAIN = "train"
"""Name of the training data in the ledger; a blend is one. A later phase
(``--phase-transition-iterations``) has its first sample's number behind it."""

ENERGON = "megatron.energon"


class SamplerWatch:
    """One sampler of training data.

    Args:
        data_set: Name of its data set.
        begins: Its first place, over all passes.
        size, length: Samples of its data set, and places of a pass over it.
        micro_batch_size, dp, dp_rank: Its share of a block.
        is_random: True for a shuffled order: then places are counted, in the order of the first
            degrees.
    """

    def __init__(
        self, data_set: str, begins: int, size: int, length: int, micro_batch_size: int, dp: int,
        dp_rank: int, *, is_random: bool, steps: shares.UnevenSteps | None = None,
    ) -> None:  # fmt: skip
        self.data_set = data_set
        self._place, self.size, self._length, self._is_random = begins, size, length, is_random
        self._micro_batch_size, self._block = micro_batch_size, micro_batch_size * dp
        self._first = dp_rank * micro_batch_size
        self._steps = steps
        self.is_filler = False
        """Whether the newest draw is of a filler."""
        self._given: deque[Sequence[int]] = deque()
        self._drawn: list[tuple[int, int]] = []

    def gives(self, batches: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Pass the sampler's batches on, and keep them until they are drawn."""
        for batch in batches:
            self._given.append(batch)
            yield batch

    def draws(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass the training loop's draws on."""
        for batch in batches:
            self._draw()
            yield batch

    def _draw(self) -> None:
        given = self._given.popleft()
        self.is_filler = isinstance(given, shares.Filler)
        if self.is_filler:
            return
        if not self._is_random:
            self._place = given[0] - self._first
            if [*given] != [*range(given[0], given[0] + self._micro_batch_size)]:
                raise RefusedError(
                    f"the sampler of the training data gave samples {given[:8]}, where a "
                    f"micro-batch has {self._micro_batch_size} consecutive ones: something else "
                    "has changed Megatron-LM's samplers, and the order could not be kept over a "
                    "change. Run without --elastic."
                )
        if self._drawn and self._drawn[-1][1] == self._place:
            self._drawn[-1] = self._drawn[-1][0], self._place + self._block
        else:
            self._drawn.append((self._place, self._place + self._block))
        self._place += self._block

    def step(self) -> Sequence[Draw]:
        """Return the step's draws, and begin the next one."""
        drawn, self._drawn = self._drawn, []
        if drawn and self._steps is not None:
            # The last block of a step has no micro-batch for some replicas.
            begin = drawn[0][0]
            self._place = begin + self._steps.size_at(begin)
            drawn = [(begin, self._place)]
        name, kind = self.data_set, (self._length, self.size)
        if self._is_random:
            return [draw for pair in drawn for draw in split(name, *pair, *kind, is_dealt=True)]
        return [Draw(name, Number(0), *pair, *kind, is_dealt=True) for pair in drawn]


class TrainingDraws:
    """The watch on the sampler of this rank's training data. Chunks of virtual stages have one
    each; the first with draws counts.

    Attributes:
        first: Micro-batch size and number of replicas at the job's begin, for the order of random
            samplers; None: unknown, and they keep their own.
    """

    def __init__(self) -> None:
        self.first: tuple[int, int] | None = None
        self._consumed: int | None = None
        """Consumed samples, while iterators are being built."""
        self._built: SamplerWatch | None = None
        self._dataset: Any = None
        self._watches: list[SamplerWatch] = []
        self._has_own_loader = False

    def hook(self, samplers: Any) -> None:
        """Watch the samplers of a module of Megatron-LM's."""
        for cls, is_random in (
            (samplers.MegatronPretrainingSampler, False),
            (samplers.MegatronPretrainingRandomSampler, True),
        ):
            self._hook(samplers, cls, is_random=is_random)

    def _hook(self, samplers: Any, cls: Any, *, is_random: bool) -> None:
        if vars(cls).get("scalai_is_hooked"):
            return  # two modules name it
        cls.scalai_is_hooked = True
        make, give = cls.__init__, cls.__iter__
        signature, watches = inspect.signature(make), self

        def init(sampler: Any, *args: Any, **kwargs: Any) -> None:
            make(sampler, *args, **kwargs)
            if type(sampler) is cls:
                sampler.scalai_steps = steps = watches.steps_of(samplers.get_args(), sampler)
                if is_random and steps is not None:
                    refuse_seeds(sampler)
                if is_random and (order := watches.order_of(sampler)) is not None:
                    refuse_two_seeds(sampler, order)
                given = signature.bind(sampler, *args, **kwargs).arguments
                sampler.scalai_watch = watches.made(given, is_random=is_random, steps=steps)

        def iterate(sampler: Any) -> Iterator[Sequence[int]]:
            watch: SamplerWatch | None = getattr(sampler, "scalai_watch", None)
            if is_random and type(sampler) is cls:
                refuse_too_few(sampler)
            order = watches.order_of(sampler) if is_random and type(sampler) is cls else None
            steps: shares.UnevenSteps | None = getattr(sampler, "scalai_steps", None)
            batches: Iterator[Sequence[int]]
            if steps is not None:
                batches = shares.micro_batches(sampler, steps, is_endless=is_random)
                if is_random:
                    batches = _shuffled(batches, order or _own_order(sampler))
            else:
                batches = give(sampler) if order is None else micro_batches(sampler, order)
            return batches if watch is None else watch.gives(batches)

        cls.__init__, cls.__iter__ = init, iterate

    def order_of(self, sampler: Any) -> ShuffledBlocks | None:
        """Return the order of a random sampler at the first degrees; None: they are not known."""
        if self.first is None:
            return None
        return ShuffledBlocks(sampler.total_samples, *self.first, sampler.data_sharding)

    def steps_of(self, job: Any, sampler: Any) -> shares.UnevenSteps | None:
        """Return the steps of a new sampler with uneven shares; None: all are even. The first of a
        set of iterators belongs to the training data."""
        if self._consumed is None or self._built is not None:
            return shares.steps_of(job, is_training=False)
        before = self._consumed - sampler.consumed_samples
        return shares.steps_of(job, is_training=True, before=before)

    @property
    def newest(self) -> SamplerWatch | None:
        """The watch on the newest training data; None: this rank's has none."""
        return self._built

    def made(
        self, given: Any, *, is_random: bool, steps: shares.UnevenSteps | None = None
    ) -> SamplerWatch | None:
        """Note a new sampler of the training data."""
        if self._consumed is None or self._built is not None:
            return None
        self._dataset = given.get("dataset")
        phase, size = self._consumed - given["consumed_samples"], given["total_samples"]
        dealt = given["micro_batch_size"], given["data_parallel_size"]
        each, replicas = self.first or dealt
        blocks = ShuffledBlocks(size, each, replicas, given.get("data_sharding", False))
        self._built = SamplerWatch(
            f"{TRAIN}-{phase}" if phase > 0 else TRAIN, given["consumed_samples"],
            size, blocks.length if is_random else size, *dealt, given["data_parallel_rank"],
            is_random=is_random, steps=steps,
        )  # fmt: skip
        return self._built

    def build(self, consumed: int, wrapped: Call, args: Args, kwargs: Kwargs) -> Any:
        """Build the iterators of a training behind ``consumed`` samples, and watch the draws of its
        training data.

        Raises:
            RefusedError: It is a loader without a fixed place.
        """
        self._consumed, self._built, self._dataset = consumed, None, None
        try:
            iterators = wrapped(*args, **kwargs)
        finally:
            self._consumed = None
        train, watch = iterators[0], self._built
        if watch is not None and hasattr(train, "iterable"):
            if self._dataset is None:
                self._dataset = getattr(train.iterable, "_dataset", None)  # of a DataLoader
            # Inside RerunDataIterator, which may replay a step: replayed samples count once.
            train.iterable = watch.draws(train.iterable)
            self._watches.append(watch)
        elif train is not None:
            self._has_own_loader = True
        if self._has_own_loader and watch is None and ENERGON in sys.modules:
            raise RefusedError(
                "--dataloader-type external with Megatron-Energon: its loaders keep their place by "
                "rank and by worker, for one number of both, so what is consumed could not be told "
                "from the rest after a change of DP. Use --dataloader-type single or "
                "cyclic, or run without --elastic."
            )
        return iterators

    def sources(self, flags: Mapping[str, Any]) -> Mapping[str, Mapping[str, Json]]:
        """Return the facts behind the order of the new training data; nothing on a rank without
        draws.

        Args:
            flags: Megatron-LM's parsed arguments.
        """
        if self._built is None:
            return {}
        return {self._built.data_set: facts_of(flags, self._dataset, self._built.size)}

    def step(self, stage: int = 0) -> Sequence[Draw] | None:
        """Return the step's draws, from the first chunk with draws: nothing on a rank without any;
        None for the script's own loader, with unknown draws.

        Args:
            stage: Stage of the pipeline. The first one speaks for all: others draw in an iteration
                left out by ``--iterations-to-skip``, and may not in a real one.
        """
        drawn = [watch.step() for watch in self._watches if stage == 0]
        return None if self._has_own_loader else next((each for each in drawn if each), ())


SEEDS = 2**32
"""Seeds of numpy's ``RandomState``."""
MANY_STEPS = 64
"""Most steps of an evaluation with equally many passes over each row."""


class WholePasses:
    """Micro-batches of one replica, without end, with the steps of one evaluation as length: the
    fewest with each row equally often; if these are many, those of fewer passes over the rows, and
    the last step is filled with the first rows.

    Args:
        rows: Rows of the validation set.
        batch: Samples of a step of the evaluation, over all replicas.
        size: Samples of a micro-batch.
    """

    def __init__(self, rows: int, batch: int, size: int, dp: int, dp_rank: int) -> None:
        self._rows, self._batch, self._size = rows, batch, size
        self._shares, self._dp_rank = Shares(batch // size, dp), dp_rank

    def __len__(self) -> int:
        passes = min(
            self._batch // gcd(self._rows, self._batch),
            max(1, MANY_STEPS * self._batch // self._rows),
        )
        return -(-passes * self._rows // self._batch)

    def __iter__(self) -> Iterator[list[int]]:
        samples = len(self) * self._batch
        for begin in count(0, self._batch):
            for places in shares.dealt(self._shares, self._dp_rank, begin, self._size):
                yield type(places)(place % samples % self._rows for place in places)


def hook_samplers(samplers: Any) -> None:

    def build(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        loader, job = wrapped(*args, **kwargs), samplers.get_args()
        if not isinstance(loader, DataLoader) or not _is_whole(loader.dataset, job):
            return loader
        passes = WholePasses(
            len(loader.dataset),  # type: ignore[arg-type]  # Megatron-LM's have a length
            getattr(job, "eval_global_batch_size", None) or job.global_batch_size,
            getattr(job, "eval_micro_batch_size", None) or job.micro_batch_size,
            samplers.mpu.get_data_parallel_world_size(),
            samplers.mpu.get_data_parallel_rank(),
        )
        return DataLoader(
            loader.dataset, batch_sampler=passes, num_workers=loader.num_workers,
            pin_memory=loader.pin_memory, persistent_workers=loader.persistent_workers,
            worker_init_fn=loader.worker_init_fn, collate_fn=loader.collate_fn,
        )  # fmt: skip

    if hasattr(samplers, "build_pretraining_data_loader"):
        wrapt.wrap_function_wrapper(samplers, "build_pretraining_data_loader", build)


def hook_fim(module: Any) -> None:
    """Hook the module of ``--fim-data``."""

    def read(wrapped: Call, dataset: Any, args: Args, kwargs: Kwargs) -> Any:
        place = kwargs["idx"] if "idx" in kwargs else args[0]
        seed = (dataset.config.random_seed + int(place)) % SEEDS
        dataset.np_rng = np.random.RandomState(seed)
        return wrapped(*args, **kwargs)

    name = "GPTFIMDataset._query_document_sample_shuffle_indices"
    wrapt.wrap_function_wrapper(module, name, read)


def _is_whole(dataset: Any, job: Any) -> bool:
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    return bool(getattr(job, "full_validation", False)) and getattr(split, "name", "") == "valid"
