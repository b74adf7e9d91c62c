"""What only one host has written is kept by another: a host may be lost with its memory, and the
job goes on from its newest generation.

Each worker of the tiny job has a shard that no other has.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from support.agents import Agents, tiny_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

SHARDS = '3 = "tp3"\n2 = "tp2"\n1 = "tp1"'
EVERY_7 = {"store": "snapshot_every = 7"}


def hosts_abc(folder: Path, **given: Any) -> Any:
    return tiny_agents(folder, SHARDS, nodes="1:3", slots=1, **given)


def train(agents: Agents, step: int = 16, hosts: str = "abc") -> None:
    """Begin with these hosts, each of which holds a shard of its own."""
    for host in hosts:
        agents.start(host)
    agents.wait_until(lambda: len(workers(agents)) == len(hosts), f"{hosts} train")
    agents.wait_for_step(step)


def workers(agents: Agents) -> dict[str, int]:
    """Return how many workers each host of the last change has."""
    reports = agents.resizes()
    return {h: n for h, n in reports[-1]["workers"].items() if n} if reports else {}


def replicated_bytes(agents: Agents, count: int = 1) -> int:
    """Return how many bytes have crossed for replicas, once they were made so many times."""
    pattern = r"event=replicated generation=\d+ bytes=(\d+)"
    agents.wait_until(lambda: len(re.findall(pattern, agents.text())) >= count, "replicas are made")
    return sum(int(size) for size in re.findall(pattern, agents.text())[:count])


@pytest.mark.turns
@pytest.mark.parametrize("lost", ["a", pytest.param("c", marks=pytest.mark.campaign)])
def test_a_host_with_shards_of_its_own_may_be_lost_with_its_memory(
    tmp_path: Path, lost: str
) -> None:
    with hosts_abc(tmp_path, settings=EVERY_7) as agents:
        train(agents, 1)
        replicated_bytes(agents, 3)
        agents.kill(lost, with_its_memory=True)
        agents.wait_until(lambda: len(workers(agents)) == 2, "the others go on")
        report = agents.resizes()[-1]
        assert lost not in workers(agents)
        assert report["step"] > 0 and report["step"] % 7 == 0, report
        chosen, others = report["recovery"]["state"], report["recovery"]["others"]
        assert chosen["origin"] == "snapshot" and chosen["lost"] == [lost], report
        assert chosen["generation"] == report["generation"], report
        assert [each["origin"] for each in others][:1] == ["survivors"], "they hold two shards of 3"
        agents.wait_for_step(report["step"] + 15)
        check_steps(agents.lines())


@pytest.mark.campaign
def test_one_host_after_the_other_may_be_lost(tmp_path: Path) -> None:
    """What a host kept for others is made anew on those that are left."""
    with hosts_abc(tmp_path, settings=EVERY_7) as agents:
        train(agents)
        for lost, left in (("c", "ab"), ("b", "a")):
            made = agents.text().count("event=replicated")
            replicated_bytes(agents, made + 1)
            agents.kill(lost, with_its_memory=True)
            agents.wait_until(lambda left=left: {*workers(agents)} == {*left}, f"{left} go on")
            agents.wait_for_step(agents.resizes()[-1]["step"] + 8)
        check_steps(agents.lines())


@pytest.mark.campaign
@pytest.mark.turns
def test_hosts_of_one_rack_may_be_lost_together(tmp_path: Path) -> None:
    with hosts_abc(tmp_path, settings=EVERY_7) as agents:
        for host, rack in (("a", "rack=1"), ("b", "rack=2"), ("c", "rack=2")):
            agents.start(host, "--domain", rack)
        agents.wait_until(lambda: len(workers(agents)) == 3, "all train")
        replicated_bytes(agents, agents.text().count("event=replicated") + 2)
        agents.kill("b", with_its_memory=True)
        agents.kill("c", with_its_memory=True)
        agents.wait_until(lambda: {*workers(agents)} == {"a"}, "the other rack goes on")
        agents.wait_for_step(agents.resizes()[-1]["step"] + 8)
        check_steps(agents.lines())


@pytest.mark.campaign
@pytest.mark.turns
def test_without_room_for_replicas_the_training_goes_on_and_says_so(tmp_path: Path) -> None:
    # Two snapshots of 528 bytes and a manifest of 1,315 fit, but no 160 bytes of others beside.
    with hosts_abc(tmp_path, flags=("--store-budget-gb", "0.00000245")) as agents:
        train(agents)
        agents.wait_until(lambda: "event=no_replica" in agents.text(), "it is said")
        for host in "abc":
            assert f"event=store_memory host={host} needed_bytes=" in agents.text()
        newest = agents.lines()[-1]["step"]
        agents.wait_for_step(newest + 10)
        check_steps(agents.lines())
