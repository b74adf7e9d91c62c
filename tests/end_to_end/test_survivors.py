"""Workers that outlive a failure write the state that stands between two updates: the job goes on
from the step at which it failed, and from its newest generation only where nobody holds the state.

The tiny job computes, waits for all others as a training does for the norm of the gradients, and
then updates its state.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.agents import Agents, one_worker, tiny_agents
from support.tiny_job import check_steps

REPLICAS = '4 = "tp1"\n2 = "tp1"\n1 = "tp1"'
SHARDS = '2 = "tp2"'
FLAGS = ("--max-restarts", "100")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """Give one host with two workers that hold a shard each and make a snapshot every seven steps.
    Each test leaves them training."""
    settings = {"store": "snapshot_every = 7"}
    folder = tmp_path_factory.mktemp("shards")
    with tiny_agents(folder, SHARDS, nodes="1", settings=settings, flags=FLAGS) as agents:
        agents.start("a")
        yield agents


def train(agents: Agents, steps: int = 16) -> int:
    """Wait until so many steps more are made since every rank has stepped. Returns the number of
    changes so far."""
    agents.wait_until(lambda: bool(agents.resizes()), "every rank has stepped")
    agents.wait_for_step(max(agents.lines()[-1]["step"], agents.resizes()[-1]["step"]) + steps)
    return len(agents.resizes())


def went_on(agents: Agents, changes: int) -> dict[str, Any]:
    """Wait until the job goes on behind a failure. Returns the report."""
    agents.wait_until(lambda: len(agents.resizes()) > changes, "the job goes on")
    report = agents.resizes()[-1]
    agents.wait_for_step(report["step"] + 3)
    check_steps(agents.lines())
    return report


def went_on_without_loss(agents: Agents, changes: int, made: int) -> dict[str, Any]:
    """Likewise, from the step at which it failed: of ``made`` lines on each step is there once."""
    report = went_on(agents, changes)
    assert report.get("steps_lost", 0) == 0, f"{report}\n{agents.logs()}"
    assert report["is_emergency"] and report["seconds"]["snapshot"] > 0, report
    steps = check_steps(agents.lines())[made - 1 :]
    assert steps == list(range(steps[0], steps[-1] + 1)), agents.logs()
    return report


@contextlib.contextmanager
def replicas(folder: Path, **settings: Any) -> Iterator[Agents]:
    """Give one host with two workers that hold the same state."""
    with tiny_agents(folder, REPLICAS, nodes="1", **settings) as agents:
        agents.start("a")
        train(agents)
        yield agents


@pytest.mark.fault
def test_a_script_that_raises_costs_no_step_though_nobody_else_has_its_state(
    shards: Agents,
) -> None:
    changes, made = train(shards), len(shards.lines())
    (shards.folder / "raise-1").touch()
    report = went_on_without_loss(shards, changes, made)
    assert "rank 1: RuntimeError: raise-1 was wanted" in report["reason"], report
    assert report["failure"]["kind"] == "the script raised RuntimeError", report
    assert "kind='the script raised RuntimeError'" in shards.text()
    assert "Traceback" in shards.text(), "the script's own words are in the log"


@pytest.mark.fault
@pytest.mark.campaign
def test_shards_of_two_steps_are_no_state(shards: Agents) -> None:
    """A rank fails between the last collective and its own update, which the other has made."""
    changes, unrescued = train(shards), shards.text().count("event=not_rescued step=")
    (shards.folder / "raise-late-1").touch()
    report = went_on(shards, changes)
    assert report["step"] % 7 == 0 and 1 <= report["steps_lost"] <= 8, report
    assert shards.text().count("event=not_rescued step=") == unrescued + 2, shards.logs()
    passed_over = report["recovery"]["others"]
    assert [each["origin"] for each in passed_over[:2]] == ["survivors"] * 2, report
    assert passed_over[0]["step"] == passed_over[1]["step"] + 1, report
    assert all(each["why"] for each in passed_over), report


@pytest.mark.fault
def test_a_worker_in_the_middle_of_an_update_is_not_believed(shards: Agents) -> None:
    changes, torn = train(shards), shards.text().count("event=torn rank=0")
    (shards.folder / "tear-0").touch()
    shards.wait_until(lambda: (shards.folder / "tear-0.held").exists(), "it stands in its update")
    os.kill(shards.workers()[1], signal.SIGKILL)
    shards.wait_until(lambda: shards.text().count("event=torn rank=0") > torn, "it says so")
    (shards.folder / "tear-0").unlink()
    report = went_on(shards, changes)
    assert report["step"] % 7 == 0 and report["steps_lost"] >= 1, report


@pytest.mark.fault
@pytest.mark.campaign
@pytest.mark.turns
def test_a_state_that_nobody_holds_is_lost_since_the_newest_generation(shards: Agents) -> None:
    changes = train(shards)
    os.kill(shards.workers()[1], signal.SIGKILL)
    report = went_on(shards, changes)
    assert report["step"] % 7 == 0 and 1 <= report["steps_lost"] <= 14, report
    assert "event=not_rescued" in shards.text(), shards.logs()


@pytest.mark.fault
def test_a_training_that_hangs_is_started_again_and_loses_no_step(tmp_path: Path) -> None:
    """A worker stands still, and the other waits for it in a collective."""
    given: dict[str, Any] = {
        "settings": {"resize": "hang_s = 3"},
        "constants": {"resize.stall_s": 1.0},
    }
    with replicas(tmp_path, **given, flags=("--max-restarts", "2")) as agents:
        changes, made = len(agents.resizes()), len(agents.lines())
        os.kill(agents.workers()[1], signal.SIGSTOP)
        report = went_on_without_loss(agents, changes, made)
        assert "hangs: no worker has made a step for" in report["reason"], report
        assert "behind are a: rank 1 (does not answer: state='T" in report["reason"], report
        assert "event=stack rank=0" in agents.text(), "it is said where they stand"


@pytest.mark.campaign
def test_a_job_without_restarts_ends_and_the_same_command_goes_on(tmp_path: Path) -> None:
    with replicas(tmp_path) as agents:
        agents.kill_worker(1)
        assert agents.exit_code("a") == 1, agents.logs()
        made = agents.lines()[-1]["step"]
        agents.start("a")
        agents.wait_for_step(made + 3)
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), agents.logs()


@pytest.mark.campaign
def test_a_replica_on_the_same_host_writes_for_a_worker_that_dies(tmp_path: Path) -> None:
    with tiny_agents(tmp_path, '3 = "tp1"\n2 = "tp1"', slots=3, nodes="1", flags=FLAGS) as agents:
        agents.start("a")
        agents.wait_for_step(3, world=3)
        agents.arm("written", "1")
        agents.scale(nproc=2)
        agents.wait_for_death()
        agents.wait_for_world(2)
        check_steps(agents.lines())
        assert not any(report.get("steps_lost") for report in agents.resizes()), agents.logs()


@pytest.mark.fault
@pytest.mark.campaign
def test_an_agent_that_comes_back_brings_what_it_had_sealed(tmp_path: Path) -> None:
    """Its worker's pieces are nowhere else: the job waits for them, and loses no step."""
    with tiny_agents(tmp_path, '4 = "tp4"\n3 = "tp3"', nodes="2", flags=FLAGS) as agents:
        agents.start("a")
        agents.start("b")
        world = 4
        for place in ("commit", "sealed", "committed"):
            agents.wait_for_all(world)
            agents.arm(place, "b")
            changes = len(agents.resizes())
            world = 7 - world
            agents.scale(nproc=world)
            agents.wait_for_death()
            agents.exit_code("b")
            agents.start("b")
            agents.wait_for_world(world)
            agents.wait_until(lambda: len(agents.resizes()) > changes, "the report")  # noqa: B023
            assert not any(report.get("steps_lost") for report in agents.resizes()), (
                f"{place}: {agents.logs()}"
            )
        steps = check_steps(agents.lines())
        assert steps == sorted(set(steps)), "no step was made twice"


