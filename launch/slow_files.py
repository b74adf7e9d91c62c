"""File systems that hang and pipes without a reader: waits are logged, writes hold nobody up."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

MOST = 10_000
"""Most writes behind a late one; more are left out."""
DRAIN_S = 5.0
"""Longest wait of an ending process for unfinished writes."""

log = logging.getLogger(__name__)

SAID_S = 10.0
"""First log line about a wait; each further one after twice the time."""


class PatientWriter:
    """Writes in a thread of its own.

    Callers wait for their write, but not for long: behind a late write nobody waits, until all is
    written again.

    Args:
        answer_s: Longest wait for a write, in seconds.
        late: Called by the waiter of the first late write.
        back: Called by the thread with the number of writes left out, once all is written again.
        most: Most writes behind a late one.
    """

    def __init__(
        self,
        name: str,
        answer_s: float,
        late: Callable[[], object],
        back: Callable[[int], object],
        most: int = MOST,
    ) -> None:
        self.answer_s, self._late, self._back, self._most = answer_s, late, back, most
        self._work = queue.SimpleQueue[tuple[Callable[[], object], threading.Event]]()
        self._lock = threading.RLock()  # a finalizer may log while this thread holds it
        self._is_late, self._left_out = False, 0
        self._newest = threading.Event()
        self._newest.set()
        threading.Thread(target=self._serve, name=name, daemon=True).start()
        _writers.add(self)

    def do(self, write: Callable[[], object]) -> None:
        """Write. It is done on return, unless it is late."""
        done = threading.Event()
        with self._lock:
            if self._work.qsize() >= self._most:
                self._left_out += 1
                return
            is_late, self._newest = self._is_late, done
            self._work.put((write, done))
        if is_late or done.wait(self.answer_s):
            return
        with self._lock:
            is_first = not self._is_late and not done.is_set()
            self._is_late |= is_first
        if is_first:
            self._late()

    def drain(self, within_s: float) -> bool:
        """Wait until all is written; False after ``within_s``."""
        return self._newest.wait(within_s)

    def _serve(self) -> None:
        while True:
            write, done = self._work.get()
            self._safely(write)
            with self._lock:
                done.set()
                is_back = self._is_late and self._work.empty()
                left_out = self._left_out
                if is_back:
                    self._is_late, self._left_out = False, 0
            if is_back:
                self._safely(partial(self._back, left_out))

    def _safely(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception:  # a slip of the caller's write: others' writes follow
            log.exception("event=not_written")


_writers = weakref.WeakSet[PatientWriter]()


def drain(within_s: float = DRAIN_S) -> None:
    """Wait up to this time for unfinished writes, at the end of this process."""
    end = time.monotonic() + within_s
    for writer in list(_writers):
        writer.drain(max(0.0, end - time.monotonic()))


@contextmanager
def said(what: str, after_s: float = SAID_S) -> Iterator[None]:
    """Log long waits of the block: a file system that hangs can be given no deadline.

    Args:
        what: End of "waiting for ...".
        after_s: Seconds, for tests.
    """
    is_over, began = threading.Event(), time.monotonic()

    def watch() -> None:
        next_s = after_s
        while not is_over.wait(next_s - (time.monotonic() - began)):
            log.warning("event=waiting for %s, for %.0f s", what, time.monotonic() - began)
            next_s *= 2

    threading.Thread(target=watch, name="long-wait", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
