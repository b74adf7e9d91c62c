"""What tests of the job's law share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.simulated_workers import Clock
from support.two_laws import Train, World, training


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Train]:
    """Begins a job on these hosts, two slots each, under both laws; without an emergency's write,
    unless ``law`` says otherwise."""

    def begun(hosts: str = "ab", law: dict[str, Any] | None = None, **facts: Any) -> World:
        return training(tmp_path, hosts, law={"has_emergency": False, **(law or {})}, **facts)

    Clock.now = 1000.0
    yield begun
