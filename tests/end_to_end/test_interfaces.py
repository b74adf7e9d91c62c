"""Two hosts on a network: the workers of a job meet over the interface that leads to the
coordinator, whatever the hosts' names stand for."""

import socket
from pathlib import Path

import pytest

from support.agents import tiny_agents
from support.network_namespaces import NetworkHosts, network_agents
from support.tiny_job import check_steps

pytestmark = pytest.mark.fault

obstacle = NetworkHosts.obstacle()


@pytest.mark.turns
@pytest.mark.skipif(obstacle is not None, reason=str(obstacle))
def test_a_host_joins_over_the_network_without_any_interface_being_named(tmp_path: Path) -> None:
    settings = {"resize": "standby = 'never'"}
    with network_agents(
        tmp_path, '2 = "tp2"\n1 = "tp1"', slots=1, settings=settings
    ) as (agents, hosts):  # fmt: skip
        agents.start("h1")
        agents.wait_for_step(5, world=1)
        agents.start("h2")
        joined = agents.wait_for_world(2)
        agents.wait_for_step(joined + 10, world=2)
        for name in ("h1", "h2"):
            log = (tmp_path / f"{name}.log").read_text()
            assert f"GLOO_SOCKET_IFNAME={hosts.devices[name]}" in log
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1))


def free_ipv6_port() -> int | None:
    """Return a port of the loopback address, None where this machine has no IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            return int(probe.getsockname()[1])
    except OSError:
        return None


@pytest.mark.campaign
def test_a_job_whose_endpoint_is_an_ipv6_address_trains(tmp_path: Path) -> None:
    port = free_ipv6_port()
    if port is None:
        pytest.skip("this machine has no IPv6")
    flags = ("--rdzv-endpoint", f"[::1]:{port}")
    token = {"SCALAI_JOB_TOKEN": "0123456789abcdef0123456789abcdef"}
    settings = {"resize": "standby = 'never'"}
    with tiny_agents(
        tmp_path, '2 = "tp2"\n1 = "tp1"', slots=1, settings=settings, flags=flags,
        environment=token,
    ) as agents:  # fmt: skip
        agents.start("a")
        agents.wait_for_step(5, world=1)
        agents.start("b")
        joined = agents.wait_for_world(2)
        agents.wait_for_step(joined + 5, world=2)
        steps = check_steps(agents.lines())
        assert steps == list(range(1, len(steps) + 1))
