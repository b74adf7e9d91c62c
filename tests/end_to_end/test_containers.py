"""Agents in PID namespaces of their own, as in pods: whose first process ends, all of it ends."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.agents import SCALAI_RUN, TINY_JOB, Agents, command_of
from support.tiny_job import check_steps

INSIDE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
DEADLINE_S = 60.0


def obstacle() -> str | None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "PID namespaces need root and unshare"
    tried = subprocess.run([*INSIDE, "true"], capture_output=True, check=False, timeout=DEADLINE_S)
    return "this machine lets nobody make PID namespaces" if tried.returncode else None


pytestmark = [pytest.mark.fault, pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))]


class PodAgents(Agents):
    """Agents that are each the first process of a PID namespace, below a shell or not."""

    shell = ""

    def _on(self, host: str, command: list[str]) -> list[str]:
        if self.shell:
            return [*INSIDE, "sh", "-c", self.shell, "sh", *command]
        return [*INSIDE, *command]

    def drain(self, host: str) -> None:
        inside = psutil.Process(self.agent_pid(host)).children(recursive=True)
        (agent,) = [p for p in inside if str(SCALAI_RUN) in command_of(p)[:2]]
        agent.send_signal(signal.SIGTERM)


def pods(folder: Path) -> PodAgents:
    script = [str(TINY_JOB), "--steps", "100000", "--metrics", str(folder / "metrics.jsonl")]
    return PodAgents(
        folder, '2 = "tp2"\n1 = "tp1"', script, slots=1,
        flags=("--durable-dir", str(folder / "disk")),
    )  # fmt: skip


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize(
    "shell",
    [
        pytest.param("", id="first"),
        pytest.param('"$@"; exit $?', id="below-a-shell"),
    ],
)
def test_the_agent_that_started_the_coordinator_stays_until_the_job_has_ended(
    tmp_path: Path, shell: str
) -> None:
    with pods(tmp_path) as agents:
        agents.shell = shell
        agents.start("a")
        agents.wait_for_step(5, world=1)
        assert "event=container" in (tmp_path / "a.log").read_text()
        agents.start("b")
        joined = agents.wait_for_all(2)
        agents.drain("a")
        agents.wait_until(lambda: "event=stay" in agents.text(), "a stays")
        alone = agents.wait_for_all(1)
        agents.wait_for_step(alone + 20, world=1)
        assert agents.exit_codes()["a"] is None, agents.logs()
        agents.drain("b")
        assert agents.exit_code("b") == 75, agents.logs()
        assert agents.exit_code("a") == 0, agents.logs()
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)) and joined < alone
        assert "event=container" not in (tmp_path / "b.log").read_text()


@pytest.mark.campaign
def test_a_second_signal_ends_an_agent_that_stays(tmp_path: Path) -> None:
    with pods(tmp_path) as agents:
        agents.start("a")
        agents.wait_for_step(5, world=1)
        agents.start("b")
        agents.wait_for_all(2)
        agents.drain("a")
        agents.wait_until(lambda: "event=stay" in agents.text(), "a stays")
        agents.drain("a")
        assert agents.exit_code("a") == 0, agents.logs()
        agents.wait_until(lambda: "event=adopted" in agents.text(), "b has another coordinator")
        agents.wait_for_step(agents.lines()[-1]["step"] + 3, world=1)


@pytest.mark.campaign
def test_who_started_the_coordinator_that_took_over_stays_for_it_likewise(tmp_path: Path) -> None:
    with pods(tmp_path) as agents:
        agents.start("a")
        agents.wait_for_step(5, world=1)
        agents.start("b")
        agents.wait_for_all(2)
        agents.drain("a")
        agents.wait_until(lambda: "event=stay" in agents.text(), "a stays")
        agents.drain("a")
        assert agents.exit_code("a") == 0, agents.logs()
        agents.wait_until(lambda: "event=adopted" in agents.text(), "b has another coordinator")
        assert "event=container" in (tmp_path / "b.log").read_text()
        agents.start("a")
        agents.wait_for_all(2)
        agents.drain("b")
        said = tmp_path / "b.log"
        agents.wait_until(lambda: "event=stay" in said.read_text(), "b stays")
        alone = agents.wait_for_all(1)
        agents.wait_for_step(alone + 20, world=1)
        assert agents.exit_codes()["b"] is None, agents.logs()
        agents.drain("a")
        assert agents.exit_code("a") == 75, agents.logs()
        assert agents.exit_code("b") == 0, agents.logs()


def test_where_another_program_began_the_namespace_nothing_is_said() -> None:
    module = "scalai.launch.agent.caretaker"
    asked = f"from {module} import all_end_with_this_process as ends; print(ends())"
    for before, expected in (([], "True"), ([sys.executable, "-c", STARTS], "False")):
        logged = subprocess.run(
            [*INSIDE, *before, sys.executable, "-c", asked],
            capture_output=True, text=True, check=True, timeout=DEADLINE_S,
        )  # fmt: skip
        assert logged.stdout.strip() == expected


STARTS = "import subprocess, sys; subprocess.run(sys.argv[1:])"
