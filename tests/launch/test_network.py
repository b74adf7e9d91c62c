"""The network around a host: its interface towards the coordinator, and the hosts it reaches."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scalai.core.errors import UsageError
from scalai.launch.agent import network
from scalai.launch.agent.network import (
    address_towards,
    interface_environment,
    interface_of,
    knock,
    unheard,
)
from support.network_namespaces import NetworkHosts
from support.ports import free_port

pytestmark = pytest.mark.fault

obstacle = NetworkHosts.obstacle()


def test_who_takes_a_connection_is_heard_however_busy_its_agent_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "PAUSE_S", 0.01)
    monkeypatch.setattr(network, "AT_ONCE", 2)
    with socket.create_server(("127.0.0.1", 0)) as busy:  # nobody accepts
        there, gone = busy.getsockname(), ("127.0.0.1", free_port("127.0.0.1"))
        peers = (("a", there), ("b", gone), ("c", there), ("d", gone), ("e", there))
        assert knock(peers) == ("b", "d")
        nameless = ("n", ("no..name", 1))
        assert unheard((nameless, *peers)) == ("b", "d", "n")
    assert knock(()) == ()


def test_where_it_cannot_be_found_out_nobody_counts_as_unheard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(peers: object) -> tuple[str, ...]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(network, "knock", full)
    assert unheard((("a", ("127.0.0.1", 1)),)) == ()


@pytest.mark.skipif(obstacle is not None, reason=str(obstacle))
def test_a_pair_that_loses_what_it_sends_each_other_is_found_by_both_sides(tmp_path: Path) -> None:
    """On a network; the third host hears both."""
    listen = (
        "import socket, sys; s = socket.create_server((sys.argv[1], 9)); print(flush=True);"
        "sys.stdin.read()"
    )
    ask = (
        "import sys; from scalai.launch.agent import network; network.KNOCK_S = 2.0;"
        "names = sys.argv[1::2]; places = [(a, 9) for a in sys.argv[2::2]];"
        "print(*network.knock(tuple(zip(names, places))))"
    )
    with NetworkHosts(("h1", "h2", "h3")) as hosts:
        servers = [
            subprocess.Popen(
                hosts.on(name, [sys.executable, "-c", listen, address]),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for name, address in hosts.addresses.items()
        ]  # fmt: skip
        try:
            for server in servers:
                assert server.stdout is not None and server.stdout.readline()
            hosts.sever("h2", "h3")
            found = {}
            for name in hosts.addresses:
                words = [w for n, a in hosts.addresses.items() if n != name for w in (n, a)]
                asked = hosts.on(name, [sys.executable, "-c", ask, *words])
                found[name] = subprocess.check_output(asked, text=True, timeout=120).split()
            assert found == {"h1": [], "h2": ["h3"], "h3": ["h2"]}
        finally:
            for server in servers:
                server.communicate(timeout=60)


def test_the_way_to_this_machine_is_the_loopback_interface() -> None:
    assert address_towards(("127.0.0.1", 29400)) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"


def test_what_the_user_has_named_stays() -> None:
    given = {"NCCL_SOCKET_IFNAME": "ib0"}
    assert interface_environment("127.0.0.1", given) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
    }


def test_nccl_is_told_the_whole_name_and_not_a_beginning_of_names() -> None:
    assert interface_environment("127.0.0.1", {})["NCCL_SOCKET_IFNAME"] == "=lo"


def test_an_address_of_no_interface_names_none() -> None:
    assert interface_environment("203.0.113.9", {}) == {}


def test_a_coordinator_that_cannot_be_found_is_named() -> None:
    with pytest.raises(UsageError, match=r"no way to the coordinator no-such-host\.invalid:1"):
        address_towards(("no-such-host.invalid", 1))
