"""Ports that nobody listens on."""

import random
import socket
from pathlib import Path

LOWEST = 10_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The kernel gives these to connections by itself, of every process of the machine."""


def free_port(host: str) -> int:
    """Return a port of this interface that nobody has, and that the kernel gives to nobody.

    Raises:
        OSError: This machine has no such interface, or every port that was tried is taken.
    """
    ephemeral = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32_768
    drawn = random.SystemRandom()  # two processes of tests do not draw the same
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    refused = OSError(f"no port of {host} was tried")
    for port in drawn.sample(range(LOWEST, ephemeral), 100):
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                refused = error
            else:
                return port
    raise refused
