"""Blocks that are fetched before they are asked for: a few at a time, and few that wait."""

import threading
from collections import deque
from collections.abc import Callable, Hashable

THREADS = 2
WAITING = 8
"""Blocks that wait or are on their way, at most; what comes beyond is read when it is asked for."""


class ReadAhead:
    """Calls in threads that end with the process, whatever they wait for."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._calls: deque[tuple[Hashable, Callable[[], None]]] = deque()
        self._keys: set[Hashable] = set()
        self._threads = 0
        self._is_closed = False

    def submit(self, key: Hashable, call: Callable[[], None]) -> None:
        """Have a call made, unless one of that key waits or is on its way, or too many do."""
        with self._mutex:
            if self._is_closed or key in self._keys or len(self._keys) >= WAITING:
                return
            self._keys.add(key)
            self._calls.append((key, call))
            if self._threads == THREADS:
                return
            self._threads += 1
        threading.Thread(target=self._work, name="read-ahead", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._calls:
                    self._threads -= 1
                    return
                key, call = self._calls.popleft()
            try:
                call()
            finally:
                with self._mutex:
                    self._keys.discard(key)

    def close(self) -> None:
        """Make no further call. What is on its way ends in its own time."""
        with self._mutex:
            self._is_closed = True
            self._calls.clear()
