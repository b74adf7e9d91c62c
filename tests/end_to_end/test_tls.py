"""A job of two hosts whose control and data plane go over TLS."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.agents import Agents, tiny_agents
from support.certificates import Authority
from support.tiny_job import check_steps

DEGREES = '4 = "tp2"\n2 = "tp1"\n1 = "tp1"'
SCALAI = Path(sys.executable).with_name("scalai")


def ask(agents: Agents, *command: str) -> "subprocess.CompletedProcess[str]":
    """Ask the job as a person does, on its machine."""
    place = ("--job", agents.job, "--store-dir", str(agents.store))
    return subprocess.run(
        [str(SCALAI), *command, *place], capture_output=True, text=True, timeout=120
    )


@pytest.mark.campaign
def test_a_job_changes_and_state_crosses_under_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = {host: str(authority.files(host)) for host in ("a", "b")}
    with tiny_agents(tmp_path, DEGREES) as agents:
        agents.start("a", "--tls", files["a"])
        agents.wait_for_all(2)
        agents.start("b", "--tls", files["b"])
        agents.wait_for_all(4)  # all that b has comes from a
        asked = ask(agents, "status")
        assert asked.returncode == 0, asked.stderr  # by the coordinator's card, without a flag
        stranger = Authority(tmp_path, "stranger").files("asking")
        refused = ask(agents, "status", "--tls", str(stranger))
        assert refused.returncode == 1 and "do not agree on TLS" in refused.stderr
        agents.start("c")
        assert agents.exit_code("c") == 2, "an agent that says nothing of TLS"
        assert "speaks TLS" in (tmp_path / "c.log").read_text()
        assert ask(agents, "scale", "--nproc", "2").returncode == 0
        agents.wait_for_all(2)
        agents.drain("a")
        agents.exit_code("a")
        step = agents.wait_for_world(2)
        agents.wait_for_step(step + 3, world=2)
        agents.let_end()
        assert agents.exit_code("b") == 0
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), "each step is made once"
        said = [(tmp_path / f"{host}.log").read_text().count("event=tls files=") for host in "ab"]
        assert said == [2, 1], "both agents, and the coordinator that a has started"
