"""Hosts on a network and a register that both reach: where the coordinator's host dies, the other
one takes its place, and one that loses a host and cannot renew is no coordinator any more."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.network_namespaces import NetworkAgents, NetworkHosts, network_agents
from support.tiny_job import check_steps

obstacle = NetworkHosts.obstacle()
pytestmark = [
    pytest.mark.fault,
    pytest.mark.campaign,
    pytest.mark.skipif(obstacle is not None, reason=str(obstacle)),
]


@contextmanager
def leased(
    folder: Path, flag: str = "--coordinator-lease"
) -> Iterator[tuple[NetworkAgents, NetworkHosts]]:
    root = str(folder / "leases")
    flags = (flag, root if flag == "--durable-dir" else f"file:{root}")
    degrees = '2 = "tp1"\n1 = "tp1"'
    with network_agents(folder, degrees, slots=1, flags=flags) as (agents, hosts):
        agents.start("h1")
        agents.wait_for_step(3, world=1)
        agents.start("h2")
        agents.wait_for_step(agents.wait_for_world(2) + 5, world=2)
        yield agents, hosts


@pytest.mark.turns
@pytest.mark.parametrize("is_heard", [True, False])
def test_the_other_host_takes_over_and_no_step_is_lost(tmp_path: Path, is_heard: bool) -> None:
    with leased(tmp_path, "--durable-dir") as (agents, hosts):
        if not is_heard:
            hosts.set_link("h1", up=False)
        hosts.kill("h1")
        agents.wait_until(lambda: agents.lines()[-1]["world"] == 1, "h2 goes on")
        agents.wait_for_step(agents.lines()[-1]["step"] + 5, world=1)
        steps = check_steps(agents.lines())
        # The host that died may have made this one without having written its line.
        (rescued,) = re.findall(r"event=rescued committed=\d+ step=(\d+)", agents.text())
        made = {*steps, int(rescued)}
        assert made == set(range(1, steps[-1] + 1)), "no step was lost"
        assert len(steps) == len(set(steps)), "none was made twice"
        hosts.set_link("h1", up=True)
        agents.start("h1")  # the same command line, which names itself as the coordinator's host
        agents.wait_for_step(agents.wait_for_world(2) + 3, world=2)
        assert agents.text().count("event=coordinator job=") == 2, "h1 has started no other one"


def test_a_register_that_cannot_be_reached_takes_nobodys_place(tmp_path: Path) -> None:
    with leased(tmp_path) as (agents, _):
        (tmp_path / "leases").rename(tmp_path / "away")
        (tmp_path / "leases").write_text("no folder")
        agents.wait_until(lambda: "event=lease_hangs" in agents.text(), "it is said")
        step = agents.lines()[-1]["step"]
        agents.wait_for_step(step + 20, world=2)
        (tmp_path / "leases").unlink()
        (tmp_path / "away").rename(tmp_path / "leases")
        agents.wait_for_step(agents.lines()[-1]["step"] + 5, world=2)
        assert agents.text().count("event=coordinator job=") == 1


def test_a_coordinator_that_loses_a_host_and_the_register_ends_and_is_followed(
    tmp_path: Path,
) -> None:
    """It cannot know whether that host is the next coordinator's by now."""
    with leased(tmp_path) as (agents, hosts):
        (tmp_path / "leases").rename(tmp_path / "away")
        (tmp_path / "leases").write_text("no folder")
        agents.wait_until(lambda: "event=lease_hangs" in agents.text(), "it is said")
        hosts.kill("h2")
        agents.wait_until(lambda: "event=stood_down" in agents.text(), "it stands down")
        (tmp_path / "leases").unlink()
        (tmp_path / "away").rename(tmp_path / "leases")
        followed = "event=coordinator job=tiny term=2"
        agents.wait_until(lambda: followed in agents.text(), "another one follows")
        agents.wait_for_step(agents.lines()[-1]["step"] + 5, world=1)
        steps = check_steps(agents.lines())
        assert len(steps) == len(set(steps)), "no step was made twice"
