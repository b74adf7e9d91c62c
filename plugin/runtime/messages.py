"""Authenticated messages between the processes of a job: JSON over sockets, never a pickle.

The connection and the mutual challenge are those of the standard library's
``multiprocessing.connection``.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client as connect
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from scalai.core.errors import PeerError, ScalaiError

Address = str | tuple[str, int]
Json = Any
MAX_MESSAGE_BYTES = 1 << 30


class Channel:
    """A client's connection: one call at a time, each answered before the next.

    Raises ``PeerError`` when nobody listens, the token is wrong, the peer is gone or it answers
    with an error.
    """

    def __init__(self, address: Address, token: bytes) -> None:
        self._lock = threading.Lock()
        self._name = str(address)
        try:
            self._connection = connect(address, authkey=token)
        except AuthenticationError as error:
            raise PeerError(
                f"{address} refuses this job's token. Give all agents of a job the same token."
            ) from error
        except OSError as error:
            raise PeerError(f"nobody answers at {address}: {error}.") from error

    def call(self, method: str, **arguments: Json) -> Json:
        """Send one request and wait for its answer."""
        request = json.dumps({"method": method, "arguments": arguments}).encode()
        try:
            with self._lock:
                self._connection.send_bytes(request)
                answer = json.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError) as error:
            raise PeerError(f"{self._name} went away during {method!r}.") from error
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self._connection.close()


class Peer:
    """A server's end of one connection, for the handler to keep state under and to name in its
    log."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.name: str | None = None

    def requests(self) -> Iterator[tuple[str, Mapping[str, Json]]]:
        """Yield requests until the peer goes away."""
        while True:
            try:
                request = json.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
            except (EOFError, OSError):
                return
            yield request["method"], request["arguments"]

    def answer(self, message: Mapping[str, Json]) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError:
            return  # the peer is gone; ``requests`` ends at the next read


class Server:
    """Answers calls, each connection in its own thread.

    ``handle(peer, method, arguments)`` returns the answer; a ``ScalaiError`` that it raises is sent
    to the caller.
    ``gone(peer)`` is told when a connection ends, however it ends.
    """

    def __init__(
        self,
        address: Address,
        token: bytes,
        handle: Callable[[Peer, str, Mapping[str, Json]], Json],
        gone: Callable[[Peer], None] = lambda peer: None,
    ) -> None:
        self._listener = Listener(address, backlog=128)
        self._token = token
        self._handle = handle
        self._gone = gone
        self._thread = threading.Thread(target=self._accept, name="messages", daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        address = self._listener.address
        return address if isinstance(address, str) else (str(address[0]), int(address[1]))

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            # The challenge runs in the connection's thread: a silent client must not block the
            # others.
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._token)
            answer_challenge(connection, self._token)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return
        peer = Peer(connection)
        try:
            for method, arguments in peer.requests():
                try:
                    peer.answer({"result": self._handle(peer, method, arguments)})
                except ScalaiError as error:
                    peer.answer({"error": str(error)})
        finally:
            connection.close()
            self._gone(peer)


def free_port(host: str) -> int:
    """Return a port of this interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
