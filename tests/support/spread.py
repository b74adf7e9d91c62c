"""How a run's tests are spread over several processes of pytest (``pytest -n``)."""

from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ALONE = ("tests/end_to_end",)
"""Folders whose tests mostly wait for jobs of their own: each goes wherever there is room."""
TOGETHER = ("tests/patches", "tests/examples", "tests/end_to_end/test_running_job.py")
"""Folders and files whose tests share what is made once a process (pools of workers, a job), or
look for what others leave."""


def unit_of(nodeid: str) -> str:
    """Return which tests of a run stay in one process: a test alone, a file's, a folder's."""
    file = nodeid.partition("::")[0]
    folder = str(PurePosixPath(file).parent)
    if folder in TOGETHER:
        return folder
    return nodeid if folder in ALONE and file not in TOGETHER else file


class Spread(LoadScopeScheduling):
    """Gives each process another unit of tests when it has hardly any left. Where a process dies,
    the test that it ran has failed, and another one goes on behind that."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        work = self.assigned_work[node]
        left = [name for unit in work.values() for name, is_done in unit.items() if not is_done]
        for unit in work.values():
            if left and left[0] in unit:
                unit[left[0]] = True  # else every process that follows dies of it
        for scope in [scope for scope, unit in work.items() if all(unit.values())]:
            del work[scope]
        super().remove_node(node)
        return left[0] if left else None

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # it has just begun, and is given work once it knows all tests
        super()._reschedule(node)
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)  # a process keeps its last test until it knows what follows


class Spreading:
    """The plugin of pytest that spreads tests by their units."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: object) -> Spread:
        return Spread(config, log)
