"""A job whose shared memory is full: a small one, mounted in a namespace of the test's own."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.agents import tiny_agents

DEADLINE_S = 240.0


def can_mount() -> bool:
    """Whether a file system can be mounted here that nobody else sees."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-m", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, timeout=30, check=False).returncode == 0


def scenario(folder: Path, memory: Path) -> None:
    """Fill the memory while a job trains, then change its degrees."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(memory)], check=True, timeout=30
    )
    degrees = '4 = "tp2"\n3 = "tp1"\n2 = "tp2"'
    with tiny_agents(folder, degrees, slots=4, nodes="1", store=memory / "store") as agents:
        agents.start("a")
        agents.wait_for_step(20)
        filler = memory / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        assert os.statvfs(memory).f_bavail == 0
        agents.scale(nproc=3)
        made = agents.wait_for_all(3)
        log = agents.text()
        assert "control-2 needs 8192 bytes, but No space left on device" in log, log
        filler.unlink()
        agents.scale(nproc=2)
        assert agents.wait_for_world(2) > made
        steps = [line["step"] for line in agents.lines()]
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.fault
@pytest.mark.campaign
@pytest.mark.skipif(not can_mount(), reason="needs root, unshare and mount")
def test_a_full_memory_neither_ends_the_agent_nor_loses_a_step(tmp_path: Path) -> None:
    # Short, because of the sockets of multiprocessing.
    with tempfile.TemporaryDirectory(prefix="scalai-") as memory:
        ran = subprocess.run(
            ["unshare", "-m", "--propagation", "private", sys.executable, __file__,
             str(tmp_path), memory],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr


if __name__ == "__main__":
    scenario(Path(sys.argv[1]), Path(sys.argv[2]))
