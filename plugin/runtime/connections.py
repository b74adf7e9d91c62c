"""Connections between processes of a job, with proof of both sides: connecting and accepting.

A client without the token costs a server little.
"""

import contextlib
import errno
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable

from scalai.core.errors import AbsentError, PeerError, SilentError, UnprovenError, UsageError
from scalai.runtime.framing import FramedSocket, tune
from scalai.runtime.handshake import accept, offer

Address = str | tuple[str, int]
"""A path (Unix socket), or an interface and a port (TCP)."""

ANY_PORT = range(1)
"""The kernel's choice."""
BACKLOG = 4096
"""Connections kept by the kernel until they are accepted: all hosts of a job may come at once.
Bounded by ``net.core.somaxconn``."""
HANDSHAKE_S = 10.0
"""Longest proof of the token by a client."""
MAX_HANDSHAKES = 64
"""Most clients proving at once; the next ones wait in the kernel's queue."""
PATIENCE_S = 1.0
"""With this many, clients proving for longer are cut off."""
MAX_CONNECTIONS = 16_384
BACK_OFF_S = 0.1
LONGEST_PATH = 107
"""Bytes of a socket's path (unix(7): sun_path, with a zero behind it)."""
QUIET_S = 10.0
"""Least interval of log lines about strangers."""


def connect(address: Address, token: bytes, timeout_s: float, what: str = "peer") -> FramedSocket:
    """Connect and authenticate, within twice ``timeout_s`` seconds; ``what`` names the other side
    in errors.

    Raises:
        AbsentError: Nobody listens there.
        UnprovenError: The listener does not know the token, or is of another release
            (``VersionError``).
        SilentError: The listener, or the host itself, does not answer.
        PeerError: The host cannot be reached, or the connection breaks.
    """
    name = f"{what} {_text(address)}"
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
    framed = FramedSocket(connection, name, timeout_s)
    try:
        tune(connection)
        framed.expire_in(timeout_s)
        offer(framed, token)
        framed.expire_in(None)
    except BaseException:
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


log = logging.getLogger(__name__)


