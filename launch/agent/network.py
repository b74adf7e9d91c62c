"""The network around this host: its interface towards the coordinator, for gloo and NCCL, and the
hosts with reachable data planes.

By default gloo and NCCL use the address of the host's name, often a loopback, or any active
interface; other hosts may be unable to connect.
"""

import array
import fcntl
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from scalai.core.errors import UsageError
from scalai.launch.config.endpoint import join_endpoint

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables of gloo, NCCL and TensorPipe for their interface."""

_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40
"""``struct ifreq`` on 64-bit Linux: the name in 16 bytes, then a socket address."""
_MOST_ADDRESSES = 4096
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def address_towards(peer: tuple[str, int]) -> str:
    """Return this host's source address for packets to ``peer``. Sends nothing.

    Raises:
        UsageError: The name is unknown, or there is no route.
    """
    host, port = peer
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"this host finds no way to the coordinator {join_endpoint(host, port)}: {error}. Name "
            "this host's own address by --local-addr."
        ) from error


def interface_of(address: str) -> str | None:
    """Return the name of this host's interface with an address, by name or number; None: there is
    none."""
    try:
        numbers = {str(found[4][0]) for found in socket.getaddrinfo(address, None)}
    except socket.gaierror:
        return None
    return next((name for name, has in _addresses() if has in numbers), None)


def interface_environment(address: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the interface of ``address``, without those in ``given``; empty: no
    interface has it."""
    name = interface_of(address)
    if name is None:
        return {}
    # NCCL takes a name as a prefix (eth1: eth1, eth10) unless it begins with "=".
    exact = {"NCCL_SOCKET_IFNAME": f"={name}"}
    return {variable: exact.get(variable, name) for variable in VARIABLES if variable not in given}


def _addresses() -> Iterator[tuple[str, str]]:
    yield from _ipv4_addresses()
    if _IPV6_ADDRESSES.exists():
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            number, *_, name = line.split()
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))


def _ipv4_addresses() -> Iterator[tuple[str, str]]:
    entries = array.array("B", bytes(_ENTRY_BYTES * _MOST_ADDRESSES))
    request = struct.pack("iP", len(entries), entries.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request)
    size_bytes = struct.unpack("iP", answer)[0]
    for at in range(0, size_bytes, _ENTRY_BYTES):
        entry = entries[at : at + _ENTRY_BYTES].tobytes()
        label = os.fsdecode(entry[:16].split(b"\0", 1)[0])
        # A labelled address, such as eth0:1, is on eth0.
        yield label.partition(":")[0], socket.inet_ntoa(entry[20:24])


TRIES = 3
"""One lost packet is no broken link."""
KNOCK_S, PAUSE_S = 5.0, 1.0
"""Seconds for the others in each try, and between tries."""
AT_ONCE = 256

Address = tuple[str, int]
Peers = tuple[tuple[str, Address], ...]

log = logging.getLogger(__name__)


def unheard(peers: Peers) -> tuple[str, ...]:
    """Return the hosts without an answer to ``knock``; none if the system has no descriptors."""
    try:
        return knock(peers)
    except (OSError, RuntimeError) as error:
        log.warning("event=not_knocked %s", error)
        return ()


def knock(peers: Peers) -> tuple[str, ...]:
    """Return the hosts without a connection in ``TRIES`` tries.

    The kernel accepts connections even for a busy agent; a firewall that refuses them would refuse
    the workers' too.
    """
    left = dict(peers)
    for number in range(TRIES):
        if number:
            time.sleep(PAUSE_S)
        waiting = list(left.items())
        for begin in range(0, len(waiting), AT_ONCE):
            for host in _taken(dict(waiting[begin : begin + AT_ONCE])):
                del left[host]
        if not left:
            break
    return tuple(sorted(left))


def _taken(peers: Mapping[str, Address]) -> list[str]:
    with ExitStack() as closing:
        poll, waiting, taken = select.poll(), dict[int, str](), list[str]()
        for host, (name, port) in peers.items():
            try:
                found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:  # its name does not resolve; others may
                log.warning("event=not_resolved host=%s name=%s: %s", host, name, error)
                continue
            family, kind, *_, address = found[0]
            line = closing.enter_context(socket.socket(family, kind))
            line.setblocking(False)
            line.connect_ex(address)
            waiting[line.fileno()] = host
            poll.register(line, select.POLLOUT)
        deadline = time.monotonic() + KNOCK_S
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, event in poll.poll(1000 * left_s):
                poll.unregister(descriptor)
                host = waiting.pop(descriptor)
                if event & select.POLLOUT and not event & (select.POLLERR | select.POLLHUP):
                    taken.append(host)
    return taken
