"""What a host holds of the job's state, beside the rounds: found at the start, doubted, saved, and
left behind at the end."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from scalai.core.errors import ScalaiError, StoreError
from scalai.core.host.actions import LeaveState
from scalai.core.messages import reports
from scalai.launch.agent.archiver import Archiver
from scalai.launch.agent.durable import (
    attach_durable,
    numbers,
    set_aside,
    write_finished,
    write_ledger,
)
from scalai.launch.agent.leftovers import left_by_others
from scalai.launch.agent.loop import DISK, MEMORY
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.calls import Joined
from scalai.launch.slow_files import said
from scalai.runtime.lanes import Lanes
from scalai.store.archive import repair
from scalai.store.host import HostStore
from scalai.store.manifest import UNNUMBERED
from scalai.store.parts import summary_bytes

NAMED = 5
"""Damaged pieces that a host names."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What a host brings to a job: manifests, as bytes, of committed generations (``parts``) and of
    what is ``sealed`` and has no number; what it cannot read, by number, with the reason; and what
    of its parts it has found damaged when it read them again (``examined``), by number."""

    parts: tuple[bytes, ...]
    sealed: tuple[bytes, ...]
    damaged: tuple[tuple[int, str], ...]
    examined: tuple[tuple[int, tuple[str, ...]], ...]


class Holdings:
    """One host's part of the state. Only the agent's own thread calls it.

    Args:
        spec: The job.
        store: This host's.
        tell: Reports to the coordinator.
        lanes: Run blocking work beside the loop.
        put: Hands the agent's loop something to do.
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
        """What cannot be used of the durable directory, as it was seen last, by number."""
        self._keeps = True

    def found(self) -> "Found":
        """Return what this host brings to the job: what its store holds, with what ``attach`` has
        seen. Touches no disk."""
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
        """Attach what the durable directory shows. Waits for a disk that hangs, and says so; any
        thread may. Raises ``StoreError`` where the directory cannot be read."""
        if self._folder is None:
            return
        with said(f"{self._folder}, which may hold the job's state"):
            if self._is_fresh:
                # Where it stays (a late host's own disk), a new generation must not come before it.
                self._seen_damaged = dict.fromkeys(numbers(self._folder), "given up by --fresh")
            else:
                repair(self._folder, self._store.host)
                self._seen_damaged = attach_durable(self._store, self._folder)

    def attach_beside(self, then: Callable[[Exception | None], None]) -> None:
        """Attach beside the loop where the store holds nothing, and go on ``then``, in the loop,
        with what has failed: a host that holds something needs no disk to join again."""
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
        """Say what the newest generation is that this host holds a part of."""
        numbers = self._store.generations()
        if not numbers:
            return "nothing yet"
        return f"newest: generation {numbers[-1]} of step {self._store.manifest(numbers[-1]).step}"

    def begin(self, answer: Joined) -> None:
        """The coordinator has taken this host in: where the job begins anew, what is in the durable
        directory makes way."""
        if self._folder is not None and answer.sets_aside:
            self._is_fresh = False  # from now on what is there is the job's own
            self._seen_damaged = {}
            with said(f"{self._folder}, which is to make way"):
                moved = set_aside(self._folder)
            if moved is not None:
                log.info("event=set_aside directory=%s now=%s", self._folder, moved)

    def doubt(self, generation: int) -> None:
        """A proof of a generation has failed: give up what was fetched of it."""
        kept = self._store.forget_unproven(generation)
        left = None if kept is None else summary_bytes(kept)
        self._tell(reports.Doubted(generation, left))

    def examine(self, generation: int) -> None:
        """Compare this host's part of a generation with its manifest, beside the loop, and tell."""

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
        """Tell what was found, and what this host holds now: more may have come meanwhile."""
        directory, left = str(self._store.directory), None
        with suppress(StoreError):  # it was dropped
            part = self._store.manifest(generation)
            directory = str(self._store.generation_directory(generation))
            directory = part.about.get("attached", {}).get("directory", directory)
            left = summary_bytes(part)
        self._tell(reports.Examined(generation, _named(damage), directory, left))

    def look(self) -> None:
        """Nothing in memory is whole: tell what the durable directory holds."""

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
        """Bring this host's part of a generation to the durable directory, and tell."""
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
        """The coordinator ends this host's part; if the job has come to its end, that is kept in
        the durable directory, with the ledger of all samples."""
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
        """Remove the store where the job goes on elsewhere, is done, or lies in the durable
        directory; leave everything that could still be resumed."""
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
    """Return the first lines, and how many more there are."""
    more = [f"and {len(damage) - NAMED} more"] if len(damage) > NAMED else []
    return (*damage[:NAMED], *more)
