"""Hosts that join fetch the state batch by batch, and their workers restore each while the next
ones come. Whatever dies meanwhile, the old state stays whole, and each step is made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agents import Agents, tiny_agents
from support.tiny_job import BALLAST

pytestmark = pytest.mark.fault

BATCHES = 4
STATE_BYTES = 4 * BALLAST * BATCHES
"""Least bytes that a joining host fetches."""


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Two hosts, a and b, that train on a rank each; both hold the whole state."""
    degrees = '3 = "tp1"\n2 = "tp1"\n1 = "tp1"'
    again = {"resize.quarantine_s": 0.0}
    with tiny_agents(
        tmp_path, degrees, slots=1, nodes="1:3", flags=("--max-restarts", "100"), constants=again,
        more=("--ballast", str(BATCHES)),
    ) as agents:  # fmt: skip
        agents.start("a")
        agents.wait_for_all(1)
        agents.start("b")
        agents.wait_for_all(2)
        yield agents
        agents.check_each_once()
        assert not any(report.get("steps_lost") for report in agents.resizes()), agents.logs()


def joins(agents: Agents, place: str, victim: str) -> None:
    """Let host c join, and a process die on the way."""
    agents.arm(place, victim)
    agents.start("c")
    agents.wait_for_death()


def test_a_worker_dies_between_two_batches_and_the_next_one_restores_them(agents: Agents) -> None:
    joins(agents, "batch", "2")
    agents.wait_for_all(3)
    (moved,) = [line for line in agents.text().splitlines() if "event=moved" in line][-1:]
    report = agents.resizes()[-1]
    assert report["bytes_remote"] + report["bytes_local"] >= 3 * STATE_BYTES, (moved, report)


def test_a_host_dies_that_gives_and_the_rest_comes_from_another(agents: Agents) -> None:
    joins(agents, "give", "b")
    agents.exit_code("b")
    agents.wait_for_world(2)
    agents.wait_until(lambda: bool(agents.workers("c")), "c trains in its place")
    agents.start("b")
    agents.wait_for_all(3)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("place", "victim"), [("rest", "2"), ("batch", "c"), ("moved", "c"), ("give", "a")]
)
def test_whatever_dies_while_batches_come_costs_no_step(
    agents: Agents, place: str, victim: str
) -> None:
    joins(agents, place, victim)
    if victim.isalpha():
        agents.exit_code(victim)
        agents.wait_for_world(2)
        agents.start(victim)
    agents.wait_for_all(3)
