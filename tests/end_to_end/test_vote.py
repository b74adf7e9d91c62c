"""Three hosts on a network and no lease outside of the job: the two that are left elect the next
coordinator, and one that is cut off is no coordinator any more."""

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


def since(agents: NetworkAgents, word: str) -> str:
    """Return the time of the first line with a word."""
    return min(line[:23] for line in agents.text().splitlines() if word in line)


def test_the_others_elect_a_coordinator_where_its_host_dies_and_no_step_is_lost(
    tmp_path: Path,
) -> None:
    with voting(tmp_path) as (agents, hosts):
        agents.wait_for_step(agents.lines()[-1]["step"] + 600, world=3)  # all have learned of it
        hosts.cut_off("h1")
        hosts.kill("h1")
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 2, "h2 and h3 go on")
        agents.wait_for_step(agents.lines()[-1]["step"] + 5, world=2)
        steps = check_steps(agents.lines())
        assert steps == list(range(1, steps[-1] + 1)), "no step was lost"
        assert coordinators(agents) == 2
        hosts.cut_off("h1", is_cut=False)
        agents.start("h1")  # the same command line: it starts one, which learns that it is late
        agents.wait_for_step(agents.wait_for_world(3) + 3, world=3)
        steps = check_steps(agents.lines())
        assert steps == list(range(1, steps[-1] + 1))


def test_a_coordinator_that_is_cut_off_stands_down_before_another_one_is_elected(
    tmp_path: Path,
) -> None:
    with voting(tmp_path) as (agents, hosts):
        agents.wait_for_step(agents.lines()[-1]["step"] + 600, world=3)
        hosts.cut_off("h1")
        agents.wait_until(lambda: "event=adopted" in agents.text(), "another one is elected")
        assert since(agents, "event=stood_down") < since(
            agents, "event=coordinator job=tiny term=2"
        )
        assert "Not heard, or refusing: h2 at 192.0.2.2" in agents.text()
        agents.wait_until(lambda: "event=waiting_for_majority" in agents.text(), "h1 waits")
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 2, "h2 and h3 go on")
        agents.wait_for_step(agents.lines()[-1]["step"] + 5, world=2)
        hosts.cut_off("h1", is_cut=False)
        agents.wait_for_step(agents.wait_for_world(3) + 3, world=3)
        assert coordinators(agents) == 2, "h1 has started no other one"
