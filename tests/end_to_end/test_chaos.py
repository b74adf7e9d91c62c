"""``scalai chaos`` against a job: what it injects is seen and survived, and all is undone when a
person interrupts it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scalai.launch.chaos import job_processes as processes
from support.agents import Agents, tiny_agents
from support.chaos_campaign import SHORT, campaign
from support.tiny_job import check_steps

SHARDS = '3 = "tp3"\n2 = "tp2"\n1 = "tp1"'
FLAGS = ("--max-restarts", "50", "--snapshot-every", "7")


def start_chaos(agents: Agents, faults: str, *more: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable, "-m", "scalai.launch.cli", "chaos", agents.job, "--store-dir",
        str(agents.store), "--out", str(agents.folder / "chaos"), "--faults", faults, *more,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(agents: Agents, hosts: str = "ab") -> None:
    for host in hosts:
        agents.start(host)
    agents.wait_until(lambda: bool(agents.resizes()), "all hosts train")
    agents.wait_for_step(8)


def ended(process: "subprocess.Popen[str]", code: int) -> str:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == code, said
    return said


@pytest.mark.campaign
def test_what_was_stopped_goes_on_where_a_person_interrupts(tmp_path: Path) -> None:
    """The stopped agent is the only one, so that nobody goes on without it; meanwhile another
    command is refused."""
    with tiny_agents(tmp_path, '1 = "tp1"', slots=1, nodes="1", flags=FLAGS) as agents:
        agents.start("a")
        agents.wait_for_step(8)
        chaos = start_chaos(agents, "stop-worker")
        (worker,) = agents.workers("a")
        agents.wait_until(lambda: processes.state(worker) == "T", "it is stopped")
        assert "another command injects faults" in ended(start_chaos(agents, "kill-worker"), 2)
        chaos.send_signal(signal.SIGINT)
        said = ended(chaos, 130)
        assert "what was injected is undone" in said
        assert processes.state(worker) != "T"
        assert (tmp_path / "chaos" / "verdict.json").exists()
        agents.wait_for_step(agents.lines()[-1]["step"] + 5)
        check_steps(agents.lines())


@pytest.mark.campaign
def test_a_fault_that_does_not_strike_and_a_job_that_ends_are_no_success(tmp_path: Path) -> None:
    with tiny_agents(tmp_path, SHARDS, slots=1, flags=FLAGS) as agents:
        train(agents)
        # The hang of a worker is known after minutes, by default.
        said = ended(start_chaos(agents, "stop-worker@s=0.1", "--wait-s", "3"), 4)
        assert "not seen" in said, said
        agents.wait_until(lambda: "T" not in states(agents), "it goes on")
        again = tmp_path / "again"
        faults = ("kill-worker,kill-agent", "--every", "100000", "--out", str(again))
        chaos = start_chaos(agents, *faults)
        agents.wait_until(again.exists, "it waits for its first fault")
        for host in "ab":
            agents.kill(host)
        agents.kill_coordinator()
        said = ended(chaos, 4)
        assert "the job had ended" in said or "did not get to the time" in said, said


def states(agents: Agents) -> list[str]:
    return [processes.state(pid) for pid in agents.workers()]


@pytest.mark.fault
@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_few_faults_of_each_part_are_seen_and_survived(tmp_path: Path) -> None:
    chosen = {name: SHORT[name] for name in ("processes", "replicas", "state")}
    figures = campaign(tmp_path / "out", 3, chosen)
    assert figures["faults"] == figures["passed"] == 9, figures
    assert not figures["failed"] and not figures["differs"], figures
    assert figures["steps"] > 100 and figures["detect_s_max"]["process"] < 60, figures
    assert os.path.exists(tmp_path / "out" / "state" / "chaos" / "verdict.png")
    logs = "".join(log.read_text() for log in (tmp_path / "out" / "processes").glob("?.log"))
    assert "event=exit code=1" not in logs, "the coordinator has waited for the killed agents"


@pytest.mark.fault
@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.timeout(500)
@pytest.mark.parametrize("stations", ["freeze,emergency,relaunch", "plan,move,moved,restore"])
@pytest.mark.parametrize("kind", ["kill-worker", "kill-agent"])
def test_a_second_fault_at_any_station_of_a_recovery_is_survived(
    tmp_path: Path, kind: str, stations: str
) -> None:
    faults = [f"{kind}@station={station}" for station in stations.split(",")]
    figures = campaign(tmp_path / "out", 5, {"doubles": faults})
    assert figures["faults"] == figures["passed"] == 1, figures
    assert not figures["failed"] and not figures["differs"], figures
    verdict = json.loads((tmp_path / "out" / "doubles" / "chaos" / "verdict.json").read_text())
    assert len(verdict["outcomes"]) == len(faults)
