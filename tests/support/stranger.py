"""A process that listens where one of the job did, and does not have the job's token."""

import contextlib
import socket
import struct
import threading


def other_release() -> bytes:
    """Return what a process of another release answers to a first message."""
    return struct.pack(">I6sHH32s", 42, b"scalai", 9, 0, bytes(32))


HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"


class Stranger:
    """Answers whatever it is sent with the same bytes, and closes the connection once the other
    side has."""

    def __init__(self, answer: bytes) -> None:
        self._answer, self._listener = answer, socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with near, contextlib.suppress(OSError):
                    near.recv(4096)
                    near.sendall(self._answer)
                    near.recv(4096)  # closed with bytes unread it would be reset
