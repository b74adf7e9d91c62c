"""The process of the coordinator dies, or stands still: the workers train on, another one takes its
place, and the job can be changed again."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from scalai.launch.chaos import processes
from support.agents import Agents, tiny_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

DEGREES = '2 = "tp2"\n1 = "tp1"'
REPLICAS = '2 = "tp1"\n1 = "tp1"'


def two_hosts(folder: Path, degrees: str = DEGREES, **facts: Any) -> Any:
    return tiny_agents(folder, degrees, slots=1, **facts)


def train(agents: Agents, step: int = 5) -> list[int]:
    """Start two hosts and return their workers once these have made some steps."""
    agents.start("a")
    agents.start("b")
    agents.wait_for_step(step, world=2)
    agents.wait_for_all(2)
    return sorted(agents.workers())


def adopted(agents: Agents, term: int = 2) -> None:
    agents.wait_until(
        lambda: agents.text().count("event=adopted") >= term - 1, "the round is adopted"
    )


def no_step_was_lost(agents: Agents) -> None:
    steps = check_steps(agents.lines())
    assert steps == list(range(1, steps[-1] + 1)), steps
    assert not any(report.get("steps_lost") for report in agents.resizes())


@pytest.mark.campaign
def test_a_coordinator_that_stands_still_is_ended_and_replaced(tmp_path: Path) -> None:
    settings = {"resize": "coordinator_timeout_s = 8"}
    with two_hosts(tmp_path, settings=settings) as agents:
        workers = train(agents)
        agents.signal_coordinator(signal.SIGSTOP)
        adopted(agents)
        agents.wait_for_step(agents.lines()[-1]["step"] + 3, world=2)
        assert sorted(agents.workers()) == workers
        assert "event=silent_coordinator" in agents.text()
        no_step_was_lost(agents)


@pytest.mark.campaign
def test_what_stops_a_host_leaves_a_coordinator_alone_that_was_started_there(
    tmp_path: Path,
) -> None:
    """It is none of the agent's own processes, the one that takes another's place as little as the
    first."""
    with two_hosts(tmp_path) as agents:
        train(agents)
        for term in (1, 2):
            folder = agents.store / agents.job
            coordinator = processes.coordinator(folder)
            assert coordinator is not None
            assert not any(coordinator in processes.family(folder, host) for host in "ab")
            if term == 1:
                agents.kill_coordinator()
                adopted(agents)


@pytest.mark.campaign
def test_a_job_that_has_ended_is_not_taken_over(tmp_path: Path) -> None:
    """An agent stands still while the job ends, and comes back to nobody."""
    with two_hosts(tmp_path) as agents:
        train(agents)
        agents.drain("b")
        agents.wait_for_world(1)
        assert agents.exit_code("b") == 0
        agents.let_end()
        assert agents.exit_code("a") == 0
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")
        assert "event=succession" not in agents.text()


@pytest.mark.campaign
def test_every_agent_is_killed_and_started_again_beside_a_new_coordinator(tmp_path: Path) -> None:
    """What a new agent brings is no round under way: the newest state is gone on from."""
    with two_hosts(tmp_path, settings={"store": "snapshot_every = 5"}) as agents:
        train(agents, 8)
        agents.kill_coordinator()
        for host in "ab":
            os.kill(agents.agent_pid(host), signal.SIGKILL)
        agents.wait_until(lambda: not agents.workers(), "workers end with their agents")
        made = agents.lines()[-1]["step"]
        agents.start("a")
        agents.start("b")
        agents.wait_for_step(made + 3, world=2)
        check_steps(agents.lines())
