"""Authenticated sockets that carry frames: length-prefixed bytes or JSON, never a pickle.

Both sides prove that they know the job's token, by HMAC-SHA256 over two fresh numbers; what follows
is neither encrypted nor signed, so the network between the hosts must be trusted.
"""

import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any

from scalai.core.errors import AbsentError, PeerError, SilentError

Json = Any
Address = str | tuple[str, int]
"""A path (Unix socket), or an interface and a port (TCP)."""

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct(">I")
_GREETING = b"scalai-1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_REFUSED = b"refused"

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 10, 5, 3
GONE_AFTER_S = KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES
"""A connection whose other host is gone without a word breaks after so long, whether bytes are on
their way to it or not."""


class FramedSocket:
    """A connected socket with frames. Not for two threads at once.

    Args:
        connection: The socket.
        peer: A name for errors.
        timeout_s: How long the other side may be silent while something is expected of it; None:
            as long as the connection lives.
    """

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float | None) -> None:
        connection.settimeout(timeout_s)
        if connection.family != socket.AF_UNIX:
            _tune(connection)
        self.socket = connection
        self.peer = peer
        self.timeout_s = timeout_s
        self._ends_at: float | None = None
        self._within_s = 0.0

    def expire_in(self, seconds: float | None) -> None:
        """Give all that follows so long altogether; None: only ``timeout_s`` counts again."""
        self._ends_at = None if seconds is None else time.monotonic() + seconds
        self._within_s = seconds or 0.0

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def cut(self) -> None:
        """End the connection from another thread: whoever waits at it gets an error now."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The other side was faster.

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
        except (ValueError, RecursionError) as error:
            raise PeerError(
                f"{self.peer} sent no JSON ({error}). Do the versions differ?"
            ) from error
        if not isinstance(message, dict):
            raise PeerError(f"{self.peer} sent a {type(message).__name__}, not a JSON object.")
        return message

    def send_parts(self, head: bytes, data: memoryview) -> None:
        """Send ``head`` and ``data`` behind each other, in one system call where they fit."""
        try:
            self._arm()
            sent = self.socket.sendmsg((head, data))
            for rest in (head[sent:], data[max(sent - len(head), 0) :]):
                if rest:
                    self._arm()
                    self.socket.sendall(rest)
        except OSError as error:
            raise self._lost(error) from error

    def recv_into(self, view: memoryview) -> None:
        """Fill ``view`` (bytes)."""
        while view:
            try:
                self._arm()
                count = self.socket.recv_into(view)
            except OSError as error:
                raise self._lost(error) from error
            if count == 0:
                raise PeerError(
                    f"{self.peer} closed the connection. Its log says why, if it lives."
                )
            view = view[count:]

    def _arm(self) -> None:
        """Wait no longer than the other side may be silent, nor than is left of the time for
        all."""
        limit_s = self.timeout_s
        if self._ends_at is not None:
            left_s = self._ends_at - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            limit_s = left_s if limit_s is None else min(left_s, limit_s)
        self.socket.settimeout(limit_s)

    def _lost(self, error: OSError) -> PeerError:
        if isinstance(error, TimeoutError) and error.errno is None:  # else it is the kernel's
            limit_s = self.timeout_s if self._ends_at is None else self._within_s
            return SilentError(f"{self.peer} was silent for {limit_s:g} s. Is its host alive?")
        return PeerError(f"the connection to {self.peer} broke ({error}). Is its host alive?")


def _tune(connection: socket.socket) -> None:
    """Send small frames at once, and notice a host that is gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    # Keepalive sends nothing while bytes wait to be acknowledged (tcp(7)).
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * GONE_AFTER_S)


def authenticate(framed: FramedSocket, token: bytes, *, is_server: bool) -> None:
    """Prove to each other that both sides know ``token``.

    The server greets with a number; the client answers with its own and its proof over both, and
    gets the server's. The proofs differ by their role, so that none can be sent back.

    Raises:
        AbsentError: The other side's token is another one, or it speaks something else.
        PeerError: It is silent or goes away.
    """
    if is_server:
        mine = secrets.token_bytes(_NONCE_BYTES)
        framed.send_bytes(_GREETING + mine)
        answer = framed.recv_bytes(_NONCE_BYTES + _PROOF_BYTES)
        numbers = mine + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(token, b"client", numbers)):
            framed.send_bytes(_REFUSED)
            raise _stranger(framed)
        framed.send_bytes(_proof(token, b"server", numbers))
        return
    greeting = framed.recv_bytes(len(_GREETING) + _NONCE_BYTES)
    if not greeting.startswith(_GREETING):
        raise _stranger(framed)
    mine = secrets.token_bytes(_NONCE_BYTES)
    numbers = greeting[len(_GREETING) :] + mine
    framed.send_bytes(mine + _proof(token, b"client", numbers))
    if not hmac.compare_digest(framed.recv_bytes(_PROOF_BYTES), _proof(token, b"server", numbers)):
        raise _stranger(framed)


def _proof(token: bytes, role: bytes, numbers: bytes) -> bytes:
    return hmac.digest(token, role + numbers, "sha256")


def _stranger(framed: FramedSocket) -> AbsentError:
    return AbsentError(
        f"{framed.peer} does not have this job's token. Is it an agent of another job? Give all "
        "agents of a job the same token."
    )


def connect(address: Address, token: bytes, timeout_s: float, what: str = "peer") -> FramedSocket:
    """Connect and authenticate, within twice ``timeout_s``.

    Raises:
        AbsentError: Nobody listens there, or someone who does not know the token.
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
    framed = FramedSocket(connection, name, timeout_s)
    try:
        framed.expire_in(timeout_s)
        authenticate(framed, token, is_server=False)
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
