"""Random histories of both laws with a disk that all hosts share, to which generations come while
the job trains: what it shows is always whole, and the job goes back to it where nothing else is
left."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from support.histories import NAMES, Histories
from support.simulated_workers import Clock, use_real_time, use_virtual_time
from support.two_laws import World

pytestmark = pytest.mark.fault


@pytest.fixture(autouse=True, scope="module")
def real_time() -> Iterator[None]:
    """Tests of other files need it again."""
    yield
    use_real_time()


class DiskHistories(Histories):
    """What happens to the hosts of such a job, and to the disk."""

    @initialize(
        present=st.sampled_from(["a", "ab", "abc"]), is_replicated=st.booleans(),
        begins_s=st.sampled_from([0.0, 60.0, 200.0]),
    )  # fmt: skip
    def begin(self, present: str, is_replicated: bool, begins_s: float) -> None:
        use_virtual_time()
        Clock.now = 1000.0
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(
            Path(self.folder.name), is_replicated=is_replicated, snapshot_every=4,
            archive_every_s=40.0,
        )  # fmt: skip
        for name in present:
            self.world.add(name)
        self.world.go_on(begins_s)

    @rule()
    def fill_disk(self) -> None:
        self.world.disk.is_full = not self.world.disk.is_full

    @rule(names=st.lists(NAMES, unique=True, min_size=1))
    def lose_memories(self, names: list[str]) -> None:
        for name in names:
            self.world.kill(name, is_disk_lost=True)

    @invariant()
    def what_is_shown_is_whole(self) -> None:
        if hasattr(self, "world"):
            self.world.disk.check()


TestDiskHistories = pytest.mark.turns(DiskHistories.TestCase)
TestDiskHistories.settings = settings(
    max_examples=8, stateful_step_count=20, deadline=None,
    derandomize=os.environ.get("SCALAI_HISTORIES") != "random",
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
