"""What hangs is told of and given up: no phase of a change lasts for ever."""

import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from scalai.launch.config.endpoint import read_card
from scalai.launch.coordinator.person_calls import Status
from scalai.runtime.calls import Channel
from support.agents import Agents, tiny_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

NEVER_STANDBY = "standby = 'never'\n"
FLAGS = ("--max-restarts", "5")


def two_hosts(folder: Path, **settings: Any) -> AbstractContextManager[Agents]:
    """Give two hosts with a worker each."""
    return tiny_agents(folder, '2 = "tp2"', slots=1, **settings)


def worker(agents: Agents, rank: int) -> psutil.Process:
    """Return the process of a cold worker."""
    (found,) = [p for p in agents.family() if p.environ().get("RANK") == str(rank)]
    return found


def stalled(agents: Agents) -> list[int]:
    """Return the ranks that make no steps, as the job's status has them."""
    card = read_card(agents.store / agents.job)
    assert card is not None
    channel = Channel(*card)
    try:
        shown = channel.call(Status()).value()["no_progress"]
    finally:
        channel.close()
    return [rank for host in shown.values() for rank in host["ranks"]]


@pytest.mark.campaign
def test_a_worker_that_stands_still_in_training_is_reported_with_its_state(tmp_path: Path) -> None:
    """And a stop that it does not come to is taken back: the training goes on as soon as it can."""
    settings = {"resize": f"{NEVER_STANDBY}drain_timeout_s = 2"}
    constants = {"resize.stall_s": 2.0}
    with two_hosts(tmp_path, settings=settings, constants=constants, flags=FLAGS) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_for_step(10, world=2)
        stopped = worker(agents, 1)
        stopped.suspend()
        agents.wait_until(lambda: "event=no_progress" in agents.text(), "the stall is reported")
        agents.wait_until(lambda: "state='T (stopped)'" in agents.text(), "the stopped one")
        agents.wait_until(lambda: "in all_reduce" in agents.text(), "the stack of one that waits")
        made = agents.lines()[-1]["step"]
        agents.wait_until(lambda: 1 in stalled(agents), "the status shows it")
        agents.scale(degrees="tp1")
        agents.wait_until(lambda: "event=withdrawn" in agents.text(), "the stop is taken back")
        os.kill(stopped.pid, signal.SIGCONT)
        agents.wait_for_step(made + 5)
        agents.wait_until(lambda: agents.lines()[-1]["tp"] == 1, "the change is tried again")
        agents.wait_until(lambda: not stalled(agents), "the status is clear again")
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), "each step is made once"


@pytest.mark.turns
def test_a_start_that_hangs_goes_back_to_the_degrees_that_ran(tmp_path: Path) -> None:
    settings = {"resize": f"{NEVER_STANDBY}start_timeout_s = 15"}
    with two_hosts(tmp_path, settings=settings) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_for_all(2)
        agents.arm("relaunch", "1", "SIGSTOP")
        agents.scale(degrees="tp1")
        agents.wait_for_death()
        made = agents.lines()[-1]["step"]
        agents.wait_until(lambda: "no progress of the start" in agents.text(), "it is overdue")
        agents.wait_for_step(made + 5)
        assert agents.lines()[-1]["tp"] == 2
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), "each step is made once"
