"""The agent's part in a restore: what its workers want, and what they say they have restored."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from scalai.core.collection import Collection, concatenate
from scalai.core.errors import ProofError
from scalai.launch.background import Background
from scalai.launch.mover import Restore, prepare_restore
from scalai.launch.round import Published, Round, answers, keep_longest
from scalai.runtime.failpoints import reached
from scalai.store.host import HostStore
from scalai.store.manifest import manifest_message

Json = Any

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
        tell: Tells the coordinator of an event.
        background: Runs what blocks.
    """

    def __init__(
        self,
        store: HostStore,
        token: bytes,
        tell: Callable[..., None],
        background: Background,
    ) -> None:
        self._store, self._token = store, token
        self._tell, self._background = tell, background
        self._moving: _Moving | None = None

    @staticmethod
    def publish(
        current: Round, answer: "Future[Json]", rank: int, is_restoring: bool, held: Json,
        wanted: Json, facts: Mapping[str, Json], uses_devices: bool,
    ) -> bool:  # fmt: skip
        """A worker has built its model and says what it holds and wants.

        Returns:
            True once all workers of the round have said so.
        """
        current.published[rank] = Published(
            Collection.from_json(held), Collection.from_json(wanted), is_restoring, answer
        )
        current.facts.update(facts)
        current.uses_devices |= uses_devices
        return current.is_complete(current.published)

    def begin(self, current: Round) -> bool:
        """Plan and fetch for a round whose workers have all published.

        Returns:
            False where none of them takes its state from a generation: they go on at once.
        """
        tables = [entry.held.tensors for entry in current.published.values()]
        names = sorted({(tensor.name,) for table in tables for tensor in table})
        self._tell("published", round=current.number, tensors=names)
        if current.is_restoring:
            reached("plan")
            self._prepare(current)
            return True
        for entry in current.published.values():
            entry.answer.set_result(None)
        return False

    def _prepare(self, current: Round) -> None:
        wants = {rank: entry.wanted for rank, entry in current.published.items()}
        moving = self._moving = _Moving(current)

        def prepare() -> Restore | ProofError:
            try:
                return prepare_restore(
                    self._store, current.command, wants, self._token, moving.arrived
                )
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
            self._tell("moved", round=moving.current.number, bytes=news)

    def _tell_grown(self, restore: Restore | ProofError) -> None:
        if isinstance(restore, Restore) and restore.grown is not None:
            self._tell("grown", part=manifest_message(restore.grown))

    def _prepared(self, current: Round, restore: Restore | ProofError) -> None:
        if self._moving is not None and self._moving.current is current:
            self._moving = None  # all has come, and what is told next says more
        if isinstance(restore, ProofError):
            self._tell("unproven", round=current.number, reason=str(restore))
            return
        current.seconds |= {"plan": restore.plan_s, "move": restore.move_s}
        current.bytes_local, current.bytes_remote = restore.bytes_local, restore.bytes_remote
        self._tell_grown(restore)
        for rank, entry in current.published.items():
            entry.answer.set_result({**restore.common, "order": restore.orders[rank].to_json()})

    def restored(
        self,
        current: Round,
        answer: "Future[Json]",
        rank: int,
        fingerprints: list[str],
        seconds: Mapping[str, float],
        note: str,
    ) -> None:
        """A worker has filled its memory; it waits until the whole job's state is proven."""
        if rank == current.command["first_rank"]:
            log.info("round=%d %s", current.number, note)
        current.restored[rank] = ({"fingerprints": fingerprints, "seconds": seconds}, answer)
        if not current.is_complete(current.restored):
            return
        ranks = sorted(current.restored)
        for told, _ in current.restored.values():
            keep_longest(current.seconds, told["seconds"])
        rows = concatenate([current.published[rank].wanted for rank in ranks])
        self._tell(
            "restored",
            round=current.number,
            rows=rows.to_json(),
            fingerprints=[v for rank in ranks for v in current.restored[rank][0]["fingerprints"]],
            seconds=current.seconds,
            bytes_local=current.bytes_local,
            bytes_remote=current.bytes_remote,
        )

    def proceed(self, current: Round) -> None:
        """The whole job's state is proven: the workers may train, and what was fetched is as good
        as what was deposited."""
        generation = current.command["generation"]
        self._background.submit(lambda: self._store.prove(generation))
        for future in answers(future for _, future in current.restored.values()):
            future.set_result(None)
