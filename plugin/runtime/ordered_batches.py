"""The samples of a loop of one's own, for torch's ``DataLoader``: one global order at any degrees.

::

    order = scalai.Shuffled(len(dataset), seed=1)
    batches = scalai.OrderedBatches(job, order, 32, micro_batch_size=4)
    drawn = iter(DataLoader(dataset, batch_sampler=batches, num_workers=2))
    while job.step < steps:
        for _ in range(batches.now.num_micro_batches):
            loss(model, next(drawn)).backward()
        ...
        if job.boundary(samples=batches.now.global_batch_size):
            break

Its whole state is the number of samples that the job has consumed. What workers of a loader have
read ahead is drawn again by the next round.
"""

from collections.abc import Iterator

from torch.utils.data import Sampler

from scalai.core.dataset.order import GlobalBatches, GlobalOrder
from scalai.core.degrees.batches import Batches, BatchRamp, fit_batches
from scalai.core.errors import RefusedError
from scalai.runtime.session import Session


class OrderedBatches(Sampler[list[int]]):
    """This replica's micro-batches, from the job's next step on: of each global batch its share of
    consecutive places.

    Make it on every rank alike, also where no loader is, after ``attach`` or before: it tells the
    job's ledger in which order steps draw. For an evaluation, which the ledger does not count, say
    ``is_training=False``: it draws from its first sample whenever it is iterated.

    Args:
        job: This worker's session.
        order: ``Shuffled`` or ``Blend``.
        batch: Samples of a global batch, or how they grow.
        micro_batch_size: Samples of a micro-batch, at most; what the job has decided on wins.
            None: a replica's whole share.
        dp_rank: The replica. None: the rank, where DP is all that there is.
        samples: Of the whole training: a global batch that would have more is not begun. None:
            without end.
        is_training: Whether steps draw in this order, as in one of each round.

    Raises:
        RefusedError: The replica is not known; a data set is another one than in earlier rounds; or
            steps draw in another order already.
    """

    def __init__(
        self, job: Session, order: GlobalOrder, batch: int | BatchRamp, *,
        micro_batch_size: int | None = None, dp_rank: int | None = None, samples: int | None = None,
        is_training: bool = True,
    ) -> None:  # fmt: skip
        if dp_rank is None and job.dp != job.world_size:
            raise RefusedError(
                f"the replica of this rank does not follow from its number: DP is {job.dp} of "
                f"{job.world_size} ranks. Say dp_rank=, the rank in its data-parallel group."
            )
        self._job, self._order, self._samples = job, order, samples
        self._batches = GlobalBatches.of(batch)
        self._most = job.micro_batch_size or micro_batch_size
        self._dp_rank = job.rank if dp_rank is None else dp_rank
        self._is_training = is_training
        self._given = -1
        """Where the samples end that were given in this process; -1: none were, others draw."""
        if is_training:
            job.draw_from(order, self._contradiction)

    @property
    def now(self) -> Batches:
        """How the global batch of the step under way is spread.

        Raises:
            RefusedError: DP does not divide it.
        """
        return self._spread(self._batches.size_at(self._consumed))

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
        """Return why a step that begins at one sample cannot have consumed those up to another."""
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
        return fit_batches(size, self._job.dp, self._most or size)