@pytest.mark.turns
def test_no_worker_outlives_its_agent_and_a_new_agent_finds_the_state(tmp_path: Path) -> None:
    with one_worker(tmp_path, settings={"store": "snapshot_every = 5"}) as agents:
        agents.start("a")
        agents.wait_for_step(12)
        agents.kill("a")
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")
        made = agents.lines()[-1]["step"]
        agents.start("a")
        agents.wait_for_step(made + 1)
        steps = check_steps(agents.lines())
        again = [step for step in steps if steps.count(step) > 1]
        assert min(again, default=made) > 5 and len(again) <= 2 * 10, steps


def test_a_second_signal_stops_now_and_the_state_stays(tmp_path: Path) -> None:
    # A step is long enough for the second signal to come before the stop of the first.
    with one_worker(tmp_path, step_s=6.0) as agents:
        agents.start("a")
        agents.wait_until(lambda: "event=started" in agents.text(), "the first step")
        agents.drain("a")
        agents.wait_until(lambda: "event=leaving" in agents.text(), "the first signal is heard")
        agents.drain("a")
        assert agents.exit_code("a", deadline_s=15) == 128 + 15, agents.logs()
        agents.wait_until(lambda: not agents.family(), "nothing of the job is left")
        assert "generation-1" in agents.generations("a")


@pytest.mark.campaign
def test_workers_that_hang_while_they_build_are_given_up(tmp_path: Path) -> None:
    given = {"resize.build_timeout_s": 10.0}
    with tiny_agents(tmp_path, '2 = "tp2"\n1 = "tp1"', nodes="1", constants=given) as agents:
        agents.start("a")
        agents.wait_until(lambda: "event=warm" in agents.text(), "workers can be forked")
        agents.arm("build", "0", "SIGSTOP")
        agents.scale(nproc=1)
        agents.wait_for_death()
        agents.wait_for_world(1)
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), "each step is made once"
        assert "not built within 10 s" in agents.text()
        agents.wait_until(lambda: len(agents.workers()) == 1, "nothing else is left")
