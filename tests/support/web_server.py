"""A web server that sends ranges, and can be made to fail."""

import gzip
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Page:
    """A file of the server."""

    data: bytes
    etag: str | None = '"1"'
    modified: float | None = 1000.0
    kind: str = "application/octet-stream"


Behave = Callable[["Handler", Page], bool]
"""Answers a request in its own way; False: it leaves that to the server."""


@dataclass
class Site:
    """What a server has, and how it behaves."""

    pages: dict[str, Page] = field(default_factory=dict)
    always: Behave | None = None
    over: threading.Event = field(default_factory=threading.Event)
    sent_bytes: int = 0


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    protocol_version = "HTTP/1.1"
    site: Site

    def do_GET(self) -> None:
        site, path = self.site, self.path.partition("?")[0]
        page = site.pages.get(path)
        if site.always is not None and site.always(self, page or Page(b"")):
            return
        match = _RANGE.fullmatch(self.headers.get("Range") or "")
        if page is None:
            self.answer(404, Page(b"", None, None))
        elif match is None:
            self.answer(200, page)
        elif int(match[1]) >= len(page.data):
            self.answer(416, Page(b""), ("Content-Range", f"bytes */{len(page.data)}"))
        else:
            low, high = int(match[1]), min(int(match[2]) + 1, len(page.data))
            part = Page(page.data[low:high], page.etag, page.modified)
            self.answer(206, part, ("Content-Range", f"bytes {low}-{high - 1}/{len(page.data)}"))

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, page: Page, *more: tuple[str, str]) -> None:
        self.send_response(status)
        tag = [] if page.etag is None else [("ETag", page.etag)]
        if page.modified is not None:
            tag.append(("Last-Modified", formatdate(page.modified, usegmt=True)))
        for name, value in (("Content-Type", page.kind), *tag, *more):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(page.data)))
        self.end_headers()
        data = page.data if self.command == "GET" else b""
        for begin in range(0, len(data), 1 << 16):
            self.wfile.write(data[begin : begin + (1 << 16)])
            self.site.sent_bytes += len(data[begin : begin + (1 << 16)])


def failing(status: int) -> Behave:
    """Answer with a status and nothing else."""

    def behave(handler: Handler, page: Page) -> bool:
        handler.answer(status, Page(b"", None, None))
        return True

    return behave


def silent(handler: Handler, page: Page) -> bool:
    """Take a request, and say nothing."""
    handler.site.over.wait(600)
    handler.close_connection = True
    return True


def short(handler: Handler, page: Page) -> bool:
    """Send less than asked for, in an answer that is whole in itself."""
    match = _RANGE.fullmatch(handler.headers.get("Range") or "")
    if match is None:
        return False
    handler.answer(206, Page(page.data[int(match[1]) : int(match[2])], page.etag, page.modified))
    return True


def whole(handler: Handler, page: Page) -> bool:
    """Take no notice of ranges."""
    handler.answer(200, page)
    return True


def compressed(handler: Handler, page: Page) -> bool:
    """Compress for whoever takes that, and forget ranges, as servers do with text."""
    if "gzip" not in handler.headers.get("Accept-Encoding", ""):
        return False
    packed = Page(gzip.compress(page.data), page.etag, page.modified)
    handler.answer(200, packed, ("Content-Encoding", "gzip"))
    return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # the client has gone


class WebServer:
    """A server in a thread, on a port of the loopback; a context."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"site": site}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> "WebServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.site.over.set()
        self._server.shutdown()
        self._thread.join(20)
        self._server.server_close()
