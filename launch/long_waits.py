"""What takes long where nothing can be done about it is said."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAID_S = 10.0
"""How long something may take before that is said; then it is again after twice as long each
time."""

log = logging.getLogger(__name__)


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
