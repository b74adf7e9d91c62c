"""For the tests of hooks: jobs of several rounds."""

from pathlib import Path

import pytest

from support.training.rounds import Player
from support.training.worker_pool import WorkerPool


@pytest.fixture
def play(rounds_pool: WorkerPool, tmp_path: Path) -> Player:
    return Player(rounds_pool, tmp_path)
