"""A host runs workers while its health check passes; the others train on without it."""

from pathlib import Path

import pytest

from support.agents import tiny_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

DEGREES = '4 = "tp1"\n2 = "tp1"'


@pytest.mark.campaign
def test_a_host_whose_check_fails_behind_a_failure_stays_idle_until_it_passes(
    tmp_path: Path,
) -> None:
    good = tmp_path / "good"
    good.touch()
    with tiny_agents(tmp_path, DEGREES, nodes="1:2") as agents:
        agents.start("a")
        agents.wait_for_step(2)
        agents.start("b", "--health-check", f"test -e {good}")
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 4, "both hosts run workers")
        good.unlink()
        agents.kill_worker(3)
        agents.wait_until(lambda: "b fails its health check" in agents.text(), "it is said")
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 2, "the others train on")
        good.touch()
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 4, "it is asked again")
        agents.wait_until(lambda: sum(agents.resizes()[-1]["workers"].values()) == 4, "the report")
        last = agents.resizes()[-1]
        assert "failure" not in last and "steps_lost" not in last, "that was the change before"
        assert "may run workers" in last["reason"], last
        check_steps(agents.lines())
