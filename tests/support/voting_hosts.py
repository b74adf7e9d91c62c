"""Three hosts on a network whose agents elect the coordinator of the tiny job."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.network_namespaces import NetworkAgents, NetworkHosts, network_agents

NAMES = "h1", "h2", "h3"


@contextmanager
def voting(folder: Path) -> Iterator[tuple[NetworkAgents, NetworkHosts]]:
    """Give agents that train on all three, once there is a vote; h1 has the coordinator."""
    degrees = '3 = "tp1"\n2 = "tp1"\n1 = "tp1"'
    with network_agents(folder, degrees, slots=1, nodes="1:3", names=NAMES) as (agents, hosts):
        for name in NAMES:
            agents.start(name)
        agents.wait_for_step(agents.wait_for_world(3) + 5, world=3)
        agents.wait_until(
            lambda: "event=lease kind=vote witnesses=h1,h2,h3" in agents.text(), "there is a vote"
        )
        yield agents, hosts


def coordinators(agents: NetworkAgents) -> int:
    """Return how many coordinators the job has had."""
    return agents.text().count("event=coordinator job=")
