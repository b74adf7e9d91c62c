"""The samples of a loop of one's own, for torch's ``DataLoader``: one global order at any degrees.

::

    order = scalai.Shuffled(len(dataset), seed=1)
    batches = scalai.OrderedBatches(job, order, 32, micro_batch_size=4, is_weighted=True)
    job.attach(scalai.ReplicatedState(model, optimizer))
    drawn = iter(DataLoader(dataset, batch_sampler=batches, num_workers=2))
    while job.step < steps:
        for _ in job.passes:
            (loss(model, next(drawn)) * job.weight / job.passes).backward()
        ...
        if job.boundary(samples=batches.now.global_batch_size):
            break

Its whole state is the number of samples consumed by the job. The next round draws again the samples
read ahead by a loader's workers.
"""

from collections.abc import Iterator

from torch.utils.data import Sampler

from scalai.core.dataset.order import GlobalBatches, GlobalOrder
from scalai.core.degrees.batches import Batches, BatchRamp, fit_batches
from scalai.core.errors import RefusedError, UsageError
from scalai.runtime.session import Session
from scalai.runtime.step_passes import StepPasses


class OrderedBatches(Sampler[list[int]]):
    """This replica's micro-batches, from the job's next step on: its consecutive share of each
    global batch, and a filler (``StepPasses``) where it has one micro-batch less than others.

    Make it on every rank alike, also on ranks without a loader, after ``attach`` or before: it
    gives the job's ledger the order of draws. For an evaluation, not counted by the ledger, pass
    ``is_training=False``: each iteration then begins at the first sample.

    Args:
        job: Session of this worker.
        order: ``Shuffled`` or ``Blend``.
        batch: Samples of a global batch, or their growth.
        micro_batch_size: Largest number of samples of a micro-batch; the job's decision wins, and
            holds where ``is_weighted``. None: a replica's whole share.
        dp_rank: Index of the replica. None: the rank, if DP is the only axis.
        samples: Samples of the whole training: a global batch beyond is not begun. None: no end.
        is_training: Steps draw in this order, as in one of each round.
        is_weighted: The loop goes over ``job.passes`` and multiplies each loss by ``job.weight``,
            so that DP need not divide the batch. Make it before ``attach`` then.
        may_differ: No collective of the replicas lies within a pass but the last one, such as DDP's
            without ``no_sync()``: slower replicas may make fewer passes (``[planner] shares``).

    Raises:
        UsageError: ``is_weighted`` behind ``attach``; or ``may_differ`` without it.
        RefusedError: The replica is unknown; a data set is another one than in earlier rounds; or
            steps draw in another order already.
    """

    def __init__(
        self, job: Session, order: GlobalOrder, batch: int | BatchRamp, *,
        micro_batch_size: int | None = None, dp_rank: int | None = None, samples: int | None = None,
        is_training: bool = True, is_weighted: bool = False, may_differ: bool = False,
    ) -> None:  # fmt: skip
        if may_differ and not is_weighted:
            raise UsageError(
                "OrderedBatches with may_differ=True need is_weighted=True: the loop multiplies "
                "each loss by job.weight."
            )
        if dp_rank is None and job.dp != job.world_size:
            raise RefusedError(
                f"the replica of this rank does not follow from its number: DP is {job.dp} of "
                f"{job.world_size} ranks. Say dp_rank=, the rank in its data-parallel group."
            )
        self._job, self._order, self._samples = job, order, samples
        self._batches = GlobalBatches.of(batch)
        self._most = job.micro_batch_size or micro_batch_size
        self._dp_rank = job.rank if dp_rank is None else dp_rank
        self._is_training, self._is_weighted = is_training, is_weighted
        self._given = -1
        """End of the samples given in this process; -1: none, others draw."""
        why_as_many = "" if may_differ else "the loop does not say may_differ=True"
        if may_differ and job.dp != job.world_size:
            why_as_many = "DP is not the loop's only axis"
        if is_training:
            job.draw_from(order, self._contradiction)
            job.deal_passes(
                lambda: self.passes, [size for _, size in self._batches.stages],
                is_weighted=is_weighted, is_drawing=lambda: self._given > -1,
                why_as_many=why_as_many,
            )  # fmt: skip

    @property
    def now(self) -> Batches:
        """Division of the global batch of the step under way.

        Raises:
            RefusedError: DP does not divide it, and the loop does not weigh its losses.
        """
        return self._spread(self._batches.size_at(self._consumed))

    @property
    def passes(self) -> StepPasses:
        """Passes of each replica in a step, fillers included: ``job.passes``, or those of an
        evaluation's step."""
        return self._job.passes_of(self.now, self._dp_rank, is_trained=self._is_training)

    def __iter__(self) -> Iterator[list[int]]:
        for begin, size in self._batches.after(self._consumed):
            if self._samples is not None and begin + size > self._samples:
                return
            micro_batches = list(self._spread(size).contiguous_samples(begin, self._dp_rank))
            for number, places in enumerate(micro_batches, 1):
                if number == len(micro_batches):
                    self._given = max(self._given, begin + size)
                yield self._order.samples_at(places).tolist()

    def _contradiction(self, before: int, after: int) -> str | None:
        """Return the reason why a step cannot have consumed the samples between two numbers, or
        None.
        """
        size = self._batches.size_at(before)
        if after - before != size:
            return f"the global batch from sample {before} on has {size}"
        if -1 < self._given < after:
            return f"samples were given up to {self._given} alone"
        return None

    @property
    def _consumed(self) -> int:
        return int(self._job.consumed_samples) if self._is_training else 0

    def _spread(self, size: int) -> Batches:
        dp, decided, why = self._job.dp, self._job.micro_batch_size, self._job.why_even
        has_fillers = self._is_weighted and not why
        if size % dp and not has_fillers:
            raise RefusedError(
                f"dp={dp} does not divide global_batch_size={size}, and shares are even: "
                f"{why or 'the loop does not say is_weighted=True of its OrderedBatches'}. Use a "
                "DP that divides it: [model] global_batch_size tells the job."
            )
        paces = self._job.paces if self._is_training else None
        if has_fillers and decided and size % decided == 0 and size >= decided * dp:
            return Batches(size, decided, dp, True, paces or ())
        return fit_batches(size, dp, self._most or size, has_fillers=has_fillers, paces=paces or ())
