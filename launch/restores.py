"""The agent's part in a restore: what its workers want, and what they say they have restored."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from scalai.core.collection import Collection, concatenate
from scalai.launch.background import Background
from scalai.launch.mover import Restore, prepare_restore
from scalai.launch.round import Published, Round, answers, keep_longest
from scalai.runtime.failpoints import reached
from scalai.store.host import HostStore
from scalai.store.manifest import manifest_message

Json = Any

log = logging.getLogger(__name__)


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
        self._background.run(
            lambda: prepare_restore(self._store, current.command, wants, self._token),
            lambda restore: self._prepared(current, restore),
            "planning and moving",
            self._tell_grown,
        )

    def _tell_grown(self, restore: Restore) -> None:
        if restore.grown is not None:
            self._tell("grown", part=manifest_message(restore.grown))

    def _prepared(self, current: Round, restore: Restore) -> None:
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

    @staticmethod
    def proceed(current: Round) -> None:
        """The whole job's state is proven: the workers may train."""
        for future in answers(future for _, future in current.restored.values()):
            future.set_result(None)
