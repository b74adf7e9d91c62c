"""A host's copies of generations to the durable directory during training, in their own lane: a
slow or hung disk delays nothing else."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from scalai.core.errors import DamageError, ScalaiError, StoreError
from scalai.core.messages import commands, reports
from scalai.core.messages.reports import Archived
from scalai.launch.agent.loop import ARCHIVE
from scalai.runtime.lanes import Lanes
from scalai.store.archive import retire, show
from scalai.store.host import HostStore
from scalai.store.parts import snapshot_name

CLOSE_S = 2.0
"""Seconds for a copy to remove its files when the agent ends; a later agent of this host removes
the rest."""

Command = commands.Archive | commands.FinishArchive | commands.Retire

log = logging.getLogger(__name__)


class Archiver:
    """Obeys one command after the other. Only the agent's own thread calls it.

    Args:
        store: This host's store.
        directory: ``<durable_dir>/<job>``; None: this host has none.
        tell: Sends a report to the coordinator, in the agent's loop.
        put: Hands the agent's loop something to do.
        examine: Examines a generation for damage, in the agent's loop.
        lanes: Run blocking work beside the loop.
    """

    def __init__(
        self,
        store: HostStore,
        directory: Path | None,
        tell: Callable[[reports.Report], None],
        put: Callable[[Callable[[], None]], object],
        examine: Callable[[int], None],
        lanes: Lanes,
    ) -> None:
        self._store, self._directory, self._tell, self._put = store, directory, tell, put
        self._examine, self._lanes = examine, lanes
        self._newest: Command | None = None
        self._snapshots: dict[int, str] = {}
        """Snapshot name of the generation written last."""

    def obey(self, command: Command) -> None:
        """Do this next; a new copy ends the present one."""
        if self._directory is None:
            if not isinstance(command, commands.Retire):
                reason = "it was started without --durable-dir."
                self._tell(Archived(command.order, 0, reason))
            return
        if isinstance(command, commands.Archive):
            self._newest = command
            self._store.give_up_archive("another one is to be archived.")
        self._lanes.run(ARCHIVE, "archiving", partial(self._done, command), self._tell_done)

    def give_up(self, reason: str) -> None:
        """Cancel all copies."""
        self._newest = None
        self._store.give_up_archive(reason)

    def close(self) -> None:
        """End. Does not wait for a hanging disk."""
        self.give_up("the agent ends.")
        if self._directory is not None:
            ended = threading.Event()
            self._lanes.submit(ARCHIVE, "the end", ended.set)
            ended.wait(CLOSE_S)

    # ------------------------------------------------------------------ in the lane's thread

    def _tell_done(self, report: Archived | None) -> None:
        if report is not None:
            self._put(partial(self._tell, report))

    def _done(self, command: Command) -> Archived | None:
        directory = self._directory
        assert directory is not None, "obey was given one"
        try:
            match command:
                case commands.Archive():
                    return Archived(command.order, self._copy(command, directory))
                case commands.FinishArchive(order, generation):
                    if generation not in self._snapshots:
                        raise StoreError(f"this agent has not written generation {generation}.")
                    show(directory, generation, self._snapshots[generation])
                    return Archived(order)
                case commands.Retire(before):
                    for number in retire(directory, before):
                        log.info("event=retired generation=%d directory=%s", number, directory)
        except (ScalaiError, OSError, MemoryError) as error:
            reason = str(error) or "the agent's memory ran out."
            if not isinstance(command, commands.Retire):
                return Archived(command.order, 0, reason)
            log.warning("event=not_retired %s", reason)
        return None

    def _copy(self, command: commands.Archive, directory: Path) -> int:
        if self._newest is not command:
            raise StoreError("it is not needed any more: something newer is archived.")
        generation = command.generation
        self._snapshots = {generation: snapshot_name(self._store.manifest(generation))}
        try:
            return self._store.archive(generation, directory, own_only=command.own_only)
        except DamageError:
            self._put(partial(self._examine, generation))
            raise
