"""Torch's data loaders under hooks: the order of the first layout, at any layout.

A loader with a ``DistributedSampler`` deals the samples of a pass to the ranks. Here the global
batch of each optimizer step is the same for every number of replicas, and passes can be taken up in
the middle. At the first number of replicas every rank draws torch's own samples, except at the end
of a pass: global batches are whole, and the last one is dropped or filled from the beginning of the
pass, by ``drop_last``.

Source: torch/utils/data/distributed.py, dataloader.py and sampler.py, 2.13.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import wrapt
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from scalai.core.dataset.drawn import Number
from scalai.core.degrees.batches import Batches, pass_length
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.patches.data.clock import REMEMBERED, Clock, Clocks
from scalai.patches.hooking import Call, given_to
from scalai.runtime.session import Session

LOOK_AHEAD = 8
"""Micro-batches a script may draw ahead of its steps, if two steps have no more."""
TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"


def is_placed(session: Session) -> bool:
    """True if the order of a job's samples is kept here, not by its script."""
    return session.settings.get("data_order") != "own"


@dataclass(frozen=True, slots=True)
class FirstBatches:
    """Batches of a job's first round. Scripts see them in later rounds too.

    ``micro_batch_size`` samples a forward pass and replica, ``dp`` replicas.
    """

    global_batch_size: int
    micro_batch_size: int
    dp: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each replica for one optimizer step."""
        return -(-self.global_batch_size // (self.micro_batch_size * self.dp))

    def is_layout_of(self, batches: Batches) -> bool:
        """True if a round deals micro-batches as the first one did."""
        return (self.micro_batch_size, self.dp) == (batches.micro_batch_size, batches.dp)


class PassObserver:
    """Hears of passes over data; by itself it does nothing but refuse."""

    def begins(self, clock: Clock) -> None:
        """A counted pass begins."""

    def evaluates(self) -> None:
        """A pass outside training begins."""

    def told(self, answer: str) -> None:
        """The script gets a number of the first round."""

    def differs(self, detail: str, way_out: str) -> None:
        """The script's place in its data differs from the state's."""
        raise RefusedError(f"{detail}. {way_out}.")

    def ends_otherwise(self, clock: Clock) -> None:
        """A pass has another end than those before, or follows a single early end."""

    def forgets(self, detail: str) -> None:
        """Passes are dropped from memory."""


class Feed:
    """The loaders of one process, and the position of each.

    Until ``start`` loaders are torch's own, but as long as in the first round.

    Attributes:
        is_counting: True if steps, and their draws, are counted here.
        is_evaluating: Returns True if draws are not trained on now.
        first_dp: Returns the number of replicas of the first round; None while it is this one.
        has_drawn: True once this round has drawn its first batch of the training.
        way_out: Advice for an order without a fixed place.
        on_pass: Called at the begin of a trained pass, with the data set's name and the facts
            behind its order.
        observer: Hears of passes.
    """

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.batches: Batches | None = None
        self.first: FirstBatches | None = None
        self._replica: int | None = None
        self._batch_sizes: frozenset[int] = frozenset()
        self.is_counting = True
        self.has_drawn = False
        self.is_evaluating: Callable[[], bool] = lambda: False
        self.first_dp: Callable[[], int | None] = lambda: None
        self.on_pass: Callable[[str, Mapping[str, Json]], None] = lambda name, facts: None
        self.observer = PassObserver()
        self.way_out = (
            "Use training_data= of deepspeed.initialize, or a DataLoader over a map-style data set "
            "with a DistributedSampler and the micro-batch of DeepSpeed's configuration"
        )
        self._latest: Clock | None = None
        """The clock of the newest draw."""
        self._uncounted: LoaderPass | None = None
        """The pass of the newest draw, while nothing of it is counted."""
        self._declined: dict[str, None] = {}

    def start(self, batches: Batches, first: FirstBatches, stated_micro_batch_size: int) -> None:
        """Begin to keep the order, in loaders with the engine's micro-batches: as in its
        configuration, in the first round, or in this one."""
        self.batches, self.first = batches, first
        self._batch_sizes = frozenset(
            (stated_micro_batch_size, first.micro_batch_size, batches.micro_batch_size)
        )

    def is_training(self, clock: Clock | None = None) -> bool:
        """True if a draw may be trained on now. A sampler of the training may feed steps in
        ``eval()`` too: a script may call ``train()`` behind the draw."""
        is_known = clock is not None and clock.is_known
        return torch.is_grad_enabled() and (is_known or not self.is_evaluating())

    def is_micro_batch(self, batch_size: int) -> bool:
        """True if batches of this size feed the engine."""
        if self._batch_sizes and batch_size not in self._batch_sizes:
            sizes = " or ".join(map(str, sorted(self._batch_sizes)))
            self._declined[f"a loader has batches of {batch_size}, the engine of {sizes}"] = None
        return batch_size in self._batch_sizes

    def install(self) -> None:
        wrapt.wrap_function_wrapper(DistributedSampler, "__init__", self._make_sampler)
        wrapt.wrap_function_wrapper(DataLoader, "__init__", self._make_loader)
        wrapt.register_post_import_hook(self.hook_torchdata, TORCHDATA)
        wrapt.wrap_function_wrapper(DataLoader, "__iter__", self._iterate)
        wrapt.wrap_function_wrapper(_BaseDataLoaderIter, "__next__", self._draw)

    def hook_torchdata(self, module: Any) -> None:
        def make(wrapped: Call, instance: Any, args: Any, kwargs: Any) -> None:
            wrapped(*args, **kwargs)
            self.decline(
                "torchdata's StatefulDataLoader keeps its place by rank and by worker, which does "
                "not fit another number of ranks"
            )

        wrapt.wrap_function_wrapper(module, "StatefulDataLoader.__init__", make)

    def deal_to(self, replica: int) -> None:
        """Note the replica of this process where shares are uneven, as a sampler or the engine
        counts it.

        Raises:
            RefusedError: They count differently: a filler's sample would be none.
        """
        if self._replica not in (None, replica):
            raise RefusedError(
                f"this process is replica {self._replica} and {replica}: a DistributedSampler and "
                "the engine count differently. Give it num_replicas and rank of the data-parallel "
                "group."
            )
        self._replica = replica

    @property
    def _passes(self) -> int:
        """Passes of this process in a step."""
        assert self.batches is not None
        return self.batches.shares.passes_of(self._replica or 0)

    def step(self) -> None:
        """Count an optimizer step.

        Raises:
            RefusedError: Its samples came from no loader with a fixed order.
        """
        assert self.batches is not None
        if self.clocks.step(self.batches, self._passes):
            return
        seen = "; ".join(self._declined) or "it has no torch DataLoader with a DistributedSampler"
        raise RefusedError(
            f"the order of samples could not be kept over a change: {seen}. {self.way_out}; or say "
            '"deepspeed": {"data_order": "own"} in the elastic configuration, and have the script '
            "place its data by scalai.elastic().consumed_samples."
        )

    def use(self, *, is_trained: bool) -> None:
        """Note the engine's use of the newest micro-batch: in a step, or in an evaluation, as by a
        script without ``eval()`` and with gradients off behind the draw. For training in ``eval()``
        only steps tell the passes of training."""
        uncounted = self._uncounted
        if is_trained and uncounted is not None and not self.clocks.have_drawn:
            self._uncounted = None
            if uncounted.count():
                self.has_drawn, self._latest = True, uncounted.sampler.clock
        if self._latest is not None:
            self._latest.use(is_trained=is_trained)

    def length(self, samples: int, *, drop_last: bool) -> int:
        """Return the micro-batches of a pass over so many samples. Before the round's first draw it
        is the first round's number, so schedules computed from it stay. After ``start``."""
        layout = self.batches if self.has_drawn else self.first
        assert layout is not None
        length = pass_length(samples, layout.global_batch_size, drop_last=drop_last)
        length = length // layout.global_batch_size * layout.num_micro_batches
        if not (self.has_drawn or self.is_evaluating()):
            self.observer.told(f"a loader of {length} micro-batches")
        return length

    def _make_sampler(self, wrapped: Call, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        instance.scalai_clock = self.clocks.add()

    def _make_loader(self, wrapped: Call, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        given = given_to(wrapped, args, kwargs)
        is_plain = isinstance(instance.batch_sampler, BatchSampler) and (
            given.get("batch_sampler") is None
        )
        if isinstance(instance.dataset, IterableDataset):
            self._declined["an iterable data set has no order that could be taken up"] = None
        elif not is_plain or type(instance.sampler) is not DistributedSampler:
            name = type(instance.batch_sampler if not is_plain else instance.sampler).__name__
            self._declined[f"{name} is not torch's DistributedSampler"] = None
        else:
            # The loader does not let an attribute be set again; nothing has used it yet.
            vars(instance)["batch_sampler"] = ElasticBatchSampler(instance.batch_sampler, self)

    def decline(self, why: str) -> None:
        """Remember why a loader stays unhooked, in case the training draws from it."""
        self._declined[why] = None

    def note_evaluation(self) -> None:
        if self.is_evaluating():
            self.decline("a pass over a loader began in eval(); call engine.train() before it")

    def refuse_skipping(self, clock: Clock) -> None:
        """Check, at the begin of a pass, the training on the one before.

        Raises:
            RefusedError: The script drew too far ahead.
        """
        assert self.batches is not None
        if clock.glanced.has_forgotten:
            self.observer.forgets(
                f"the script has only looked into passes over {clock.name} more than {REMEMBERED} "
                "times, at no equal distances: of the oldest ones a later round gets no batch"
            )
        if clock.jumped is not None:
            (epoch, repeat), consumed = clock.jumped
            again = f" (its pass {repeat + 1})" if repeat else ""
            self.observer.differs(
                f"the script begins a later pass over {clock.name}; the training is in epoch "
                f"{epoch}{again}, of which {consumed} of {clock.length} samples are consumed, and "
                "the others would be left out",
                "Have the loop begin with the epoch of the checkpoint that it loads, or with its "
                "first one: epochs that are over yield nothing",
            )
        if clock.has_ended_otherwise or clock.ends_as_one:
            self.observer.ends_otherwise(clock)
        if len(clock.drawn) > max(LOOK_AHEAD, 2 * self._passes):
            raise RefusedError(
                f"{len(clock.drawn)} micro-batches were drawn and not trained on: the script skips "
                "them, or evaluates by the loader that it trains by, and it is not known how far "
                'it is. Do not skip, evaluate within torch.no_grad(); or say "deepspeed": '
                '{"data_order": "own"} in the elastic configuration.'
            )

    def _iterate(self, wrapped: Call, instance: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        """Go over consumed passes without starting a loader's workers for them."""
        sampler = instance.batch_sampler
        if isinstance(sampler, ElasticBatchSampler) and sampler.skip_consumed_pass():
            return iter(())
        if not getattr(sampler, "is_elastic", False):
            self.observer.evaluates()
        batches: Iterator[Any] = wrapped(*args, **kwargs)
        return batches

    def _draw(self, wrapped: Call, instance: Any, args: Any, kwargs: Any) -> Any:
        """Count the script's draws, without the read-ahead of a loader's workers."""
        source = instance._sampler_iter
        if not isinstance(source, LoaderPass):
            return wrapped(*args, **kwargs)
        clock = source.sampler.clock
        try:
            drawn = wrapped(*args, **kwargs)
        except StopIteration:
            clock.over = source.number or clock.over
            if source is self._uncounted:
                self._uncounted = None
            raise
        if self.is_counting and source.number is None:
            self._uncounted, source.drawn = source, source.drawn + 1
        elif self.is_counting and source.number is not None and self.is_training(clock):
            self.has_drawn, self._latest, self._uncounted = True, clock, None
            clock.draw(source.number)
        return drawn


class Dealer(Protocol):
    """Deals a loader's batches, pass by pass."""

    plain: Any
    """Batches without counting."""
    feed: Feed

    @property
    def clock(self) -> Clock: ...

    @property
    def epoch(self) -> int: ...

    @property
    def is_elastic(self) -> bool: ...

    def skip(self) -> None:
        """Note an empty rest of a pass."""

    def micro_batches(self, consumed: int) -> Iterator[list[int]]:
        """Yield this rank's micro-batches of a pass behind its consumed samples."""
        ...


class ElasticBatchSampler(BatchSampler):
    """Torch's batches of a ``DistributedSampler``, dealt in the order of the first layout.

    Args:
        plain: Torch's batch sampler of the loader.
        feed: The process's loaders.
    """

    def __init__(self, plain: BatchSampler, feed: Feed) -> None:
        super().__init__(plain.sampler, plain.batch_size, plain.drop_last)
        self.plain, self.feed = plain, feed

    @property
    def distributed(self) -> "DistributedSampler[Any]":
        assert isinstance(self.sampler, DistributedSampler)
        return self.sampler

    @property
    def clock(self) -> Clock:
        clock = self.distributed.scalai_clock  # type: ignore[attr-defined]
        assert isinstance(clock, Clock)
        return clock

    @property
    def epoch(self) -> int:
        return self.distributed.epoch

    def skip(self) -> None:
        """Nothing is left of a pass: torch's samplers do not count passes."""

    @property
    def is_elastic(self) -> bool:
        """True if the engine trains on the samples, as far as known."""
        return self.feed.is_training(self.clock) and self.feed.is_micro_batch(self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return LoaderPass(self)

    def __len__(self) -> int:
        sampler = self.distributed
        if self.is_elastic:
            is_dropping = self.drop_last or sampler.drop_last
            return self.feed.length(samples_of(sampler), drop_last=is_dropping)
        if self.feed.first is None and (first_dp := self.feed.first_dp()) is not None:
            return self._plain_length(first_dp)
        return len(self.plain)

    def _plain_length(self, replicas: int) -> int:
        """Return how many batches torch gives each of so many replicas."""
        samples, sampler = samples_of(self.distributed), self.distributed
        each = samples // replicas if sampler.drop_last else -(-samples // replicas)
        return each // self.batch_size if self.drop_last else -(-each // self.batch_size)

    def skip_consumed_pass(self) -> bool:
        """Begin and end the next pass if it is consumed. Returns True if so."""
        sampler = self.distributed
        if not self.is_elastic or self.clock.next_pass(sampler.epoch)[1] is not None:
            return False
        self.clock.over, _ = self.clock.begin(sampler.epoch)
        self.feed.observer.begins(self.clock)
        return True

    def micro_batches(self, consumed: int) -> Iterator[list[int]]:
        """Yield this rank's micro-batches of a pass behind its consumed samples."""
        batches, sampler = self.feed.batches, self.distributed
        assert batches is not None
        if sampler.num_replicas != batches.dp:
            raise RefusedError(
                f"a DistributedSampler deals to {sampler.num_replicas} replicas, the job has "
                f"DP{batches.dp}. Give it num_replicas and rank of the data-parallel group."
            )
        if not batches.shares.is_even:
            self.feed.deal_to(sampler.rank)
        is_dropping = self.drop_last or sampler.drop_last
        order = pass_order(sampler, batches.global_batch_size, drop_last=is_dropping)
        self.clock.size, self.clock.length = samples_of(sampler), len(order)
        seed = sampler.seed if sampler.shuffle else None
        self.feed.on_pass(self.clock.name, {"size": self.clock.size, "seed": seed})
        end = self.clock.until or len(order)
        for begin in range(consumed, end, batches.global_batch_size):
            for places in batches.dealt_samples(begin, sampler.rank, self.feed.first):
                # Beyond the end only where a person has changed the global batch within a pass.
                yield order[places % len(order)].tolist()


class LoaderPass(Iterator[list[int]]):
    """One pass over a sampler. It begins with its first batch.

    ``number`` is its number; None while nothing is counted, because the engine does not train on
    it. Then ``drawn`` is the number of the script's batches.
    """

    def __init__(self, sampler: Dealer) -> None:
        self.sampler = sampler
        self._batches: Iterator[list[int]] | None = None
        self.number: Number | None = None
        self.drawn = self._given = 0
        self._may_count = False

    def __next__(self) -> list[int]:
        if self._batches is None:
            self._batches = self._begin()
        batch = next(self._batches)
        self._given += 1
        return batch

    def count(self) -> bool:
        """Count a pass from its beginning, because it is trained on in ``eval()``. Returns True if
        possible: so far torch has dealt it, in the order of the first layout."""
        sampler, clock, feed = self.sampler, self.sampler.clock, self.sampler.feed
        assert feed.first is not None and feed.batches is not None
        is_first = feed.first.is_layout_of(feed.batches)
        if clock.has_stepped and self._may_count and sampler.is_elastic:
            # Torch has dealt a restored place from the beginning of the pass.
            feed.decline(
                "a loader was begun before the engine; begin it behind deepspeed.initialize"
            )
            return False
        clock.is_trained_on = is_first and self._may_count and self._given < len(sampler.plain)
        if not clock.is_trained_on or not sampler.is_elastic:
            clock.is_trained_on = False
            return False
        given, self._batches = self._given, self._begin()
        for _ in range(given):
            next(self._batches, None)
        assert self.number is not None
        for _ in range(self.drawn):
            clock.draw(self.number)
        return True

    def _begin(self) -> Iterator[list[int]]:
        if not self.sampler.is_elastic:
            self._may_count = torch.is_grad_enabled()
            self.sampler.feed.note_evaluation()
            return iter(self.sampler.plain)
        self.number, consumed = self.sampler.clock.begin(self.sampler.epoch)
        self.sampler.feed.observer.begins(self.sampler.clock)
        self.sampler.feed.refuse_skipping(self.sampler.clock)
        if consumed is None:
            self.sampler.skip()
            return iter(())
        return self.sampler.micro_batches(consumed)


def samples_of(sampler: "DistributedSampler[Any]") -> int:
    """Return how many samples there are: torch types a ``Dataset`` without a length."""
    return len(sampler.dataset)  # type: ignore[arg-type]


def pass_order(
    sampler: "DistributedSampler[Any]", global_batch_size: int, *, drop_last: bool
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the samples of a pass in the order of training, [samples of whole global batches].

    Raises:
        RefusedError: The data set has no whole global batch, and the incomplete one is dropped.
    """
    samples = samples_of(sampler)
    length = pass_length(samples, global_batch_size, drop_last=drop_last)
    if length == 0:
        raise RefusedError(
            f"the data set has {samples} samples, fewer than a global batch of "
            f"{global_batch_size}, and drop_last drops them. Use a smaller batch or more data."
        )
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        order = torch.randperm(samples, generator=generator).numpy()
    else:
        order = np.arange(samples, dtype=np.int64)
    return np.resize(order, length)  # repeats it from its beginning where it is too short
