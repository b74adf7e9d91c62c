"""A host's part of the job's state between rounds: found at the start, doubted, archived during
training, saved, left at the end."""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scalai.core.errors import DamageError, ScalaiError, StoreError
from scalai.core.host.actions import LeaveState
from scalai.core.messages import commands, reports
from scalai.core.messages.reports import Archived
from scalai.launch.agent.durable import (
    attach_durable,
    numbers,
    set_aside,
    write_finished,
    write_ledger,
)
from scalai.launch.agent.leftovers import left_by_others
from scalai.launch.agent.loop import ARCHIVE, DISK, MEMORY
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.calls import Joined
from scalai.launch.slow_files import said
from scalai.runtime.lanes import Lanes
from scalai.store.archive import repair, retire, show
from scalai.store.host import HostStore
from scalai.store.manifest import UNNUMBERED
from scalai.store.parts import snapshot_name, summary_bytes

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Seconds for a copy to remove its files when the agent ends; a later agent of this host removes
the rest."""

Command = commands.Archive | commands.FinishArchive | commands.Retire


class Archiver:
    """Obeys one command after the other. Only the agent's own thread calls it.

    Args:
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


NAMED = 5
"""Largest number of damaged pieces in a report."""


@dataclass(frozen=True, slots=True)
class Found:
    """State a host brings to a job.

    ``parts``: manifests, as bytes, of committed generations; ``sealed``: of snapshots without a
    number; ``damaged``: unreadable ones by number, with the reason; ``examined``: damage found by
    reading parts again, by number.
    """

    parts: tuple[bytes, ...]
    sealed: tuple[bytes, ...]
    damaged: tuple[tuple[int, str], ...]
    examined: tuple[tuple[int, tuple[str, ...]], ...]


