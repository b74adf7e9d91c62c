"""Hosts drain and join while a job trains: it goes on as if nothing had happened."""

from pathlib import Path

import pytest

from support.agents import tiny_agents
from support.tiny_job import check_steps

DEGREES = '4 = "tp2"\n2 = "tp1"\n"2->4" = "tp4"\n3 = "tp3"\n1 = "tp1"'


@pytest.mark.campaign
def test_a_person_may_forbid_it(tmp_path: Path) -> None:
    settings = {"resize": 'standby = "never"'}
    with tiny_agents(tmp_path, DEGREES, nodes="1", settings=settings) as agents:
        agents.start("a")
        agents.wait_for_all(2)
        agents.scale(nproc=1)
        agents.wait_for_world(1)
        assert "event=build" not in agents.text()
        check_steps(agents.lines())


@pytest.mark.campaign
def test_the_job_follows_the_number_of_devices_that_work(tmp_path: Path) -> None:
    devices = tmp_path / "devices"
    devices.write_text("2")
    settings = {"probe": "interval_s = 0.2"}
    flags = ("--probe", f"file:{devices}")
    with tiny_agents(tmp_path, DEGREES, nodes="1", settings=settings, flags=flags) as agents:
        agents.start("a")
        agents.wait_for_all(2)
        for count in (1, 2, 1):
            devices.write_text(str(count))
            agents.wait_for_all(count)
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1)), "each step is made once"
        assert [report.get("steps_lost", 0) for report in agents.resizes()] in ([0] * 3, [0] * 4)
