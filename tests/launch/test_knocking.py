"""Hosts find out which others they reach."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scalai.launch.agent import network
from scalai.launch.agent.network import knock, unheard
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
