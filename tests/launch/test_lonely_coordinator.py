"""A coordinator that was started by hand, and has no agents."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.ports import free_port

pytestmark = pytest.mark.fault

SCALAI = Path(sys.executable).with_name("scalai")


def test_a_coordinator_without_agents_ends_at_the_first_signal_and_says_so(tmp_path: Path) -> None:
    port, log = free_port("127.0.0.1"), tmp_path / "coordinator.log"
    command = [
        str(SCALAI), "coordinator", "--listen", f"127.0.0.1:{port}", "--", "--job", "j",
        "--nproc-per-node", "1", "--store-dir", str(tmp_path), "script.py",
    ]  # fmt: skip
    environment = {**os.environ, "SCALAI_JOB_TOKEN": "ab" * 16}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as coordinator,
    ):
        try:
            while b"event=coordinator" not in log.read_bytes():
                assert coordinator.poll() is None, log.read_text()
                time.sleep(0.05)
            coordinator.send_signal(signal.SIGTERM)
            assert coordinator.wait(120) == 75
        finally:
            coordinator.kill()
    assert "event=exit code=75 reason='SIGTERM, and no agent is in the job" in log.read_text()
