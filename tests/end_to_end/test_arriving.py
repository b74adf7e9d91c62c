"""Hosts that join fetch the state batch by batch, and their workers restore each while the next
ones come. Whatever dies meanwhile, the old state stays whole, and each step is made once."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agents import Agents, tiny_agents

pytestmark = pytest.mark.fault

TENSORS = 4
"""Of 16 MiB each: a batch has one or two."""


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Two hosts, a and b, that train on a rank each; both hold the whole state."""
    degrees = '3 = "tp1"\n2 = "tp1"\n1 = "tp1"'
    again = {"resize.quarantine_s": 0.0}
    with tiny_agents(
        tmp_path, degrees, slots=1, nodes="1:3", flags=("--max-restarts", "100"), constants=again,
        more=("--ballast", str(TENSORS)),
    ) as agents:  # fmt: skip
        agents.start("a")
        agents.start("b")
        agents.wait_for_all(2)
        yield agents
        agents.check_each_once()
        assert not any(report.get("steps_lost") for report in agents.resizes()), agents.logs()


def joins(agents: Agents, place: str, victim: str, signal_name: str = "SIGKILL") -> None:
    """Let host c join, and an agent die or hang on the way."""
    agents.arm(place, victim, signal_name)
    agents.start("c")
    agents.wait_for_death()


def test_a_worker_dies_between_two_batches_and_the_next_one_restores_them(agents: Agents) -> None:
    joins(agents, "batch", "c", "SIGSTOP")  # its worker has restored one, and waits
    (worker,) = agents.workers("c")
    os.kill(worker, signal.SIGKILL)
    os.kill(agents.agent_pid("c"), signal.SIGCONT)
    agents.wait_for_all(3)
    assert "event=failed" in agents.text(), "the round with this worker has ended"


def test_a_host_dies_that_gives_and_the_rest_comes_from_another(agents: Agents) -> None:
    joins(agents, "give", "b")
    agents.exit_code("b")
    agents.wait_until(lambda: bool(agents.workers("c")), "c trains in its place")
    agents.wait_for_all(2)
    agents.start("b")
    agents.wait_for_all(3)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("place", "victim"), [("rest", "c"), ("batch", "c"), ("moved", "c"), ("give", "a")]
)
def test_whatever_dies_while_batches_come_costs_no_step(
    agents: Agents, place: str, victim: str
) -> None:
    joins(agents, place, victim)
    agents.exit_code(victim)
    agents.wait_for_all(2)
    agents.start(victim)
    agents.wait_for_all(3)
