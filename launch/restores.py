"""The agent's part in a restore: what its workers want, and what they say they have restored."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from scalai.core import reports
from scalai.core.collection import concatenate
from scalai.core.commands import Start
from scalai.core.errors import ProofError
from scalai.core.reports import Report
from scalai.core.worker_messages import Publish, RankRestored, Source
from scalai.launch.background import Background
from scalai.launch.mover import Restore, prepare_restore
from scalai.launch.round import Published, Round, answers, keep_longest
from scalai.runtime.failpoints import reached
from scalai.store.host import HostStore
from scalai.store.manifest import manifest_bytes

TELL_EVERY_S = 10.0
"""How often the coordinator is told of bytes that arrive."""

log = logging.getLogger(__name__)


class _Moving:
    """Bytes that come from other hosts for one round. ``arrived`` is called by the threads that
    fetch them, the rest by the agent's own."""

    def __init__(self, current: Round) -> None:
        self.current = current
        self._mutex = threading.Lock()
        self._bytes = self._told = 0
        self._tell_at = 0.0

    def arrived(self, count: int) -> None:
        with self._mutex:
            self._bytes += count

    def news(self) -> int | None:
        """Return how many bytes have come, where that is to be told: now and then, and only where
        there are more than before."""
        now = time.monotonic()
        if self._bytes == self._told or now < self._tell_at:
            return None
        self._told, self._tell_at = self._bytes, now + TELL_EVERY_S
        return self._told


class Restores:
    """Restores of one host's workers, of any round. Only the agent's own thread calls it.

    Args:
        store: This host's.
        token: The job's secret, for the data planes of other hosts.
        tell: Reports to the coordinator.
        background: Runs what blocks.
    """

    def __init__(
        self,
        store: HostStore,
        token: bytes,
        tell: Callable[[Report], None],
        background: Background,
    ) -> None:
        self._store, self._token = store, token
        self._tell, self._background = tell, background
        self._moving: _Moving | None = None

    @staticmethod
    def publish(current: Round, answer: "Future[Source | None]", told: Publish) -> bool:
        """A worker has built its model and says what it holds and wants.

        Returns:
            True once all workers of the round have said so.
        """
        current.published[told.rank] = Published(told.held, told.wanted, told.is_restoring, answer)
        current.facts.update(told.facts.value())
        current.uses_devices |= told.uses_devices
        return current.is_complete(current.published)

    def begin(self, current: Round) -> bool:
        """Plan and fetch for a round whose workers have all published.

        Returns:
            False where none of them takes its state from a generation: they go on at once.
        """
        tables = [entry.held.tensors for entry in current.published.values()]
        names = sorted({tensor.name for table in tables for tensor in table})
        self._tell(reports.Published(current.number, tuple(names)))
        if current.is_restoring:
            reached("plan")
            self._prepare(current)
            return True
        for entry in current.published.values():
            entry.answer.set_result(None)
        return False

    def _prepare(self, current: Round) -> None:
        wants = {rank: entry.wanted for rank, entry in current.published.items()}
        start = current.command
        assert isinstance(start, Start), "a round that has begun"
        moving = self._moving = _Moving(current)

        def prepare() -> Restore | ProofError:
            try:
                return prepare_restore(self._store, start, wants, self._token, moving.arrived)
            except ProofError as error:
                return error  # not a failure of the workers: the coordinator decides

        self._background.run(
            prepare,
            lambda restore: self._prepared(current, restore),
            "planning and moving",
            self._tell_grown,
        )

    def watch(self, current: Round | None) -> None:
        """Tell of what has come from other hosts: while it does, the start makes progress."""
        moving = self._moving
        news = moving.news() if moving is not None and moving.current is current else None
        if moving is not None and news is not None:
            self._tell(reports.Moved(moving.current.number, news))

    def _tell_grown(self, restore: Restore | ProofError) -> None:
        if isinstance(restore, Restore) and restore.grown is not None:
            self._tell(reports.Grown(manifest_bytes(restore.grown)))

    def _prepared(self, current: Round, restore: Restore | ProofError) -> None:
        if self._moving is not None and self._moving.current is current:
            self._moving = None  # all has come, and what is told next says more
        if isinstance(restore, ProofError):
            self._tell(reports.Unproven(current.number, str(restore)))
            return
        current.seconds |= {"plan": restore.plan_s, "move": restore.move_s}
        current.bytes_local, current.bytes_remote = restore.bytes_local, restore.bytes_remote
        self._tell_grown(restore)
        for rank, entry in current.published.items():
            entry.answer.set_result(restore.sources[rank])

    def restored(self, current: Round, answer: "Future[None]", told: RankRestored) -> None:
        """A worker has filled its memory; it waits until the whole job's state is proven."""
        if told.rank == current.ranks.start:
            log.info("round=%d %s", current.number, told.note)
        current.restored[told.rank] = told, answer
        if not current.is_complete(current.restored):
            return
        ranks = sorted(current.restored)
        for each, _ in current.restored.values():
            keep_longest(current.seconds, each.seconds)
        rows = concatenate([current.published[rank].wanted for rank in ranks])
        found = [current.restored[rank][0].fingerprints for rank in ranks]
        self._tell(
            reports.Restored(
                round=current.number,
                rows=rows,
                fingerprints=np.concatenate(found),
                seconds=dict(current.seconds),
                bytes_local=current.bytes_local,
                bytes_remote=current.bytes_remote,
            )
        )

    def proceed(self, current: Round) -> None:
        """The whole job's state is proven: the workers may train, and what was fetched is as good
        as what was deposited."""
        generation = current.workers.generation
        assert generation is not None, "what was proven is of a generation"
        self._background.submit(lambda: self._store.prove(generation))
        for future in answers(future for _, future in current.restored.values()):
            future.set_result(None)
