"""One question to a cloud's metadata server over HTTP, with little trust: a total deadline, a size
limit, no proxy, no redirects."""

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
"""Seconds for a question, from the connection to the answer's last byte."""
MOST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer: status and text; ``at``: its own time in seconds since 1970, None: not
    stated."""

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
    """Ask for ``path`` at ``address`` (``http://HOST:PORT``). Blocks. The caller judges the status.

    Raises:
        PeerError: There is no answer in time, or it is invalid, too long, or not text.
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
    # It uses only the socket's ``makefile``.
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
    """A connection with a deadline and a size limit for reads."""

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
