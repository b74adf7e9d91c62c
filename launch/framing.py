"""Authenticated sockets that carry frames: length-prefixed bytes or JSON, never a pickle.

Both sides prove that they know the job's token by the standard library's HMAC challenge
(``multiprocessing.connection``, Python 3.11), of which nothing else is used.
"""

import json
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any, cast

from scalai.core.errors import PeerError

Json = Any

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")


class FramedSocket:
    """A connected socket with frames. Not for two threads at once. ``peer`` is a name for
    errors."""

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.peer = peer
        self.timeout_s = timeout_s

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def __enter__(self) -> "FramedSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send_bytes(self, data: bytes) -> None:
        """Send one frame."""
        self.send_parts(_LENGTH.pack(len(data)), memoryview(data))

    def recv_bytes(self, maxlength: int = MAX_FRAME_BYTES) -> bytes:
        """Receive one frame of at most ``maxlength`` bytes."""
        head = bytearray(_LENGTH.size)
        self.recv_into(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > maxlength:
            raise PeerError(
                f"{self.peer} announces a message of {length} bytes; at most {maxlength} are "
                "expected. Is something else listening on that port?"
            )
        data = bytearray(length)
        self.recv_into(memoryview(data))
        return bytes(data)

    def send_json(self, message: Json) -> None:
        """Send a message as one frame."""
        self.send_bytes(json.dumps(message, separators=(",", ":")).encode())

    def recv_json(self) -> dict[str, Json]:
        """Receive a message: a JSON object in one frame."""
        try:
            message = json.loads(self.recv_bytes())
        except ValueError as error:
            raise PeerError(
                f"{self.peer} sent no JSON ({error}). Do the versions differ?"
            ) from error
        if not isinstance(message, dict):
            raise PeerError(f"{self.peer} sent a {type(message).__name__}, not a JSON object.")
        return message

    def send_parts(self, head: bytes, data: memoryview) -> None:
        """Send ``head`` and ``data`` behind each other, in one system call where they fit."""
        try:
            sent = self.socket.sendmsg((head, data))
            if sent < len(head):
                self.socket.sendall(head[sent:])
            self.socket.sendall(data[max(sent - len(head), 0) :])
        except OSError as error:
            raise self._lost(error) from error

    def recv_into(self, view: memoryview) -> None:
        """Fill ``view`` (bytes)."""
        while view:
            try:
                count = self.socket.recv_into(view)
            except OSError as error:
                raise self._lost(error) from error
            if count == 0:
                raise PeerError(
                    f"{self.peer} closed the connection. Its log says why, if it lives."
                )
            view = view[count:]

    def _lost(self, error: OSError) -> PeerError:
        if isinstance(error, TimeoutError):
            return PeerError(f"{self.peer} was silent for {self.timeout_s:g} s. Is its host alive?")
        return PeerError(f"the connection to {self.peer} broke ({error}). Is its host alive?")


def authenticate(framed: FramedSocket, token: bytes, *, is_server: bool) -> None:
    """Prove to each other that both sides know ``token``. The server asks first.

    So a stranger cannot have the server answer challenges that it took from elsewhere.

    Raises:
        PeerError: The other side's token is another one, or it speaks something else.
    """
    # Typed for its own Connection class; it uses send_bytes and recv_bytes alone.
    connection = cast(Any, framed)
    try:
        if is_server:
            deliver_challenge(connection, token)
            answer_challenge(connection, token)
        else:
            answer_challenge(connection, token)
            deliver_challenge(connection, token)
    except (AuthenticationError, AssertionError, ValueError) as error:
        raise PeerError(
            f"{framed.peer} does not have this job's token. Is it an agent of another job?"
        ) from error


def connect(
    address: tuple[str, int], token: bytes, timeout_s: float, what: str = "peer"
) -> FramedSocket:
    """Connect and authenticate. Raises ``PeerError``, at the latest after a few ``timeout_s``."""
    peer = f"{what} {address[0]}:{address[1]}"
    try:
        connection = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise PeerError(f"{peer} cannot be reached ({error}). Is its host alive?") from error
    framed = FramedSocket(connection, peer, timeout_s)
    try:
        authenticate(framed, token, is_server=False)
    except PeerError:
        framed.close()
        raise
    return framed
