"""A metadata server on this machine, for tests: its answers are set by path."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Said:
    """An answer: status, text and headers."""

    status: int = 200
    text: str | bytes = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Server:
    """Answers by path, without its query; 404 where nothing is set."""

    address: str
    says: dict[str, Said] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    needs: dict[str, str] = field(default_factory=dict)
    """Headers of a GET without which it answers 401, as IMDSv2 does without a token."""


@contextmanager
def metadata_server() -> Iterator[Server]:
    """Give a server that ends with the context."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append((self.command, self.path, dict(self.headers.items())))
            said = server.says.get(self.path.partition("?")[0], Said(404, "not found"))
            lacks = any(self.headers.get(name) != value for name, value in server.needs.items())
            if self.command == "GET" and lacks:
                said = Said(401)
            content = said.text if isinstance(said.text, bytes) else said.text.encode()
            self.send_response(said.status)
            for name, value in said.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Whoever asked has gone away."""

    with Quiet(("127.0.0.1", 0), Handler) as http:
        server = Server(f"http://127.0.0.1:{http.server_address[1]}")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join(10)
