"""One question to a cloud's metadata server over HTTP, which is never believed more than needed:
within a deadline for all of it, of bounded size, through no proxy, and following nowhere."""

import io
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from scalai.core.errors import PeerError

TIMEOUT_S = 3.0
"""How long a question may take, from the connection to the last byte of the answer."""
MOST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says: its status and text; ``at``: its own time in seconds since 1970, None
    where it does not tell."""

    status: int
    text: str
    at: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def ask(
    address: str,
    path: str,
    headers: Mapping[str, str],
    method: str = "GET",
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Ask for ``path`` at ``address`` (``http://HOST:PORT``). Blocks. Whoever asks decides about
    the status.

    Raises:
        PeerError: Nobody answers within the time, or what comes is no answer, too long, or of no
            text.
    """
    end = time.monotonic() + timeout_s
    parts = urlsplit(address)
    assert parts.hostname is not None, "parse_source has looked"
    host, port = parts.hostname, parts.port or 80
    lines = [
        f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close",
        "Accept-Encoding: identity", *(f"{name}: {value}" for name, value in headers.items()),
        *(["Content-Length: 0"] if method != "GET" else []),
    ]  # fmt: skip
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.settimeout(_left(end))
            connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            return _answer(connection, end, method)
    except (OSError, HTTPException, ValueError) as error:
        raise PeerError(f"{address}{path}: {error or type(error).__name__}") from error


def _answer(connection: socket.socket, end: float, method: str) -> Answer:
    # All that it asks of a socket is ``makefile``.
    response = HTTPResponse(_Within(connection, end), method=method)  # type: ignore[arg-type]
    try:
        response.begin()
        text = response.read().decode()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, text, _time(headers.get("date")), headers)
    finally:
        response.close()


def _time(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except (ValueError, OverflowError):
        return None


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("it takes too long")
    return left


class _Within:
    """A connection of which all is read by a time, and not too much."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection, self._end = connection, end

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self._connection, self._end))


class _Reader(io.RawIOBase):
    def __init__(self, connection: socket.socket, end: float) -> None:
        super().__init__()
        self._connection, self._end, self._left = connection, end, MOST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(_left(self._end))
        count = self._connection.recv_into(buffer)
        self._left -= count
        if self._left < 0:
            raise OSError(f"the answer has more than {MOST_BYTES} bytes")
        return count
