"""Workers that outlive a failure write the state that stands between two updates: the job goes on
from the step at which it failed, and from its newest generation only where nobody holds the state.

The tiny job computes, waits for all others as a training does for the norm of the gradients, and
then updates its state.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.agents import Agents, tiny_agents
from support.tiny_job import check_steps

REPLICAS = '4 = "tp1"\n2 = "tp1"\n1 = "tp1"'
SHARDS = '2 = "tp2"'


def went_on(agents: Agents, steps_lost: int = 0) -> dict[str, Any]:
    """Wait until the job goes on after a failure. Return the report, which says what was lost."""
    before = len(agents.resizes())
    agents.wait_until(lambda: len(agents.resizes()) > before, "the job goes on")
    report = agents.resizes()[-1]
    assert report.get("steps_lost", 0) == steps_lost, f"{report}\n{agents.logs()}"
    assert report["is_emergency"] and report["seconds"]["snapshot"] > 0, report
    return report


def every_step_once(agents: Agents) -> None:
    steps = check_steps(agents.lines())
    assert steps == list(range(1, len(steps) + 1)), agents.logs()


def started(folder: Path, degrees: str, hosts: str = "a", **settings: Any) -> Any:
    """Return a job that will train on these hosts."""
    return tiny_agents(folder, degrees, nodes=f"1:{len(hosts)}", **settings)


def train(agents: Agents, hosts: str = "a", step: int = 16) -> None:
    for host in hosts:
        agents.start(host)
    agents.wait_until(lambda: len(agents.resizes()) == 1, "every rank has stepped")
    agents.wait_for_step(step)


def test_a_worker_that_is_killed_costs_no_step_where_another_has_its_state(tmp_path: Path) -> None:
    with started(tmp_path, REPLICAS, flags=("--max-restarts", "2")) as agents:
        train(agents)
        agents.kill_worker(1)
        report = went_on(agents)
        assert "was killed by SIGKILL" in report["reason"], report
        failure = report["failure"]
        assert (failure["host"], failure["rank"]) == ("a", 1), failure
        assert failure["kind"] == "killed by SIGKILL", failure
        agents.wait_for_step(report["step"] + 3)
        every_step_once(agents)


@pytest.mark.campaign
def test_a_job_without_restarts_ends_and_the_same_command_goes_on(tmp_path: Path) -> None:
    with started(tmp_path, REPLICAS) as agents:
        train(agents)
        agents.kill_worker(1)
        assert agents.exit_code("a") == 1, agents.logs()
        made = agents.lines()[-1]["step"]
        agents.start("a")
        agents.wait_for_step(made + 3)
        every_step_once(agents)


def test_a_host_that_dies_with_its_memory_costs_no_step_where_another_has_its_state(
    tmp_path: Path,
) -> None:
    with started(tmp_path, REPLICAS, "ab") as agents:
        train(agents, "ab")
        agents.kill("b", with_its_memory=True)
        report = went_on(agents)
        agents.wait_for_step(report["step"] + 3)
        every_step_once(agents)


def test_a_training_that_hangs_is_started_again_and_loses_no_step(tmp_path: Path) -> None:
    """A worker stands still, and the other waits for it in a collective."""
    settings = {"resize": "stall_s = 1\nhang_s = 3"}
    with started(tmp_path, REPLICAS, settings=settings, flags=("--max-restarts", "2")) as agents:
        train(agents)
        os.kill(agents.workers()[1], signal.SIGSTOP)
        report = went_on(agents)
        assert "hangs: no worker has made a step for" in report["reason"], report
        assert "behind are a: rank 1 (does not answer: state='T" in report["reason"], report
        assert "event=stack rank=0" in agents.text(), "it is said where they stand"
        agents.wait_for_step(report["step"] + 3)
        every_step_once(agents)


@pytest.mark.campaign
def test_a_script_that_raises_costs_no_step_though_nobody_else_has_its_state(
    tmp_path: Path,
) -> None:
    with started(tmp_path, SHARDS, flags=("--max-restarts", "2")) as agents:
        train(agents)
        (tmp_path / "raise-1").touch()
        report = went_on(agents)
        assert "rank 1: RuntimeError: raise-1 was wanted" in report["reason"], report
        assert report["failure"]["kind"] == "the script raised RuntimeError", report
        assert "event=failed round=1 kind='the script raised RuntimeError'" in agents.text()
        agents.wait_for_step(report["step"] + 3)
        every_step_once(agents)
        assert "Traceback" in agents.text(), "the script's own words are in the log"


@pytest.mark.campaign
def test_shards_of_two_steps_are_no_state(tmp_path: Path) -> None:
    """A rank fails between the last collective and its own update, which the other has made."""
    settings = {"store": "snapshot_every = 7"}
    flags = ("--max-restarts", "2")
    with started(tmp_path, SHARDS, settings=settings, flags=flags) as agents:
        train(agents)
        (tmp_path / "raise-late-1").touch()
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the job goes on")
        report = agents.resizes()[-1]
        assert report["step"] % 7 == 0 and 1 <= report["steps_lost"] <= 8, report
        assert agents.text().count("event=not_rescued step=") == 2, agents.logs()
        passed_over = report["recovery"]["others"]
        assert [each["origin"] for each in passed_over[:2]] == ["survivors"] * 2, report
        assert passed_over[0]["step"] == passed_over[1]["step"] + 1, report
        assert all(each["why"] for each in passed_over), report


@pytest.mark.turns
def test_a_worker_in_the_middle_of_an_update_is_not_believed(tmp_path: Path) -> None:
    with started(tmp_path, SHARDS, flags=("--max-restarts", "2")) as agents:
        train(agents)
        (tmp_path / "tear-0").touch()
        newest = agents.lines()[-1]["step"]
        agents.wait_until(lambda: agents.lines()[-1]["step"] > newest or True, "it stands")
        time.sleep(1.0)
        agents.kill_worker(1)
        agents.wait_until(lambda: "event=torn rank=0" in agents.text(), "it says so")
        (tmp_path / "tear-0").unlink()
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the job goes on")
        report = agents.resizes()[-1]
        assert report["steps_lost"] >= 15 and report["step"] == 0, report
        agents.wait_for_step(3)
        check_steps(agents.lines())


@pytest.mark.turns
def test_what_nobody_holds_any_more_is_lost_since_the_newest_generation(tmp_path: Path) -> None:
    settings = {"store": "snapshot_every = 7"}
    flags = ("--max-restarts", "2")
    with started(tmp_path, SHARDS, settings=settings, flags=flags) as agents:
        train(agents)
        agents.kill_worker(1)
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the job goes on")
        report = agents.resizes()[-1]
        assert report["step"] % 7 == 0 and report["step"] >= 7, report
        assert "event=not_rescued" in agents.text(), agents.logs()


@pytest.mark.campaign
def test_the_job_survives_one_failure_after_another(tmp_path: Path) -> None:
    flags = ("--max-restarts", "9")
    with started(tmp_path, REPLICAS, flags=flags) as agents:
        train(agents)
        for number in range(4):
            agents.wait_until(lambda: len(agents.workers()) == 2, "both workers live")
            agents.wait_for_all(2)
            agents.kill_worker(number % 2)
            report = went_on(agents)
            agents.wait_for_step(report["step"] + 3)
        every_step_once(agents)
