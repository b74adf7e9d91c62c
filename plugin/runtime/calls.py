"""Typed calls between the processes of a job: a request is a frozen dataclass naming its answer's
type (``Request``).
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from typing import Any, TypeVar, cast, get_args

from scalai.core.errors import AnswerError, MessageError, PeerError, ScalaiError, SilentError
from scalai.core.messages.shared import Named, Request
from scalai.runtime.codec import decode, encode
from scalai.runtime.connections import ANY_PORT, Address, Listener, connect
from scalai.runtime.framing import FramedSocket

__all__ = ["Address", "Channel", "Peer", "Server"]

Answer = TypeVar("Answer")

CONNECT_S = 4.0
"""Longest acceptance of a call by a listener, in seconds."""
CALL_S = 15.0
"""Longest answer by default, in seconds."""
_ANSWERED, _FAILED = b"\0", b"\1"
"""First byte of an answer."""

log = logging.getLogger(__name__)


class Channel:
    """A client's connection: one call at a time, each answered before the next.

    Args:
        call_s: Longest call, in seconds; None: no limit.
        connect_s: Longest connecting and proving, in seconds.

    Raises:
        AbsentError: Nobody listens there.
        UnprovenError: The listener has not proven its knowledge of the token.
        SilentError: Nobody answers in time.
        AnswerError: The answer is an error.
        MessageError: The request cannot be sent, or the answer is none: a retry would end alike.
        PeerError: The peer is gone. After this or a silence the channel is useless.
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

    def call(self, request: Request[Answer]) -> Answer:
        """Send one request and wait for its answer."""
        name, content = type(request).__name__, encode(Named(request))
        try:
            with self._lock:
                self._framed.expire_in(self.call_s)
                self._framed.send(content)
                answer = self._framed.receive()
        except SilentError as error:
            self.close()  # the late answer must not be taken for the next call's
            raise SilentError(f"{error} (It was asked to {name}.)") from error
        except MessageError:
            raise  # nothing was sent
        except PeerError as error:
            raise PeerError(f"{self._framed.peer} went away during {name}: {error}") from error
        if answer[:1] == _ANSWERED:
            return cast(Answer, decode(answer[1:], _answer_type(cast(Hashable, type(request)))))
        kind, text = decode(answer[1:], tuple[str, str])
        raise AnswerError(text, kind)

    def close(self) -> None:
        """End the connection; a call under way ends with an error."""
        self._framed.cut()
        self._framed.close()


@cache
def _answer_type(kind: Any) -> Any:
    base: Any = next(b for b in kind.__orig_bases__ if b.__origin__ is Request)
    (answer,) = get_args(base)
    return answer


class Peer:
    """A server's end of one connection: a key for the handler's state, with a name for its log."""

    def __init__(self, framed: FramedSocket, send_s: float | None) -> None:
        self._framed, self._send_s = framed, send_s
        self.name: str | None = None
        self._is_in_hand = False
        self._answered_at = time.monotonic()

    def requests(self) -> Iterator[bytes]:
        """Yield unread requests until the peer goes away."""
        while True:
            self._framed.expire_in(None)
            content = self._framed.receive()
            self._is_in_hand = True
            yield content

    def answer(self, content: bytes) -> None:
        """Send the answer of the latest request."""
        self._framed.expire_in(self._send_s)
        self._answered_at, self._is_in_hand = time.monotonic(), False  # not reading is silence
        self._framed.send(content)
        self._answered_at = time.monotonic()

    def silence_s(self) -> float:
        """Return the seconds since its last answered call; 0 while it waits for this process.

        This process may not have read its bytes yet. Callable from any thread.
        """
        if self._is_in_hand or self._framed.has_unread():
            return 0.0
        return time.monotonic() - max(self._answered_at, self._framed.heard_at)


class Server:
    """Answers calls, each connection in its own thread.

    Args:
        address: Address to listen on; port 0 for a free one.
        requests: Union of the answered kinds of requests.
        handle: ``handle(peer, request)`` returns the answer, of the request's type; its errors are
            sent to the caller, and logged too unless they are ``ScalaiError``.
        gone: ``gone(peer)`` is called at the end of each connection.
        send_s: Longest reading of an answer by a peer, in seconds; None: no limit.
        ports, refused: As of ``Listener``.
    """

    def __init__(
        self,
        address: Address,
        token: bytes,
        requests: Any,
        handle: Callable[[Peer, Any], object],
        gone: Callable[[Peer], None] = lambda peer: None,
        *,
        send_s: float | None = None,
        ports: range = ANY_PORT,
        refused: Callable[[str, str], object] = lambda client, why: None,
    ) -> None:
        self._requests = Named[requests]
        self._handle, self._gone, self._send_s = handle, gone, send_s
        self._listener = Listener(address, token, self._serve, ports=ports, refused=refused)

    @property
    def address(self) -> Address:
        return self._listener.address

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._listener.close()

    def _serve(self, framed: FramedSocket) -> None:
        peer = Peer(framed, self._send_s)
        try:
            for data in peer.requests():
                try:
                    peer.answer(self._answer(peer, data))
                except MessageError as error:  # the answer is too long; nothing was sent
                    peer.answer(_failure(error))
        finally:
            self._gone(peer)

    def _answer(self, peer: Peer, data: bytes) -> bytes:
        name = "a request"
        try:
            request = decode(data, self._requests).message
            name = type(request).__name__
            return _ANSWERED + encode(self._handle(peer, request))
        except ScalaiError as error:
            return _failure(error)
        except Exception as error:
            log.exception("event=call_failed request=%s", name)
            return _failure(
                error, f"{name} failed: {error!r}. The log of the process that was asked says more."
            )


def _failure(error: Exception, text: str | None = None) -> bytes:
    return _FAILED + encode((type(error).__name__, text or str(error)))
