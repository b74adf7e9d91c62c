"""Authenticated calls between the processes of a job: JSON over sockets, never a pickle."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scalai.core.errors import AnswerError, PeerError, ScalaiError, SilentError
from scalai.runtime.framing import Address, FramedSocket, connect
from scalai.runtime.listening import Listener

__all__ = ["Address", "Channel", "Peer", "Server", "free_port"]

Json = Any

CONNECT_S = 4.0
"""How long whoever listens may take to take a call."""
CALL_S = 15.0
"""How long an answer may take, where the caller says nothing else."""

log = logging.getLogger(__name__)


class Channel:
    """A client's connection: one call at a time, each answered before the next.

    Args:
        address: Where a ``Server`` listens.
        token: The secret that it knows.
        call_s: How long a call may take; None: as long as the connection lives.
        connect_s: How long the server may take to take the connection, and to prove itself.

    Raises:
        AbsentError: Nobody listens there, or the token is wrong.
        SilentError: Nobody answers in time.
        AnswerError: The answer is an error.
        PeerError: The peer is gone. After this or a silence the channel is of no use any more.
    """

    def __init__(
        self,
        address: Address,
        token: bytes,
        *,
        call_s: float | None = CALL_S,
        connect_s: float = CONNECT_S,
    ) -> None:
        self._lock = threading.Lock()
        self.call_s = call_s
        self._framed = connect(address, token, connect_s, "the process at")
        self._framed.timeout_s = None

    def call(self, method: str, **arguments: Json) -> Json:
        """Send one request and wait for its answer."""
        try:
            with self._lock:
                self._framed.expire_in(self.call_s)
                self._framed.send_json({"method": method, "arguments": arguments})
                answer = self._framed.recv_json()
        except SilentError as error:
            self.close()  # the answer may still come, and is not that of the next call
            raise SilentError(f"{error} (It was asked to {method!r}.)") from error
        except PeerError as error:
            raise PeerError(f"{self._framed.peer} went away during {method!r}: {error}") from error
        if "error" in answer:
            raise AnswerError(str(answer["error"]), str(answer.get("kind")))
        return answer["result"]

    def close(self) -> None:
        """End the connection; a call under way ends with an error."""
        self._framed.cut()
        self._framed.close()


class Peer:
    """A server's end of one connection, for the handler to keep state under and to name in its
    log."""

    def __init__(self, framed: FramedSocket, send_s: float | None) -> None:
        self._framed, self._send_s = framed, send_s
        self.name: str | None = None

    def requests(self) -> Iterator[tuple[str, Mapping[str, Json]]]:
        """Yield requests until the peer goes away, or sends what is none."""
        while True:
            self._framed.expire_in(None)
            request = self._framed.recv_json()
            method, arguments = request.get("method"), request.get("arguments")
            if not isinstance(method, str) or not isinstance(arguments, dict):
                log.warning("event=no_request %s sent %.200s", self._framed.peer, request)
                return
            yield method, arguments

    def answer(self, message: Mapping[str, Json]) -> None:
        """Send the answer of the latest request."""
        self._framed.expire_in(self._send_s)
        self._framed.send_json(message)


class Server:
    """Answers calls, each connection in its own thread.

    Args:
        address: Where to listen; port 0 for a free one.
        token: Who does not know it is not answered.
        handle: ``handle(peer, method, arguments)`` returns the answer; an error that it raises is
            sent to the caller, and one that is no ``ScalaiError`` is logged as well.
        gone: ``gone(peer)`` is told when a connection ends, however it ends.
        send_s: How long a peer may take to read an answer; None: as long as it lives.
    """

    def __init__(
        self,
        address: Address,
        token: bytes,
        handle: Callable[[Peer, str, Mapping[str, Json]], Json],
        gone: Callable[[Peer], None] = lambda peer: None,
        *,
        send_s: float | None = None,
    ) -> None:
        self._handle, self._gone, self._send_s = handle, gone, send_s
        self._listener = Listener(address, token, self._serve)

    @property
    def address(self) -> Address:
        return self._listener.address

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._listener.close()

    def _serve(self, framed: FramedSocket) -> None:
        peer = Peer(framed, self._send_s)
        try:
            for method, arguments in peer.requests():
                peer.answer(self._answer(peer, method, arguments))
        finally:
            self._gone(peer)

    def _answer(self, peer: Peer, method: str, arguments: Mapping[str, Json]) -> Json:
        try:
            return {"result": self._handle(peer, method, arguments)}
        except ScalaiError as error:
            return {"error": str(error), "kind": type(error).__name__}
        except Exception as error:
            log.exception("event=call_failed method=%s", method)
            text = f"{method!r} failed: {error!r}. The log of the process that was asked says more."
            return {"error": text, "kind": type(error).__name__}


def free_port(host: str) -> int:
    """Return a port of this interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
