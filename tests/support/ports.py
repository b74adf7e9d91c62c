"""Ports that nobody listens on."""

import socket


def free_port(host: str) -> int:
    """Return a port of this interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
