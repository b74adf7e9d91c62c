"""Connecting to a process of the job, with proof of who both sides are."""

import socket

from scalai.core.errors import AbsentError, PeerError, SilentError
from scalai.runtime.framing import FramedSocket, tune
from scalai.runtime.handshake import offer

Address = str | tuple[str, int]
"""A path (Unix socket), or an interface and a port (TCP)."""


def connect(address: Address, token: bytes, timeout_s: float, what: str = "peer") -> FramedSocket:
    """Connect and authenticate, within twice ``timeout_s``.

    Args:
        address: Where to.
        token: The secret that the other side knows too.
        timeout_s: How long connecting may take, and proving.
        what: What is there, for errors.

    Raises:
        AbsentError: Nobody listens there.
        UnprovenError: Someone does who does not know the token, or is of another release
            (``VersionError``).
        SilentError: Who listens there, or the host itself, does not answer.
        PeerError: The host cannot be reached, or the connection breaks.
    """
    name = f"{what} {address if isinstance(address, str) else f'{address[0]}:{address[1]}'}"
    try:
        connection = _connected(address, timeout_s)
    except TimeoutError as error:
        raise SilentError(f"{name} did not answer for {timeout_s:g} s. Is it alive?") from error
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise AbsentError(
            f"{name} cannot be reached: nobody answers there ({error}). Is it alive?"
        ) from error
    except OSError as error:
        raise PeerError(f"{name} cannot be reached ({error}). Is its host alive?") from error
    tune(connection)
    framed = FramedSocket(connection, name, timeout_s)
    try:
        framed.expire_in(timeout_s)
        offer(framed, token)
        framed.expire_in(None)
    except PeerError:
        framed.close()
        raise
    return framed


def _connected(address: Address, timeout_s: float) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
