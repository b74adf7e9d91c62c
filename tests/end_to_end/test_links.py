"""Three hosts on a network, of which two do not hear each other."""

from pathlib import Path

import pytest

from support.network_namespaces import NetworkHosts, network_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

obstacle = NetworkHosts.obstacle()
NAMES = ("h1", "h2", "h3")


@pytest.mark.campaign
@pytest.mark.skipif(obstacle is not None, reason=str(obstacle))
def test_a_broken_link_between_two_hosts_costs_no_step_and_its_repair_brings_both_back(
    tmp_path: Path,
) -> None:
    settings = {"store": "snapshot_every = 50", "resize": "hang_s = 20"}
    with network_agents(
        tmp_path, '3 = "tp1"\n2 = "tp1"\n1 = "tp1"', slots=1, nodes="1:3", names=NAMES,
        step_s=0.1, settings=settings, constants={"resize.stall_s": 10.0},
        flags=("--max-restarts", "2"),
    ) as (agents, hosts):  # fmt: skip
        for name in NAMES:
            agents.start(name)
        began = agents.wait_for_world(3)
        agents.wait_for_step(began + 20, world=3)
        hosts.sever("h2", "h3")
        cut = agents.wait_for_world(2)
        agents.wait_for_step(cut + 20, world=2)
        assert "event=unheard h2 and h3 do not hear each other" in agents.text()
        hosts.sever("h2", "h3", is_cut=False)
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 3, "both take part again")
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1))