class Holdings:
    """One host's part of the state. Only the agent's own thread calls it.

    Args:
        tell: Sends a report to the coordinator.
        lanes: Run blocking work beside the loop.
        put: Hands work to the agent's loop.
    """

    def __init__(
        self,
        spec: JobSpec,
        store: HostStore,
        tell: Callable[[reports.Report], None],
        lanes: Lanes,
        put: Callable[[Callable[[], None]], object],
    ) -> None:
        self._store, self._tell, self._lanes, self._put = store, tell, lanes, put
        folder = spec.durable_dir if spec.is_elastic else None
        self._folder = None if folder is None else folder / spec.job
        self.archiver = Archiver(store, self._folder, tell, put, self.examine, lanes)
        self._is_fresh = spec.is_fresh
        self._seen_damaged: dict[int, str] = {}
        """Unusable parts of the durable directory at the last look, by number."""
        self._keeps = True

    def found(self) -> "Found":
        """Return the state this host brings: its store's, with the result of ``attach``. Touches no
        disk."""
        damaged = {**self._store.damaged, **self._seen_damaged}
        unread = [(UNNUMBERED, why) for why in self._store.damaged_snapshots.values()]
        if not damaged and self._is_empty() and not self._is_fresh:
            damaged = left_by_others(self._store.directory)
        sealed = tuple(summary_bytes(manifest) for _, manifest in self._store.sealed())
        found = tuple((n, _named(lines)) for n, lines in self._store.damage_found().items())
        return Found(self._parts(), sealed, (*sorted(damaged.items()), *unread), found)

    def _is_empty(self) -> bool:
        return not self._store.generations() and not self._store.sealed()

    def attach(self) -> None:
        """Attach the durable directory's parts. Any thread may call it.

        Waits for a hanging disk, with a log line. Raises ``StoreError``: the directory cannot be
        read.
        """
        if self._folder is None:
            return
        with said(f"{self._folder}, which may hold the job's state"):
            if self._is_fresh:
                # If it stays (a late host's own disk), new generations need higher numbers.
                self._seen_damaged = dict.fromkeys(numbers(self._folder), "given up by --fresh")
            else:
                repair(self._folder, self._store.host)
                self._seen_damaged = attach_durable(self._store, self._folder)

    def attach_beside(self, then: Callable[[Exception | None], None]) -> None:
        """If the store is empty, attach beside the loop; then call ``then`` in the loop, with the
        error if any."""
        if self._folder is None or not self._is_empty():
            then(None)
            return

        def attach() -> None:
            failed: Exception | None = None
            try:
                self.attach()
            except (ScalaiError, OSError) as error:
                failed = error
            self._put(lambda: then(failed))

        self._lanes.submit(DISK, "looking into the durable directory", attach)

    def _parts(self) -> tuple[bytes, ...]:
        return tuple(summary_bytes(self._store.manifest(n)) for n in self._store.generations())

    def newest(self) -> str:
        """Describe the newest generation with a part on this host."""
        numbers = self._store.generations()
        if not numbers:
            return "nothing yet"
        return f"newest: generation {numbers[-1]} of step {self._store.manifest(numbers[-1]).step}"

    def begin(self, answer: Joined) -> None:
        """The coordinator has accepted this host. If the job begins anew, the durable directory is
        set aside."""
        if self._folder is not None and answer.sets_aside:
            self._is_fresh = False  # from now on the directory is the job's own
            self._seen_damaged = {}
            with said(f"{self._folder}, which is to make way"):
                moved = set_aside(self._folder)
            if moved is not None:
                log.info("event=set_aside directory=%s now=%s", self._folder, moved)

    def doubt(self, generation: int) -> None:
        """A proof of a generation has failed: drop its fetched pieces."""
        kept = self._store.forget_unproven(generation)
        left = None if kept is None else summary_bytes(kept)
        self._tell(reports.Doubted(generation, left))

    def examine(self, generation: int) -> None:
        """Compare this host's part of a generation with its manifest, beside the loop; report."""

        def examine() -> None:
            damage: list[str] = []
            try:
                damage = self._store.examine(generation)
            except (ScalaiError, OSError, MemoryError) as error:
                log.warning("event=not_examined generation=%d: %r", generation, error)
            self._put(lambda: self._tell_examined(generation, damage))

        lane = DISK if self._store.is_attached(generation) else MEMORY
        self._lanes.submit(lane, f"examining generation {generation}", examine)

    def _tell_examined(self, generation: int, damage: Sequence[str]) -> None:
        """Report the damage and this host's present part, which may have grown."""
        directory, left = str(self._store.directory), None
        with suppress(StoreError):  # it was dropped
            part = self._store.manifest(generation)
            directory = str(self._store.generation_directory(generation))
            directory = part.about.get("attached", {}).get("directory", directory)
            left = summary_bytes(part)
        self._tell(reports.Examined(generation, _named(damage), directory, left))

    def look(self) -> None:
        """Memory holds nothing whole: report the durable directory's content."""

        def attach() -> None:
            try:
                self.attach()
            except (ScalaiError, OSError) as error:
                log.warning("event=not_attached %s", error)
            self._put(self._tell_attached)

        self._lanes.submit(DISK, "looking into the durable directory", attach)

    def _tell_attached(self) -> None:
        damaged = {**self._store.damaged, **self._seen_damaged}
        self._tell(reports.Attached(self._parts(), tuple(sorted(damaged.items()))))

    def save(self, generation: int) -> None:
        """Copy this host's part of a generation to the durable directory, and report."""
        folder = self._folder
        assert folder is not None
        self.archiver.give_up("the job ends, and is saved.")

        def save() -> None:
            report: reports.Report = reports.Saved()
            try:
                self._store.copy_to(generation, folder)
            except (ScalaiError, OSError) as error:
                reason = f"{error} The state stays in {self._store.directory}"
                report = reports.Saved(reason)
            self._put(lambda: self._tell(report))

        self._lanes.submit(DISK, f"saving generation {generation}", save)

    def told_to_exit(self, leave: LeaveState) -> None:
        """The coordinator ends this host's part; the end of the job is recorded in the durable
        directory, with the ledger of all samples."""
        self._keeps, ending = leave.command.keeps_state, leave.command.ending
        if ending is None or self._folder is None or not leave.last_step:
            return
        step = max(leave.last_step, ending.step)
        try:
            with said(f"{self._folder}, which is to say that the job has finished"):
                try:
                    if leave.ledger is not None:
                        write_ledger(self._folder, self._store.host, leave.ledger)
                finally:
                    write_finished(self._folder, step, ending.generation)
        except OSError as error:
            log.error("event=not_marked %s: the job has finished; %s", self._folder, error)

    def close(self) -> None:
        """Remove the store if the job goes on elsewhere, is done, or is in the durable directory;
        keep any resumable state."""
        store = self._store
        self.archiver.close()
        if self._keeps:
            store.detach()
        holds = store.generations() or store.sealed() or store.damaged or store.damaged_snapshots
        if not self._keeps or not holds:
            store.remove()
        else:
            store.close()


def _named(damage: Sequence[str]) -> tuple[str, ...]:
    more = [f"and {len(damage) - NAMED} more"] if len(damage) > NAMED else []
    return (*damage[:NAMED], *more)
