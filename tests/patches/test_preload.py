"""The fork server while it imports what workers will need."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.agents import worker_home

pytestmark = pytest.mark.fault

DEADLINE_S = 60.0
AGENT = """
import os, subprocess, sys
os.environ["SCALAI_AGENT_PID"] = str(os.getpid())
subprocess.run([sys.executable, "-c", "import scalai.patches.preload"])
"""
ENDLESS = """
import os, pathlib, time
here = pathlib.Path(__file__).parent
(here / "new").write_text(str(os.getpid()))
(here / "new").rename(here / "pid")
time.sleep(600)
"""


def test_who_only_inherits_what_a_fork_server_is_told_is_not_counted_as_a_worker() -> None:
    """An agent that was started by one that has a fork server, and what it starts itself."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    environment = {**os.environ, "SCALAI_PRELOAD": "/of/another/preload.json"}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE
    )
    try:
        end = time.monotonic() + DEADLINE_S
        while not (children := psutil.Process(parent.pid).children()):
            assert time.monotonic() < end and parent.poll() is None, "it starts nothing"
            time.sleep(0.02)
        assert worker_home(children[0]) is None
    finally:
        parent.communicate(b"\n", DEADLINE_S)


def test_a_fork_server_whose_agent_has_ended_before_it_begins_imports_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text("import os; os._exit(3)")
    agent = subprocess.Popen([sys.executable, "-c", ""])
    agent.wait(DEADLINE_S)
    environment = {
        **os.environ, "PYTHONPATH": str(tmp_path), "SCALAI_PRELOAD": str(tmp_path / "none"),
        "SCALAI_AGENT_PID": str(agent.pid),
    }  # fmt: skip
    server = subprocess.run(
        [sys.executable, "-c", "import scalai.patches.preload"], env=environment, timeout=DEADLINE_S
    )
    assert server.returncode == 1


def test_a_fork_server_that_still_imports_torch_ends_with_its_agent(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(ENDLESS)
    environment = {
        **os.environ, "PYTHONPATH": str(tmp_path), "SCALAI_PRELOAD": str(tmp_path / "none"),
    }  # fmt: skip
    agent = subprocess.Popen([sys.executable, "-c", AGENT], env=environment)
    try:
        end = time.monotonic() + DEADLINE_S
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < end and agent.poll() is None, "it imports no torch"
            time.sleep(0.02)
        server = psutil.Process(int((tmp_path / "pid").read_text()))
    finally:
        agent.kill()
        agent.wait(DEADLINE_S)
    try:
        server.wait(DEADLINE_S)
    except psutil.TimeoutExpired:
        server.kill()
        raise
