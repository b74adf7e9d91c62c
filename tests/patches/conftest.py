"""Support for the tests of the framework adapters: one pool of workers for all."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four processes that live as long as the test session."""
    workers = WorkerPool(size=4)
    yield workers
    workers.close()
