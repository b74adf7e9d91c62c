"""One connection under TLS, as a stream of frames has it (``framing.Stream``).

OpenSSL's connection is for one thread at a time, and Python lets it go without a lock: here one
thread may send while another receives, and any may cut. So each call of OpenSSL is short (the
socket never blocks) and under a lock, and what waits, waits outside of it. A wait has one deadline,
however slowly bytes trickle in.
"""

import errno
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from scalai.core.errors import TlsError
from scalai.runtime.framing import NO_TLS
from scalai.runtime.tls import Contexts, Tls, why

T = TypeVar("T")

_DRAINED_BYTES = 1 << 16
_PLAIN = ("wrong version number", "http request", "https proxy request")
"""What OpenSSL calls bytes that are no record of TLS."""


class TlsStream:
    """Shakes hands at the first byte that is sent or awaited, in the thread that does so and within
    its time.

    Args:
        connection: A connected socket; from now on this stream's.
        peer: A name for errors.
        tls: Who this side is.
        is_server: Whether this side has accepted the connection.
    """

    def __init__(self, connection: socket.socket, peer: str, tls: Tls, *, is_server: bool) -> None:
        self._socket, self._peer = connection, peer
        self._tls, self._is_server = tls, is_server
        self._agreeing, self._agreed = threading.Lock(), False
        self._heard = False
        self._mutex = threading.Lock()
        self._users, self._is_closed = 0, False
        self._timeout_s: float | None = None

    def settimeout(self, value: float | None, /) -> None:
        """Let each call take so long altogether."""
        self._timeout_s = value

    def sendall(self, data: bytes | bytearray | memoryview, /) -> None:
        """Send all of it. Raises ``OSError``; ``TimeoutError`` after the time; ``TlsError``."""
        ends_at = self._ends_at()
        view = memoryview(data).cast("B")
        secured = self._secured(ends_at)
        sent = 0
        while sent < len(view):
            rest = view[sent:]
            sent += self._perform(partial(secured.send, rest), ends_at)

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive what is there, at least a byte; 0: the other side has ended. Raises as
        ``sendall``."""
        ends_at = self._ends_at()
        secured = self._secured(ends_at)
        try:
            count = self._perform(lambda: secured.recv_into(buffer), ends_at)
        except ssl.SSLError as error:
            if self._heard:
                raise
            # In TLS 1.3 a server says only now what it thinks of the client's certificate.
            raise self._refusal(error) from error
        self._heard = True
        return count

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self, how: int, /) -> None:
        """End the connection under whoever uses it."""
        with self._mutex:
            if not self._is_closed:
                # ``SSLSocket.shutdown`` would forget TLS first: what another thread sends in that
                # moment would go out plainly.
                socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """Give the connection up; whoever still uses it gets an error."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
            if self._users:  # the number of the descriptor must not become another one's yet
                with suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            else:
                self._socket.close()

    # ------------------------------------------------------------------ the handshake

    def _secured(self, ends_at: float | None) -> ssl.SSLSocket:
        """Return the connection once both sides have agreed."""
        if not self._agreed:
            with self._agreeing:
                if not self._agreed:
                    self._agree(ends_at)
                    self._agreed = True
        assert isinstance(self._socket, ssl.SSLSocket)
        return self._socket

    def _agree(self, ends_at: float | None) -> None:
        contexts = self._tls.contexts()  # may read files: not under the mutex
        secured = self._perform(lambda: self._wrap(contexts), ends_at)
        try:
            self._perform(secured.do_handshake, ends_at)
        except TimeoutError:
            raise
        except ssl.SSLEOFError as error:
            raise self._hung_up(error) from error
        except ssl.SSLError as error:
            self._part(secured, error)
            raise self._refusal(error) from error
        except ConnectionError as error:
            raise self._hung_up(error) from error

    def _wrap(self, contexts: Contexts) -> ssl.SSLSocket:
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket  # an earlier try has run out of time
        context = contexts.server if self._is_server else contexts.client
        self._socket.setblocking(False)
        self._socket = context.wrap_socket(
            self._socket, server_side=self._is_server, do_handshake_on_connect=False
        )
        return self._socket

    def _part(self, secured: ssl.SSLSocket, error: ssl.SSLError) -> None:
        """Have the other side read why: OpenSSL says nothing to who speaks no TLS, and a connection
        that is closed with bytes unread is reset."""
        with suppress(OSError):
            if self._is_server and why(error) in _PLAIN:
                socket.socket.send(secured, NO_TLS)
            socket.socket.recv(secured, _DRAINED_BYTES)

    def _hung_up(self, error: OSError) -> OSError:
        return ConnectionResetError(
            errno.ECONNRESET,
            f"it ended in the middle of the TLS handshake: {error.strerror or error}; give all "
            "processes of the job the same --tls",
        )

    def _refusal(self, error: ssl.SSLError) -> TlsError:
        reason = why(error)
        if "alert" in reason:
            problem = f"it refuses this side's certificate, or TLS ({reason})"
        elif isinstance(error, ssl.SSLCertVerificationError):
            problem = f"its certificate is not taken ({reason})"
        elif "did not return a certificate" in reason:
            problem = "it shows no certificate"
        else:
            problem = f"it does not speak TLS ({reason})"
        return TlsError(
            f"{self._peer} and this process do not agree on TLS: {problem}. Give all processes of "
            "the job --tls with certificates that are valid now, of one authority."
        )

    # ------------------------------------------------------------------ one call of OpenSSL

    def _ends_at(self) -> float | None:
        return None if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _perform(self, act: Callable[[], T], ends_at: float | None) -> T:
        """Call until it has succeeded. Raises ``TimeoutError`` after the time."""
        with self._mutex:
            if self._is_closed:
                raise OSError(errno.EBADF, "this side has closed it")
            self._users += 1
        try:
            while True:
                with self._mutex:
                    if self._is_closed:
                        raise OSError(errno.EBADF, "this side has closed it")
                    try:
                        return act()
                    except ssl.SSLWantReadError:
                        wanted = select.POLLIN
                    except ssl.SSLWantWriteError:
                        wanted = select.POLLOUT
                    descriptor = self._socket.fileno()
                _wait(descriptor, wanted, ends_at)
        finally:
            with self._mutex:
                self._users -= 1
                if self._is_closed and not self._users:
                    self._socket.close()


def _wait(descriptor: int, wanted: int, ends_at: float | None) -> None:
    poll = select.poll()
    poll.register(descriptor, wanted)
    left_s = None if ends_at is None else ends_at - time.monotonic()
    if left_s is not None and left_s <= 0:
        raise TimeoutError("timed out")
    if not poll.poll(None if left_s is None else 1000 * left_s + 1):
        raise TimeoutError("timed out")
