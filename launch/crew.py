"""The worker processes of one round on this host, and the page that they share with their agent."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from scalai.core.errors import ScalaiError
from scalai.core.jsonable import Json
from scalai.launch.arguments import worker_arguments
from scalai.launch.extension_locks import WorkersLocks, extensions_root
from scalai.launch.job import JobSpec
from scalai.launch.torch_elastic import Outcome, Placement, WorkerSet, wait_until_warm, warm_up
from scalai.launch.warm import write_preload
from scalai.runtime.control import ControlPage, control_path

LOOK_S = 2.0
"""How often the locks of extension builds are looked at."""

log = logging.getLogger(__name__)


class Crew:
    """The workers of one round. Made by ``Crews.start``; ``end`` leaves nothing of them."""

    def __init__(self, place: Placement, workers: WorkerSet, page: ControlPage, path: Path) -> None:
        self.page = page
        self._place, self._workers, self._path = place, workers, path
        self._locks = WorkersLocks(extensions_root())
        self._looks_at = 0.0

    def pids(self) -> dict[str, int]:
        """Process numbers of the living workers by global rank, as text."""
        first = self._place.first_rank
        return {str(first + local): pid for local, pid in self._workers.pids().items()}

    def newest_step(self) -> int:
        """Return the highest step that any worker has ended; 0 before the first."""
        return max(0, self.page.newest_step(self._place.local_world_size))

    def steps(self) -> dict[int, int]:
        """Return the step that each worker has ended, by global rank; -1 before it takes part."""
        steps = self.page.steps(self._place.local_world_size)
        return {self._place.first_rank + local: step for local, step in enumerate(steps)}

    def ended(self) -> dict[int, int]:
        """Return the exit codes of the workers that have ended, by global rank, and 0 for those
        that have come to their script's end and wait for the others; ends nobody, unlike
        ``poll``."""
        first = self._place.first_rank
        return {first + local: code for local, code in self._workers.ended().items()}

    def poll(self) -> Outcome | None:
        """Return how the workers ended, or None while any runs."""
        self._look_at_builds()
        outcome = self._workers.poll()
        if outcome is not None:
            self._locks.remove_left()
        return outcome

    def _look_at_builds(self) -> None:
        """Extensions are built before the first step as a rule, and rarely afterwards."""
        now, has_stepped = time.monotonic(), self.newest_step() > 0
        if has_stepped and now < self._looks_at:
            return
        self._locks.look(self._workers.pids().values())
        if now >= self._looks_at:
            self._looks_at = now + LOOK_S
            if not has_stepped:
                self._locks.tell_of_waits()

    def end(self) -> None:
        """End whatever workers live. Blocks until they are gone."""
        self._locks.look(self._workers.pids().values())
        self._workers.stop(1)
        self._locks.remove_left()
        self._path.unlink(missing_ok=True)


class Crews:
    """Starts the workers of one job on this host, warm once some have shown what they import.

    Args:
        spec: The job.
        directory: The agent's own, with the socket and the token that workers need.
        make_workers: Returns an empty set of workers.
    """

    def __init__(
        self, spec: JobSpec, directory: Path, make_workers: Callable[[], WorkerSet]
    ) -> None:
        self._spec, self._directory, self._make_workers = spec, directory, make_workers
        self._is_warming = self._is_warm = False

    def start(self, command: Mapping[str, Json]) -> Crew:
        """Start the workers that the coordinator's ``start`` or ``build`` asks for.

        Raises:
            StoreError, OSError: There is no room for the page, or a process cannot be started.
        """
        path = control_path(self._directory, command["round"])
        page = ControlPage(path, create=True)
        page.clear()
        place = Placement(
            round=command["round"],
            group_rank=command["group_rank"],
            group_world_size=command["group_world_size"],
            first_rank=command["first_rank"],
            local_world_size=command["local_world_size"],
            world_size=command["world_size"],
            master_addr=command["master_addr"],
            master_port=command["master_port"],
            environment=self._environment(),
            outlives_signals=self._spec.is_elastic,
        )
        workers = self._make_workers()
        try:
            workers.start(place, worker_arguments(self._spec, command), warm=self._is_warm)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return Crew(place, workers, page, path)

    def _environment(self) -> dict[str, str]:
        environment = {"SCALAI_AGENT_PID": str(os.getpid())}
        if self._spec.is_elastic:
            environment |= {"SCALAI_ELASTIC": "1", "SCALAI_AGENT": str(self._directory)}
        return environment

    def warm_up(self, imports: Json, beside: Callable[[Callable[[], None]], object]) -> None:
        """Start the fork server of later crews with what a worker has imported, once.

        Until it has imported all of it crews start cold: who forks from it sooner waits for it.
        """
        if self._is_warming:
            return
        try:
            warm_up(str(write_preload(self._directory / "preload.json", imports)))
        except (ScalaiError, OSError) as error:
            log.warning("event=cold: later workers start slowly: %s", error)
            return
        self._is_warming = True
        beside(self._wait_until_warm)

    def _wait_until_warm(self) -> None:
        began = time.monotonic()
        try:
            wait_until_warm()
        except (OSError, EOFError) as error:
            log.warning("event=cold: the fork server has ended: %r", error)
            return
        self._is_warm = True
        took_s = time.monotonic() - began
        log.info("event=warm took_s=%.1f: later workers start from here", took_s)
