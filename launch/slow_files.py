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
"""So many writes may lie behind a late one; more are left out."""
DRAIN_S = 5.0
"""How long a process that ends waits for what is not written yet."""

log = logging.getLogger(__name__)

SAID_S = 10.0
"""How long something may take before that is said; then it is again after twice as long each
time."""


class PatientWriter:
    """Writes in a thread of its own. Whoever has something written waits for it, as for any write,
    but not for long: behind a write that takes longer nobody waits, until all is written again.

    Args:
        name: Of its thread.
        answer_s: How long a write is waited for, in seconds.
        late: Called once a write takes longer, by whoever waits for it.
        back: Called with how many were left out once all is written again, by the thread.
        most: How many writes may lie behind a late one.
    """

    def __init__(
        self,
        name: str,
        answer_s: float,
        late: Callable[[], object],
        back: Callable[[int], object],
        most: int = MOST,
    ) -> None:
        self._answer_s, self._late, self._back, self._most = answer_s, late, back, most
        self._work = queue.SimpleQueue[tuple[Callable[[], object], threading.Event]]()
        self._lock = threading.RLock()  # a finalizer may log while this thread holds it
        self._is_late, self._left_out = False, 0
        self._newest = threading.Event()
        self._newest.set()
        threading.Thread(target=self._serve, name=name, daemon=True).start()
        _writers.add(self)

    def do(self, write: Callable[[], object]) -> None:
        """Have something written. It is on return, unless it is late."""
        done = threading.Event()
        with self._lock:
            if self._work.qsize() >= self._most:
                self._left_out += 1
                return
            is_late, self._newest = self._is_late, done
            self._work.put((write, done))
        if is_late or done.wait(self._answer_s):
            return
        with self._lock:
            is_first = not self._is_late and not done.is_set()
            self._is_late |= is_first
        if is_first:
            self._late()

    def drain(self, within_s: float) -> bool:
        """Wait until all is written. Returns whether it is."""
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
        except Exception:  # a slip of whoever has this written: others' writes follow
            log.exception("event=not_written")


_writers = weakref.WeakSet[PatientWriter]()


def drain(within_s: float = DRAIN_S) -> None:
    """This process ends: give what is not written yet so much time."""
    end = time.monotonic() + within_s
    for writer in list(_writers):
        writer.drain(max(0.0, end - time.monotonic()))


@contextmanager
def said(what: str, after_s: float = SAID_S) -> Iterator[None]:
    """Say in the log that this process waits for something, where it takes long: a file system that
    hangs can be given no deadline.

    Args:
        what: As the end of "waiting for ...".
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
