"""A web server that sends ranges, and can be made to do it badly.

As a process of its own (``python -m support.web_server PORT FOLDER``) it serves a folder, prints
its port, and can be stopped, killed and started again.
"""

import re
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Page:
    """A file of the server."""

    data: bytes
    etag: str | None = '"1"'
    modified: float | None = 1000.0
    kind: str = "application/octet-stream"


Behave = Callable[["Handler", Page, str], bool]
"""Answers a request in its own way, given the path; False: it leaves that to the server."""


@dataclass
class Site:
    """What a server has, and how it behaves: each request by one of ``next``, then ``always``."""

    pages: dict[str, Page] = field(default_factory=dict)
    next: list[Behave] = field(default_factory=list)
    always: Behave | None = None
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    sent_bytes: int = 0

    def page(self, path: str) -> Page | None:
        return self.pages.get(path)


class Folder(Site):
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def page(self, path: str) -> Page | None:
        file = self._folder / path.lstrip("/")
        if not file.is_file():
            return None
        return Page(file.read_bytes(), modified=file.stat().st_mtime)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    protocol_version = "HTTP/1.1"
    site: Site

    def do_GET(self) -> None:
        site, path = self.site, self.path.partition("?")[0]
        site.asked.append((self.command, self.path, self.headers.get("Range")))
        page = site.page(path)
        behave = site.next.pop(0) if site.next else site.always
        if behave is not None and behave(self, page or Page(b""), path):
            return
        if page is None:
            self.error(404)
            return
        self.send(page)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass

    def error(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def place(self, page: Page) -> tuple[int, int] | None:
        """Return the range that is asked for."""
        match = _RANGE.fullmatch(self.headers.get("Range") or "")
        return (int(match[1]), min(int(match[2]) + 1, len(page.data))) if match else None

    def head(
        self,
        page: Page,
        place: tuple[int, int] | None,
        length: int | None = None,
        status: int | None = None,
    ) -> bytes:
        """Send the head of an answer, and return its body."""
        low, high = place or (0, len(page.data))
        self.send_response(status or (206 if place else 200))
        if place:
            self.send_header("Content-Range", f"bytes {low}-{high - 1}/{len(page.data)}")
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(high - low if length is None else length))
        if page.etag is not None:
            self.send_header("ETag", page.etag)
        if page.modified is not None:
            self.send_header("Last-Modified", formatdate(page.modified, usegmt=True))
        self.end_headers()
        return page.data[low:high] if self.command == "GET" else b""

    def send(self, page: Page) -> None:
        """Answer as it should be."""
        place = self.place(page)
        if place and place[0] >= len(page.data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(page.data)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.body(self.head(page, place))

    def body(self, data: bytes) -> None:
        for begin in range(0, len(data), 1 << 16):
            part = data[begin : begin + (1 << 16)]
            self.wfile.write(part)
            self.site.sent_bytes += len(part)


def status(number: int) -> Behave:
    """Answer with a status and nothing else."""

    def behave(handler: Handler, page: Page, path: str) -> bool:
        handler.error(number)
        return True

    return behave


def well(handler: Handler, page: Page, path: str) -> bool:
    """Answer as it should be."""
    return False


def silent(handler: Handler, page: Page, path: str) -> bool:
    """Take a request, and say nothing."""
    handler.site.over.wait(600)
    handler.close_connection = True
    return True


def silent_midway(handler: Handler, page: Page, path: str) -> bool:
    """Send half of the bytes."""
    data = handler.head(page, handler.place(page))
    handler.body(data[: len(data) // 2])
    return silent(handler, page, path)


def drip(handler: Handler, page: Page, path: str) -> bool:
    """Send a byte now and then, for ever: no pause is long."""
    for byte in handler.head(page, handler.place(page)):
        handler.wfile.write(bytes([byte]))
        if handler.site.over.wait(0.05):
            break
    handler.close_connection = True
    return True


def reset(handler: Handler, page: Page, path: str) -> bool:
    """End the connection at once, in the way that tells the other side of it (RST)."""
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.close()
    handler.close_connection = True
    return True


def reset_midway(handler: Handler, page: Page, path: str) -> bool:
    """Send half of the bytes, and end the connection."""
    data = handler.head(page, handler.place(page))
    handler.body(data[: len(data) // 2])
    handler.wfile.flush()
    return reset(handler, page, path)


def ends_early(handler: Handler, page: Page, path: str) -> bool:
    """Say a length, and send less."""
    handler.body(handler.head(page, handler.place(page))[:-1])
    handler.close_connection = True
    return True


def says_less(handler: Handler, page: Page, path: str) -> bool:
    """Say a length that is less than that of the range."""
    low, high = handler.place(page) or (0, len(page.data))
    handler.body(handler.head(page, (low, high), high - low - 1)[:-1])
    return True


def whole(handler: Handler, page: Page, path: str) -> bool:
    """Take no notice of a range."""
    try:
        handler.body(handler.head(page, None))
    except OSError:
        handler.close_connection = True
    return True


def another_range(handler: Handler, page: Page, path: str) -> bool:
    """Send as many bytes of another place, and say so."""
    low, high = handler.place(page) or (0, len(page.data))
    handler.body(handler.head(page, (low + 1, high + 1)))
    return True


def unsaid(handler: Handler, page: Page, path: str) -> bool:
    """Send the bytes of a range, and do not say which."""
    low, high = handler.place(page) or (0, len(page.data))
    part = Page(page.data[low:high], page.etag, page.modified)
    handler.body(handler.head(part, None, status=206))
    return True


def compressed(handler: Handler, page: Page, path: str) -> bool:
    """Send it compressed where the other side takes that, as servers do with text."""
    import gzip

    if "gzip" not in handler.headers.get("Accept-Encoding", ""):
        return False
    data = gzip.compress(page.data)
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.body(data)
    return True


def moved(to: str) -> Behave:
    """Lead to another path, until that one is asked for."""

    def behave(handler: Handler, page: Page, path: str) -> bool:
        if path == to:
            return False
        handler.send_response(302)
        handler.send_header("Location", to)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return behave


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # who asked has gone


class WebServer:
    """A server in a thread, on a port of the loopback; a context."""

    def __init__(self, site: Site, port: int = 0) -> None:
        self.site = site
        self._server: socketserver.TCPServer = _Server(
            ("127.0.0.1", port), type("Bound", (Handler,), {"site": site})
        )
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> "WebServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.site.over.set()
        self._server.shutdown()
        self._thread.join(20)
        self._server.server_close()


if __name__ == "__main__":
    with WebServer(Folder(Path(sys.argv[2])), int(sys.argv[1])) as server:
        print(server.port, flush=True)
        sys.stdin.read()
