"""Three hosts elect their coordinator, and one of them stays: the others drain, die or stand still
at one moment. The job goes on there, and no step is lost."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.network_namespaces import NetworkAgents, NetworkHosts
from support.tiny_job import check_steps
from support.voting_hosts import coordinators, voting

obstacle = NetworkHosts.obstacle()
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(obstacle is not None, reason=str(obstacle)),
]
HEARD_STEPS = 150
"""Behind so many steps all agents have learned who the witnesses are."""


def goes_on_alone(agents: NetworkAgents, drained: Sequence[str]) -> None:
    assert {agents.exit_code(host) for host in drained} == {0}
    agents.wait_for_step(agents.wait_for_world(1) + 20, world=1)
    steps = check_steps(agents.lines())
    assert steps == list(range(1, steps[-1] + 1)), "no step was lost"


@pytest.mark.turns
@pytest.mark.parametrize(
    ("drained", "apart_s"), [(("h1", "h2"), 0.0), (("h2", "h1"), 1.0), (("h2", "h3"), 0.0)]
)
def test_two_of_three_drain(tmp_path: Path, drained: tuple[str, str], apart_s: float) -> None:
    """Two machines outvote nobody: the coordinator stays where it is, as its log says, also where
    that host has drained, whose agent says what comes of it."""
    with voting(tmp_path) as (agents, _):
        agents.drain(drained[0])
        time.sleep(apart_s)
        agents.drain(drained[1])
        goes_on_alone(agents, drained)
        assert coordinators(agents) == 1
        assert ("keep it up until the job has ended" in agents.text()) == ("h1" in drained)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("dies", "drained", "terms"), [("h3", "h2", 1), ("h3", "h1", 1), ("h1", "h2", 2)]
)
def test_one_drains_while_another_one_dies(
    tmp_path: Path, dies: str, drained: str, terms: int
) -> None:
    with voting(tmp_path) as (agents, hosts):
        agents.wait_for_step(agents.lines()[-1]["step"] + HEARD_STEPS, world=3)
        hosts.cut_off(dies)
        hosts.kill(dies)
        agents.drain(drained)
        goes_on_alone(agents, [drained])
        assert coordinators(agents) == terms


def test_the_coordinators_host_stands_still_while_another_one_drains(tmp_path: Path) -> None:
    """The one that stays has the next coordinator, and the one that stood still comes back to
    it."""
    with voting(tmp_path) as (agents, hosts):
        agents.wait_for_step(agents.lines()[-1]["step"] + HEARD_STEPS, world=3)
        hosts.send("h1", signal.SIGSTOP)
        agents.drain("h2")
        goes_on_alone(agents, ["h2"])
        assert "event=coordinator job=tiny term=2 address=192.0.2.3" in agents.text()
        hosts.send("h1", signal.SIGCONT)
        agents.wait_for_step(agents.wait_for_world(2) + 5, world=2)
        assert coordinators(agents) == 2 and "event=stood_down" in agents.text()
