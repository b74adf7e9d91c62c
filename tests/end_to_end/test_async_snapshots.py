"""Whole jobs whose snapshots are written while they train: the state that they go on from is that
of one step, whoever dies, hangs or stops in the middle of a copy. The tiny job changes every number
of its state with every step."""

import re
from pathlib import Path
from typing import Any

import pytest

from support.agents import Agents, tiny_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

SHARDS, REPLICAS = '2 = "tp2"\n1 = "tp1"', '2 = "tp1"\n1 = "tp1"'
RESTARTS = ("--max-restarts", "2")


def snapshots(agents: Agents) -> list[str]:
    """Return the lines of the log about snapshots that were committed on the way."""
    return [line for line in agents.logs().splitlines() if "event=snapshot committed=" in line]


def test_a_job_goes_on_from_a_snapshot_that_was_written_beside_its_training(
    tmp_path: Path,
) -> None:
    settings = {"store": "snapshot_every = 3\nemergency = false"}
    flags = RESTARTS
    with tiny_agents(tmp_path, SHARDS, nodes="1", settings=settings, flags=flags) as agents:
        agents.start("a")
        agents.wait_until(lambda: len(snapshots(agents)) > 3, "snapshots are made")
        agents.kill_worker(1)
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the job goes on")
        report = agents.resizes()[-1]
        assert report["step"] >= 3 and report["step"] % 3 == 0, report
        agents.wait_for_step(report["step"] + 3)
        check_steps(agents.lines())
        assert "event=no_async_snapshot" not in agents.logs(), agents.logs()
        assert "stall_s=" in snapshots(agents)[-1] and "copy_s=" in snapshots(agents)[-1]


@pytest.mark.turns
def test_a_job_that_chooses_how_often_learns_it_and_keeps_it_through_a_failure(
    tmp_path: Path,
) -> None:
    """It fails so often, as is assumed, that snapshots are as near as they may be: 10 s."""
    store = 'snapshot_every = "auto"\nemergency = false'
    given: dict[str, Any] = {
        "settings": {"store": store, "resize": "silent_s = 3"},
        "constants": {"store.mtbf_hours_per_worker": 0.001}, "flags": RESTARTS,
    }  # fmt: skip
    with tiny_agents(tmp_path, SHARDS, nodes="1", **given) as agents:

        def found(pattern: str) -> list[list[int]]:
            return [[int(n) for n in each.groups()] for each in re.finditer(pattern, agents.text())]

        def made(least: int) -> list[int]:
            steps = found(r"event=snapshot committed=\d+ step=(\d+)")
            return [step for (step,) in steps if step >= least]

        agents.start("a")
        agents.wait_until(lambda: bool(found(r"event=spaced .*begin=(\d+)")), "workers are told")
        assert made(1)[0] == 50 and "event=snapshot_every k=50 is assumed" in agents.text()
        begin, every = found(r"event=spaced .*begin=(\d+) every=(\d+)")[0]
        assert every > 75, agents.logs()
        agents.wait_until(lambda: bool(made(begin)), "a snapshot is made where it was told")
        agents.kill_worker(1)
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the job goes on")
        step = agents.resizes()[-1]["step"]
        assert step >= begin and (step - begin) % every == 0, agents.logs()
        agents.wait_until(lambda: bool(made(step + 1)), "and makes snapshots as it has learned")
        ((last,),) = found(r"event=snapshot_every k=(\d+) cost_s=")[-1:]
        assert made(step + 1)[0] % last == 0, agents.logs()
        check_steps(agents.lines())


@pytest.mark.campaign
def test_a_stop_that_comes_while_a_snapshot_is_written_loses_no_step(tmp_path: Path) -> None:
    """With one of every step there is always one under way."""
    settings = {"store": "snapshot_every = 1"}
    with tiny_agents(tmp_path, SHARDS, nodes="1", settings=settings) as agents:
        agents.start("a")
        agents.wait_for_step(5)
        for nproc in (1, 2):
            agents.scale(nproc=nproc)
            agents.wait_for_world(nproc)
            made = agents.lines()[-1]["step"]
            agents.wait_for_step(made + 3)
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), agents.logs()


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("place", ["copying", "written"])
def test_a_worker_that_dies_or_hangs_while_it_writes_costs_no_step(
    place: str, signal: str, tmp_path: Path
) -> None:
    """The other one gives its copy up, and writes the same state at once."""
    settings = {"store": "snapshot_every = 5", "resize": "hang_s = 3"}
    given: dict[str, Any] = {
        "settings": settings,
        "constants": {"resize.stall_s": 1.0},
        "flags": RESTARTS,
    }
    with tiny_agents(tmp_path, REPLICAS, nodes="1", **given) as agents:
        agents.start("a")
        agents.wait_for_step(3)
        agents.arm(place, "1", signal)
        agents.wait_for_death()
        agents.wait_until(lambda: len(agents.resizes()) == 2, "the job goes on")
        report = agents.resizes()[-1]
        assert report.get("steps_lost", 0) == 0, f"{report}\n{agents.logs()}"
        agents.wait_for_step(report["step"] + 6)
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), agents.logs()
