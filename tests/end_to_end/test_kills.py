"""Workers, agents and hosts die at every place of a resize: what was deposited is not lost.

Two hosts with two workers each hold replicas of each other's state. A change of degrees is asked
for, and somebody is killed on the way.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Agents, tiny_agents
from tiny_job import check_steps

FLAGS = ("--max-restarts", "100")
PLACES = ("deposit", "commit", "relaunch", "plan", "move", "restore")
WITHIN_A_RESIZE = ("drain", *PLACES, "deposited", "seal", "sealed", "committed", "leave", "moved")


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    """Give two hosts, a and b, that train with TP 2 and DP 2."""
    with tiny_agents(tmp_path, '4 = "tp2"\n2 = "tp1"\n1 = "tp1"', flags=FLAGS) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_for_step(3, world=4)
        yield agents


def change_degrees(agents: Agents) -> int:
    """Ask for TP 1 where TP is 2, and the other way round. Returns the TP that will be."""
    tp = 3 - agents.lines()[-1]["tp"]
    agents.scale(degrees=f"tp{tp}")
    return int(tp)


def steps_lost(agents: Agents) -> list[int]:
    return [report.get("steps_lost", 0) for report in agents.resizes()]


@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_worker_may_die_at_any_place_of_a_resize(agents: Agents, rank: str) -> None:
    for place in PLACES:
        agents.arm(place, rank)
        changes = len(agents.resizes())
        tp = change_degrees(agents)
        agents.wait_for_death()
        agents.wait_until(lambda: agents.lines()[-1]["tp"] == tp, f"TP {tp} after {place}")  # noqa: B023
        agents.wait_until(lambda: len(agents.resizes()) > changes, "the report")  # noqa: B023
        assert not any(steps_lost(agents)), f"{place}: {steps_lost(agents)}\n{agents.logs()}"
    check_steps(agents.lines())


def agent_dies(agents: Agents, place: str, host: str, *, with_its_memory: bool) -> None:
    """Kill an agent at a place of a resize; the other host goes on; the agent comes back."""
    agents.wait_for_world(4)
    agents.wait_until(lambda: len(agents.lines()) > 5, "some steps")
    agents.arm(place, host)
    change_degrees(agents)
    agents.wait_for_death()
    agents.exit_code(host)
    if with_its_memory:
        agents.remove_store(host)
    agents.wait_for_world(2)
    agents.wait_until(lambda: not agents.workers(host), f"no worker of {host} trains on alone")
    assert not any(steps_lost(agents)), f"{place}: {steps_lost(agents)}\n{agents.logs()}"
    agents.start(host)
    agents.wait_for_world(4)


@pytest.mark.parametrize("place", ["deposit", "commit", "move"])
def test_a_host_may_die_with_its_memory_in_a_resize(agents: Agents, place: str) -> None:
    """The first host too: the coordinator is another process."""
    agent_dies(agents, place, "a" if place == "commit" else "b", with_its_memory=True)
    check_steps(agents.lines())


@pytest.mark.campaign
@pytest.mark.parametrize("with_its_memory", [True, False])
@pytest.mark.parametrize("host", ["a", "b"])
def test_hosts_may_die_at_every_place(agents: Agents, host: str, with_its_memory: bool) -> None:
    for place in WITHIN_A_RESIZE:
        if place != "moved":  # nothing is fetched between hosts that both hold everything
            agent_dies(agents, place, host, with_its_memory=with_its_memory)
    check_steps(agents.lines())
    agents.wait_until(
        lambda: all(len(agents.generations(name)) == 2 for name in "ab"),
        "each host holds one generation and the files of the next deposit",
    )