class Listener:
    """Accepts connections until it is closed, each served in a thread of its own.

    Faults of one connection, or of accepting (no file descriptors, no threads), are logged in one
    line and end nothing.

    Args:
        address: Address to listen on; port 0 for a free one.
        serve: Serves one connection and returns at its end.
        timeout_s: As of ``FramedSocket``, for the served connections.
        ports: Ports to choose a free one from.
        refused: Called with the name of a client without the token, or of another release, and
            the reason, in any thread.
    """

    def __init__(
        self,
        address: Address,
        token: bytes,
        serve: Callable[[FramedSocket], None],
        *,
        timeout_s: float | None = None,
        name: str = "messages",
        ports: range = ANY_PORT,
        refused: Callable[[str, str], object] = lambda client, why: None,
    ) -> None:
        self._token, self._serve, self._timeout_s = token, serve, timeout_s
        self._refused = refused
        self._path = address if isinstance(address, str) else None
        self._socket = _listen(address, ports)
        self._mutex = threading.Lock()
        self._closing = threading.Event()
        self._handshakes: dict[FramedSocket, float] = {}
        self._served: set[FramedSocket] = set()
        self._said_at: float | None = None
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    @property
    def address(self) -> Address:
        """Address it listens on, with its real port."""
        address = self._socket.getsockname()
        return address if isinstance(address, str) else (str(address[0]), int(address[1]))

    def close(self) -> None:
        """Stop listening and cut all connections; a second call does nothing."""
        with self._mutex:
            if self._closing.is_set():
                return
            self._closing.set()
            connections = [*self._handshakes, *self._served]
        # A blocked accept or recv returns on shutdown, not on close.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for framed in connections:
            framed.cut()
        self._socket.close()
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _accept(self) -> None:
        while not self._closing.is_set():
            if not self._has_room():
                self._closing.wait(BACK_OFF_S)
                continue
            try:
                self._begin(*self._socket.accept())
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread could be started
                if not self._closing.is_set():
                    self._say(f"connections cannot be accepted now: {error}")
                    self._cut(self._oldest(MAX_HANDSHAKES // 4, 0.0))
                    self._closing.wait(BACK_OFF_S)

    def _has_room(self) -> bool:
        with self._mutex:
            is_full = len(self._handshakes) >= MAX_HANDSHAKES
        return not is_full or self._cut(self._oldest(MAX_HANDSHAKES, PATIENCE_S))

    def _oldest(self, most: int, age_s: float) -> list[FramedSocket]:
        before = time.monotonic() - age_s
        with self._mutex:
            return [framed for framed, at in self._handshakes.items() if at <= before][:most]

    def _cut(self, strangers: list[FramedSocket]) -> bool:
        with self._mutex:
            strangers = [s for s in strangers if self._handshakes.pop(s, None) is not None]
        for framed in strangers:
            framed.cut()
        return bool(strangers)

    def _begin(self, connection: socket.socket, address: object) -> None:
        name = "peer" if self._path is not None else f"peer {_text(address)}"
        try:
            tune(connection)
            framed = FramedSocket(connection, name, self._timeout_s)
            with self._mutex:
                if self._closing.is_set() or len(self._served) >= MAX_CONNECTIONS:
                    raise OSError(f"{len(self._served)} connections are open")
                self._handshakes[framed] = time.monotonic()
            threading.Thread(target=self._talk, args=(framed,), daemon=True).start()
        except (OSError, RuntimeError):
            connection.close()
            raise

    def _talk(self, framed: FramedSocket) -> None:
        try:
            if self._is_authenticated(framed):
                self._serve(framed)
        except PeerError as error:
            log.debug("event=peer_gone %s", error)
        except Exception:
            log.exception("event=connection_failed peer=%s", framed.peer)
        finally:
            with self._mutex:
                self._handshakes.pop(framed, None)
                self._served.discard(framed)
            framed.close()

    def _is_authenticated(self, framed: FramedSocket) -> bool:
        try:
            framed.expire_in(HANDSHAKE_S)
            accept(framed, self._token)
            framed.expire_in(None)
        except PeerError as error:
            if not self._closing.is_set():
                self._say(f"a client is not served: {error}")
                if isinstance(error, UnprovenError):
                    self._refused(framed.peer, str(error))
            return False
        with self._mutex:
            if self._handshakes.pop(framed, None) is None or self._closing.is_set():
                return False  # it was cut off meanwhile
            self._served.add(framed)
        return True

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if self._said_at is None or now - self._said_at > QUIET_S:
            self._said_at = now
            log.warning("event=listener %s", text)


def listen_at(
    host: str, port: int, ports: range = ANY_PORT, backlog: int = BACKLOG
) -> socket.socket:
    """Return a listening socket at an address of this host; for port 0 at a free one of ``ports``.

    Raises:
        OSError: The address is not of this host, or no such port is free.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    # Not from the first one: another process of this address may choose at the same moment.
    for one in [port] if port else random.sample(ports, len(ports)):
        try:
            return socket.create_server((host, one), family=family, backlog=backlog)
        except OSError as error:
            if port or ports == ANY_PORT or error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE, f"all of --port-range {ports.start}-{ports.stop - 1} are in use; widen it"
    )


def _listen(address: Address, ports: range) -> socket.socket:
    """Return a listening socket.

    Raises:
        PeerError: The address is not of this host, or in use.
        UsageError: A path is too long for a socket.
    """
    if isinstance(address, str) and len(os.fsencode(address)) > LONGEST_PATH:
        raise UsageError(
            f"the socket {address} has {len(os.fsencode(address))} bytes in its path; the kernel "
            f"takes {LONGEST_PATH}. Use a shorter --store-dir, or shorter names of job and host."
        )
    try:
        if isinstance(address, str):
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(address)
                listener.listen(BACKLOG)
            except OSError:
                listener.close()
                raise
            return listener
        return listen_at(*address, ports)
    except OSError as error:
        raise PeerError(
            f"cannot listen on {_text(address)} ({error}). Name a free address of this host."
        ) from error


def _text(address: object) -> str:
    if not isinstance(address, tuple):
        return str(address)
    host, port = address[:2]  # an accepted one of IPv6 has four parts
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
