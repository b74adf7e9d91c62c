"""The worker processes of one round on this host, and the page that they share with their agent."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scalai.launch.arguments import worker_arguments
from scalai.launch.job import JobSpec
from scalai.launch.torch_elastic import Outcome, Placement, WorkerSet, wait_until_warm, warm_up
from scalai.launch.warm import write_preload
from scalai.runtime.control import ControlPage, control_path

Json = Any

log = logging.getLogger(__name__)


class Crew:
    """The workers of one round. Made by ``Crews.start``; ``end`` leaves nothing of them."""

    def __init__(self, place: Placement, workers: WorkerSet, page: ControlPage, path: Path) -> None:
        self.page = page
        self._place, self._workers, self._path = place, workers, path

    def pids(self) -> dict[str, int]:
        """Process numbers of the living workers by global rank, as text."""
        first = self._place.first_rank
        return {str(first + local): pid for local, pid in self._workers.pids().items()}

    def newest_step(self) -> int:
        """Return the highest step that any worker has ended; 0 before the first."""
        return max(0, self.page.newest_step(self._place.local_world_size))

    def poll(self) -> Outcome | None:
        """Return how the workers ended, or None while any runs."""
        return self._workers.poll()

    def end(self) -> None:
        """End whatever workers live. Blocks until they are gone."""
        self._workers.stop(1)
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
        self._is_warm = False

    def start(self, command: Mapping[str, Json]) -> Crew:
        """Start the workers that the coordinator's ``start`` or ``build`` asks for."""
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
        )
        workers = self._make_workers()
        workers.start(place, worker_arguments(self._spec, command), warm=self._is_warm)
        return Crew(place, workers, page, path)

    def _environment(self) -> dict[str, str]:
        environment = {"SCALAI_AGENT_PID": str(os.getpid())}
        if self._spec.is_elastic:
            environment |= {"SCALAI_ELASTIC": "1", "SCALAI_AGENT": str(self._directory)}
        return environment

    def warm_up(self, imports: Json, beside: Callable[[Callable[[], None]], object]) -> None:
        """Start the fork server of later crews with what a worker has imported, once."""
        if not self._is_warm:
            warm_up(str(write_preload(self._directory / "preload.json", imports)))
            self._is_warm = True
            beside(_announce_warm)


def _announce_warm() -> None:
    began = time.monotonic()
    wait_until_warm()
    log.info("event=warm took_s=%.1f: later workers start from here", time.monotonic() - began)
