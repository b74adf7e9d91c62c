"""One log line a change of state, on standard error: ``2026-01-31 12:00:00,123 INFO [scalai <who>]
generation=12 event=move took_s=0.2``.

A reader may stand still (a halted terminal, a pipe to a disk that hangs): the job does not.
"""

import logging
import os
import re
import select
import sys
from functools import partial

from scalai.core.exit_codes import RESUMABLE
from scalai.launch.slow_files import MOST, PatientWriter

WARNINGS = frozenset(
    {
        "damage", "function_differs", "given_up", "host_silent", "lost", "no_answer",
        "no_replica", "no_replica_room",
        "not_rescued", "report_failed", "restart", "snapshot_incomplete", "snapshot_refused",
        "stood_down", "suspected", "unhooked", "went_back", "withdrawn", "wrong_result",
    }
)  # fmt: skip
"""Coordinator's events of a loss, or a danger of one."""
READ_S = 0.2
"""Longest wait for a line; behind a late one there is none."""


class PatientHandler(logging.Handler):
    """Writes lines to a descriptor, and holds nobody up for long; ``most`` lines wait behind a
    late one."""

    def __init__(self, descriptor: int, most: int = MOST) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines = PatientWriter("log", READ_S, lambda: None, self._say_back, most)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # a slip in a log line: the library reports it, and goes on
            self.handleError(record)
            return
        self._lines.do(partial(self._write, line))

    def _say_back(self, left_out: int) -> None:
        if left_out:
            text = f"event=log_back {left_out} lines are left out: nobody took them for a while"
            where = (logging.WARNING, __file__, 0, text, (), None)
            self._write(self.format(logging.LogRecord("scalai.launch.logs", *where)))

    def _write(self, line: str) -> None:
        rest = memoryview((line + "\n").encode(errors="backslashreplace"))
        try:
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # set non-blocking by another process
                    select.select([], [self._descriptor], [])
        except (OSError, ValueError):
            pass  # no reader any more, or a full disk: the job goes on


class PresentStderr(logging.Handler):
    """Writes lines to ``sys.stderr`` of the moment, which may be replaced or closed at any time."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        if stream is None or stream.closed:
            return
        try:
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:  # as the library's own handlers
            self.handleError(record)


def say(text: str) -> None:
    """Log a coordinator's line, at its event's level."""
    event = re.search(r"event=(\w+)(?: code=(\d+))?", text)
    name, code = (event[1], event[2]) if event else ("", None)
    is_failed = name == "crashed" or code not in (None, "0", str(RESUMABLE))
    level = logging.WARNING if name in WARNINGS else logging.INFO
    logging.getLogger("scalai.coordinator").log(logging.ERROR if is_failed else level, "%s", text)


def _handler() -> logging.Handler:
    try:
        return PatientHandler(sys.stderr.fileno())
    except (AttributeError, OSError):  # it was closed before (``2>&-``), or lies in memory
        return PresentStderr()


def configure(who: str) -> None:
    """Send this process's log lines of Scalai to standard error, marked with ``who``."""
    handler = _handler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [scalai {who}] %(message)s"))
    logger = logging.getLogger("scalai")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
