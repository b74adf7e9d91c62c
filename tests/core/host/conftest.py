"""Virtual time for jobs of simulated hosts."""

from functools import partial
from pathlib import Path

import pytest

from support.simulated_workers import Clock
from support.two_laws import Train, training


@pytest.fixture(autouse=True)
def virtual_time() -> None:
    Clock.now = 1000.0


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Have a job train on hosts, ``ab`` by default, with these facts of its ``World``."""
    return partial(training, tmp_path)
