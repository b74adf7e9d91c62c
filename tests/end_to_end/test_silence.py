"""Processes that stand still: the job goes on, or says what it waits for; signals are obeyed."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.agents import command_of, one_worker, tiny_agents

pytestmark = pytest.mark.fault

DEADLINE_S = 60.0


def coordinator_of(processes: list[psutil.Process]) -> psutil.Process:
    (found,) = [p for p in processes if "scalai.launch.coordinator.process" in command_of(p)]
    return found


@pytest.mark.campaign
def test_a_silent_coordinator_holds_nobody_up(tmp_path: Path) -> None:
    """Workers train on, commands end with an error, and two signals end the agent; its state
    stays."""
    with one_worker(tmp_path) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        coordinator_of(agents.family()).suspend()
        agents.wait_until(lambda: "event=coordinator_silent" in agents.text(), "it is told of")
        step = int(agents.lines()[-1]["step"])
        agents.wait_for_step(step + 20)
        status = subprocess.run(
            [sys.executable, "-m", "scalai.launch.cli", "status", "--job", agents.job,
             "--store-dir", str(agents.store)],
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
        assert status.returncode == 1 and "does not answer" in status.stderr
        agents.drain("a")
        agents.wait_until(lambda: "so nobody can stop the job" in agents.text(), "it says so")
        agents.drain("a")
        assert agents.exit_code("a") == 128 + signal.SIGTERM
        agents.wait_until(lambda: not agents.workers(), "the workers are gone")
        assert agents.generations("a")


@pytest.mark.campaign
def test_a_drain_that_a_silent_coordinator_cannot_serve_ends_by_its_timeout(tmp_path: Path) -> None:
    with one_worker(tmp_path, settings={"resize": "drain_timeout_s = 3"}) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        coordinator_of(agents.family()).suspend()
        agents.drain("a")
        assert agents.exit_code("a") == 1
        agents.wait_until(lambda: not agents.workers(), "the workers are gone")
        assert agents.generations("a")
        assert "event=drain_timeout" in agents.text()


@pytest.mark.campaign
@pytest.mark.turns
def test_a_host_is_lost_after_as_much_silence_as_the_command_line_says(tmp_path: Path) -> None:
    """Also where an agent has started the coordinator."""
    flags = ("--max-restarts", "5", "--silent-s", "3")
    with tiny_agents(tmp_path, '2 = "tp1"\n1 = "tp1"', slots=1, flags=flags) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_for_step(5, world=2)
        psutil.Process(agents.agent_pid("b")).suspend()
        agents.wait_until(lambda: "event=lost host=b" in agents.text(), "it is lost")
        (silent_s,) = re.findall(r"event=lost host=b: silent for (\d+) s", agents.text())
        assert int(silent_s) < 10, "by default it is 14"


@pytest.mark.campaign
@pytest.mark.turns
def test_workers_do_not_inherit_the_token_and_meet_on_one_interface(tmp_path: Path) -> None:
    token = "0123456789abcdef-a-secret"
    os.environ["SCALAI_JOB_TOKEN"] = token
    try:
        with tiny_agents(tmp_path, '2 = "tp2"', nodes="1") as agents:
            agents.start("a")
            agents.wait_for_step(3)
            agent = agents._processes["a"].pid
            for process in agents.family():
                assert token not in " ".join(process.cmdline())
                if process.pid != agent:
                    assert token not in str(process.environ()), process.cmdline()
                listening = [c for c in process.net_connections("tcp") if c.status == "LISTEN"]
                assert {c.laddr.ip for c in listening} <= {"127.0.0.1"}, process.cmdline()
            assert token not in agents.text()
    finally:
        del os.environ["SCALAI_JOB_TOKEN"]


@pytest.mark.turns
def test_a_terminal_that_is_halted_holds_up_no_job(tmp_path: Path) -> None:
    """Nobody takes what the agent and the coordinator say; workers write to files."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    logs = ["--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    with tiny_agents(tmp_path, '2 = "tp2"\n1 = "tp1"', slots=2, flags=logs) as agents:
        agents.start("a", output=writing)
        os.close(writing)
        agents.wait_for_step(5, world=2)
        agents.scale(nproc=1)
        agents.wait_for_step(agents.wait_for_world(1) + 3)
        agents.let_end()
        assert agents.exit_code("a") == 0
        said = os.read(reading, 1 << 20)
    os.close(reading)
    assert 0 < len(said) <= 4096 and b"event=exit" not in said, "it was halted all the time"
