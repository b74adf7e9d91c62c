"""What a coordinator hands to machines: ``events.jsonl`` beside the reports, ``--on-event``,
``--metrics-file`` and ``--metrics-port``. Each has a thread of its own and a bounded queue; none
holds the coordinator up."""

import logging
import os
import queue
import shlex
import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Generic, TypeVar

from scalai.launch.command_runner import CommandRunner, NoAnswerError, last_line
from scalai.launch.config.endpoint import join_endpoint
from scalai.launch.log_events import LogEvent, event_of
from scalai.launch.slow_files import said
from scalai.store.atomic import partial_of, replace_file

EVENTS = "events.jsonl"
MOST_LINES = 10_000
"""Most events behind a file that does not answer."""
MOST_WAITING = 256
"""Most events behind a command of ``--on-event``."""
COMMAND_S = 30.0
"""Longest run of such a command, in seconds."""
REFRESH_S = 10.0
"""Seconds between two writes of ``--metrics-file``, and between two tries to listen."""
REQUEST_S = 5.0
"""Longest silence of a scraper, in seconds."""
SCRAPE_S = 10.0
"""Longest scrape, in seconds."""
SCRAPERS = 8
"""Most scrapers at a time: another one takes the oldest one's place."""
A_SECOND = 20
"""Most scrapes a second."""
BACK_OFF_S = 1.0
"""Pause after a scraper that could not be accepted, as without file descriptors, in seconds."""
FRESH_S = 1.0
"""Scrapes within this time get the same text."""

log = logging.getLogger("scalai.coordinator")

Item = TypeVar("Item")


class ReaderQueue(Generic[Item]):
    """Takes items in a thread of its own; what does not fit in the queue is left out.

    Args:
        take: Called with each item.
        most: Most items that wait.
    """

    def __init__(self, name: str, take: Callable[[Item], object], most: int) -> None:
        self._take, self._most = take, most
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._undone, self._is_empty = 0, threading.Condition()
        self.left_out = 0
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def put(self, item: Item) -> None:
        """Hand over an item; returns at once."""
        with self._is_empty:
            if self._undone >= self._most:
                self.left_out += 1
                return
            self._undone += 1
        self._items.put(item)

    def drain(self, within_s: float) -> bool:
        """Wait until all is taken; False after ``within_s``."""
        with self._is_empty:
            return self._is_empty.wait_for(lambda: not self._undone, within_s)

    def _serve(self) -> None:
        while True:
            item = self._items.get()
            try:
                self._take(item)
            except Exception:  # our own slip: later items follow
                log.exception("event=error in what machines read")
            with self._is_empty:
                self._undone -= 1
                self._is_empty.notify_all()


class EventReaders(logging.Handler):
    """Gives each event of this process to readers. They return at once."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who
        self._reads: list[Callable[[LogEvent], object]] = []

    def add(self, read: Callable[[LogEvent], object]) -> None:
        self._reads.append(read)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event = event_of(record, self._who)
            for read in self._reads:
                read(event)
        except Exception:  # a slip: the library reports it, and the job goes on
            self.handleError(record)


class EventsFile:
    """Appends events to ``events.jsonl``. A file that cannot be written costs one log line."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS
        self._descriptor: int | None = None
        self._has_failed, self._left_out = False, 0
        self._feed = ReaderQueue[LogEvent]("events", self._write, MOST_LINES)

    def hear(self, event: LogEvent) -> None:
        self._feed.put(event)

    def close(self, within_s: float) -> None:
        self._feed.drain(within_s)

    def _write(self, event: LogEvent) -> None:
        try:
            rest = memoryview((event.to_line() + "\n").encode())
            with said(f"the disk of {self._path}"):
                descriptor = self._open()
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            self._left_out += 1
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
            if not self._has_failed:
                self._has_failed = True
                log.warning(
                    "event=events_failed path=%s %s: events are left out until it can be written",
                    self._path, error,
                )  # fmt: skip
            return
        left_out = self._left_out + self._feed.left_out
        if left_out:
            self._has_failed, self._left_out, self._feed.left_out = False, 0, 0
            log.warning("event=events_back path=%s left_out=%d", self._path, left_out)

    def _open(self) -> int:
        """The descriptor of the file; a line torn by an earlier end or failure is closed."""
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o666)
            self._descriptor = descriptor
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")
        return self._descriptor


class OnEvent:
    """Runs ``--on-event`` for milestones, warnings and errors, one process at a time."""

    def __init__(self, command: str, job: str, timeout_s: float = COMMAND_S) -> None:
        self._words, self._variables = shlex.split(command), {"SCALAI_JOB": job}
        self._commands = CommandRunner(timeout_s)
        self._has_failed = self._is_behind = False
        self._feed = ReaderQueue[LogEvent]("on-event", self._run, MOST_WAITING)

    def hear(self, event: LogEvent) -> None:
        if not event.is_milestone or event.name.startswith("on_event"):
            return
        self._feed.put(event)
        if self._feed.left_out and not self._is_behind:
            self._is_behind = True
            log.warning(
                "event=on_event_behind %d events wait for %r: further ones are left out",
                MOST_WAITING, self._words[0],
            )  # fmt: skip

    def close(self, within_s: float) -> None:
        """Wait for the commands, and end a late one."""
        if not self._feed.drain(within_s):
            self._commands.kill()

    def _run(self, event: LogEvent) -> None:
        variables = {**self._variables, "SCALAI_EVENT": event.name}
        try:
            code, output = self._commands.run(self._words, variables, event.to_line().encode())
            problem = f"it ended with {code}: {last_line(output)}" if code else ""
        except NoAnswerError as error:
            problem = str(error)
        if problem and not self._has_failed:
            log.warning("event=on_event_failed %s. Further failures are not logged", problem)
        self._has_failed |= bool(problem)


