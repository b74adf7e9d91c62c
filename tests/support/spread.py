"""How a run's tests are spread over several processes of pytest (``pytest -n``)."""

from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

ALONE = ("tests/end_to_end",)
"""Folders whose tests mostly wait for jobs of their own: each goes wherever there is room."""
TOGETHER = ("tests/patches", "tests/examples", "tests/end_to_end/test_kills.py")
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
    """Gives each process another unit of tests when it has hardly any left."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


class Spreading:
    """The plugin of pytest that spreads tests by their units."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: object) -> Spread:
        return Spread(config, log)
