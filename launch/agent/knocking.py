"""Finds the hosts with reachable data planes, beside the agent's loop."""

import logging
import select
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack

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
