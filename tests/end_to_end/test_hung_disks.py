"""A disk that answers nobody (a network file system whose server is gone) holds up no training and
no change, and is said."""

from pathlib import Path

import pytest

from support.agents import tiny_agents
from support.passthrough_disk import HAS_FUSE, passthrough_disk

pytestmark = [
    pytest.mark.fault,
    pytest.mark.turns,
    pytest.mark.skipif(not HAS_FUSE, reason="no /dev/fuse here, or no fuse3"),
]
DEGREES = '2 = "tp2"\n1 = "tp1"'
STORE = "snapshot_every = 50\ndurable_dir = '{disk}'\ndurable_every_s = 2"


def test_a_disk_that_hangs_holds_up_no_change_and_the_end_waits_for_it(tmp_path: Path) -> None:
    """Generations and reports go there."""
    with passthrough_disk(tmp_path) as disk:
        settings = {"store": STORE.format(disk=disk.point)}
        reports = ["--report-dir", str(disk.point / "reports")]
        with tiny_agents(tmp_path, DEGREES, slots=2, settings=settings, flags=reports) as agents:
            agents.start("a")
            agents.wait_until(lambda: "event=archived" in agents.text(), "one is archived")
            disk.hang()
            step = int(agents.lines()[-1]["step"])
            agents.wait_for_step(step + 110)  # snapshots are made on the way
            agents.scale(nproc=1)
            agents.wait_for_step(agents.wait_for_world(1) + 60)
            agents.wait_until(lambda: "event=report_late" in agents.text(), "that is said")
            agents.let_end()
            agents.wait_until(
                lambda: f"event=waiting for {disk.point / 'tiny'}" in agents.text(), "that, too"
            )
            disk.go_on()
            assert agents.exit_code("a") == 0
        assert (disk.folder / "tiny" / "finished.json").exists()


def test_an_agent_says_that_it_waits_for_the_disk_and_begins_once_that_answers(
    tmp_path: Path,
) -> None:
    with passthrough_disk(tmp_path) as disk:
        settings = {"store": STORE.format(disk=disk.point)}
        with tiny_agents(tmp_path, DEGREES, slots=1, nodes="1", settings=settings) as agents:
            disk.hang()
            agents.start("a")
            agents.wait_until(
                lambda: f"event=waiting for --durable-dir {disk.point}" in agents.text(), "it waits"
            )
            assert not agents.workers()
            disk.go_on()
            agents.wait_for_step(5)
            agents.let_end()
            assert agents.exit_code("a") == 0