class MetricsFile:
    """Writes the metrics for node_exporter's textfile collector, and removes them at the end."""

    def __init__(self, path: Path, text: Callable[[], bytes], every_s: float = REFRESH_S) -> None:
        self._path, self._text, self._every_s = path, text, every_s
        self._end, self._has_failed = threading.Event(), False
        self._thread = threading.Thread(target=self._serve, name="metrics-file", daemon=True)
        self._thread.start()

    def close(self, within_s: float) -> None:
        self._end.set()
        self._thread.join(within_s)

    def _serve(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._end.wait(self._every_s)
            try:
                with said(f"the disk of {self._path}"):
                    replace_file(self._path, self._text(), is_durable=False)
                if self._has_failed:
                    log.info("event=metrics_file_back path=%s", self._path)
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    log.warning(
                        "event=metrics_file_failed path=%s %s: tried again", self._path, error
                    )
                self._has_failed = True
                with suppress(OSError):  # a full disk
                    partial_of(self._path).unlink(missing_ok=True)
        with suppress(OSError):  # an ended job has no values
            self._path.unlink(missing_ok=True)


class _Scrape(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server_version, sys_version = "scalai", ""

    def do_GET(self) -> None:
        assert isinstance(self.server, _Listener)
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404)
            return
        text, kind = self.server.fresh()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """A scraper gets no line."""


class _Listener(ThreadingHTTPServer):
    """A server of few requests at a time and a second, each with an end.

    Args:
        pause: Waits after a failure to accept one.
    """

    daemon_threads, block_on_close, request_queue_size = True, False, SCRAPERS

    def __init__(
        self, address: tuple[str, int], text: Callable[[], bytes], kind: str,
        pause: Callable[[float], object],
    ) -> None:  # fmt: skip
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._text, self._kind, self._pause, self._has_failed = text, kind, pause, False
        self._made_at, self._made = float("-inf"), b""
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        self._recent = deque[float](maxlen=A_SECOND)
        super().__init__(address, _Scrape)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks for the host's name

    def fresh(self) -> tuple[bytes, str]:
        """The metrics, of the last second."""
        with self._lock:
            if time.monotonic() - self._made_at > FRESH_S:
                self._made, self._made_at = self._text(), time.monotonic()
            return self._made, self._kind

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            found = super().get_request()
        except OSError as error:  # the loop would ask again at once
            if not self._has_failed:
                log.warning("event=metrics_failed cannot accept a scraper (%s): tried again", error)
            self._has_failed = True
            self._pause(BACK_OFF_S)
            raise
        self._has_failed = False
        return found

    def verify_request(self, request: Any, client_address: Any) -> bool:
        now = time.monotonic()
        is_flood = len(self._recent) == A_SECOND and now - self._recent[0] < 1.0
        if not is_flood:
            self._recent.append(now)
        return not is_flood

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            over = len(self._open) + 1 - SCRAPERS
            for oldest in list(self._open)[: max(0, over)]:
                self._end(oldest)
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        with self._lock:
            for request, since in list(self._open.items()):
                if time.monotonic() - since > SCRAPE_S:
                    self._end(request)

    def _end(self, request: socket.socket) -> None:
        self._open.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that is slow or gone gets no line."""


class MetricsServer:
    """Serves the metrics by HTTP at the coordinator's address. A port in use is tried again."""

    def __init__(
        self, address: tuple[str, int], text: Callable[[], bytes], kind: str,
        again_s: float = REFRESH_S,
    ) -> None:  # fmt: skip
        self._wanted, self._text, self._kind, self._again_s = address, text, kind, again_s
        self._end = threading.Event()
        self._listener: _Listener | None = None
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int] | None:
        """Address in use; None: none yet."""
        listener = self._listener
        return None if listener is None else (self._wanted[0], listener.server_address[1])

    def close(self, within_s: float = 0.0) -> None:
        self._end.set()
        if (listener := self._listener) is not None:
            # It waits for the loop of the listener, which looks each half second.
            threading.Thread(target=listener.shutdown, daemon=True).start()
            self._thread.join(within_s)
            listener.server_close()

    def _serve(self) -> None:
        has_failed = False
        while not self._end.is_set():
            try:
                pause = self._end.wait
                self._listener = _Listener(self._wanted, self._text, self._kind, pause)
            except OSError as error:
                if not has_failed:
                    log.warning(
                        "event=metrics_failed cannot listen at %s (%s): the job goes on without, "
                        "and tries again", join_endpoint(*self._wanted), error,
                    )  # fmt: skip
                has_failed = True
                self._end.wait(self._again_s)
                continue
            where = join_endpoint(self._wanted[0], int(self._listener.server_address[1]))
            log.info("event=metrics address=%s anybody who reaches it reads them", where)
            with suppress(OSError, ValueError):  # closed
                self._listener.serve_forever()
