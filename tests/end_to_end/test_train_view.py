"""Ranks read their samples from files of a mount: its process is killed while they train."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import scalai
from scalai.vfs.mounts import find_mount
from support.agents import Agents
from support.data_files import lines

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None,
        reason="no /dev/fuse here, or no fuse3",
    ),
]
SCALAI = Path(sys.executable).with_name("scalai")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_view.py"
SAMPLES = lines(101)
"""No whole global batches of 12: a pass ends within one."""
SEED = 7


def run(*arguments: object) -> str:
    done = subprocess.run(
        [str(SCALAI), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class View:
    """A job whose ranks read files of a mount."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.point, self.source = folder, folder / "point", folder / "corpus.jsonl"
        self.metrics = folder / "lines"
        for each in (self.point, self.metrics):
            each.mkdir()
        self.source.write_bytes(b"".join(SAMPLES))
        script = [
            str(EXAMPLE), "--view", str(self.point / "dataset" / "corpus"), "--steps", "100000",
            "--metrics", str(self.metrics), "--pause-s", "0.05",
        ]  # fmt: skip
        degrees = '1 = "tp1"\n2 = "tp1"'
        flags = ("--max-restarts", "1")
        self.agents = Agents(folder, degrees, script, slots=2, nodes="1", flags=flags)

    def mount(self) -> int:
        """Mount, and return the number of the process that serves."""
        said = run(
            "mount", self.agents.job, self.point, "--store-dir", self.agents.store, "--source",
            f"corpus={self.source}", "--shuffle", f"corpus={SEED}", "--global-batch-size", 12,
            "--log", self.folder / "mount.txt",
        )  # fmt: skip
        found = re.search(r"by process (\d+)", said)
        assert found, said
        return int(found[1])

    def steps(self) -> list[int]:
        path = self.metrics / "loss.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line)["step"] for line in text.splitlines()]

    def wait_for_step(self, step: int) -> None:
        self.agents.wait_until(lambda: bool(self.steps()) and self.steps()[-1] >= step, f"{step}")

    def read(self) -> dict[int, set[str]]:
        """Return the hashes of what all ranks have read, by the place in the global order."""
        found: dict[int, set[str]] = {}
        for path in self.metrics.glob("records-*.jsonl"):
            for line in map(json.loads, path.read_text().splitlines()):
                for place, value in enumerate(line["hashes"], start=line["first"]):
                    found.setdefault(place, set()).add(value)
        return found


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    made = View(tmp_path)
    with made.agents:
        yield made
    if find_mount(made.point) is not None:
        run("unmount", "--lazy", made.point)


@pytest.mark.fault
def test_a_job_whose_mount_is_killed_stops_with_the_reason_and_goes_on_when_it_is_there_again(
    view: View,
) -> None:
    process = view.mount()
    agents = view.agents
    agents.start("a")
    view.wait_for_step(12)
    os.kill(process, signal.SIGKILL)
    assert agents.exit_code("a") == 1
    assert "Transport endpoint is not connected" in agents.text()
    assert str(view.point) in agents.text()
    before = view.steps()[-1]

    view.mount()
    agents.start("a")
    view.wait_for_step(before + 10)
    agents.scale(nproc=1)
    agents.wait_until(lambda: agents.resizes()[-1]["after"].endswith("DP1"), "one rank")
    view.wait_for_step(view.steps()[-1] + 10)
    verdict = run("ledger", "verify", agents.job, "--store-dir", agents.store)
    assert verdict.splitlines()[-1].startswith("proven: "), verdict
    agents.drain("a")
    agents.exit_code("a")

    steps = view.steps()
    assert steps == list(range(1, len(steps) + 1)), "no step is lost, and none is made twice"
    order = scalai.Shuffled(len(SAMPLES), SEED).samples_at(np.arange(12 * len(steps)))
    hashes = [hashlib.sha256(sample).hexdigest() for sample in SAMPLES]
    assert view.read() == {place: {hashes[sample]} for place, sample in enumerate(order.tolist())}
