"""A job resumes from its durable directory, whoever starts the coordinator and whoever is first."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scalai.launch.config.endpoint import TOKEN_VARIABLE, read_card
from support.agents import MARK, Agents, tiny_agents
from support.tiny_job import check_steps

FLAGS = ("--max-restarts", "5")


def durable(folder: Path) -> tuple[str, ...]:
    return (*FLAGS, "--durable-dir", str(folder / "durable"))


def start_coordinator(agents: Agents) -> None:
    """Start the job's coordinator by hand, with the agents' command line."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "scalai.launch.cli", "coordinator", "--listen",
               f"127.0.0.1:{port}", "--", *agents._command[1:], *agents._script]  # fmt: skip
    with (agents.folder / "coordinator.log").open("ab") as log:
        agents._all.append(
            subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, MARK: str(agents.store)},
            )
        )  # fmt: skip
    agents.wait_until(lambda: read_card(agents.store / agents.job) is not None, "its card")


def goes_on(agents: Agents, made: int) -> None:
    """Check that the next step is the one behind ``made``, and no step was made twice."""
    agents.wait_for_step(made + 3)
    steps = check_steps(agents.lines())
    assert steps == list(range(1, len(steps) + 1)), agents.logs()


@pytest.mark.fault
@pytest.mark.campaign
def test_a_job_resumes_from_disk_whoever_starts_the_coordinator_and_whoever_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "ab" * 32)
    degrees = '2 = "tp2"\n1 = "tp1"'
    with tiny_agents(tmp_path, degrees, slots=1, flags=durable(tmp_path)) as agents:
        start_coordinator(agents)
        agents.start("a")
        agents.wait_for_step(5, world=1)
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
        made = agents.lines()[-1]["step"]
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")

        start_coordinator(agents)
        agents.start("a")
        goes_on(agents, made)
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
        made = agents.lines()[-1]["step"]
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")

        # Another host is there first, and the one that saved comes later.
        agents.start("b")
        goes_on(agents, made)
        agents.start("a")
        agents.wait_for_world(2)
        check_steps(agents.lines())
