"""Files that are being made, their pages faulted in: that takes seconds a GB, and ends early once
nobody needs them any more."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scalai.core.errors import StoreError

END_S = 60.0
"""How long one that was given up may take to end; between two steps it takes milliseconds."""


class Making:
    """One of them. Only ``Makings`` makes it."""

    def __init__(self, *, is_snapshot: bool) -> None:
        self.is_snapshot = is_snapshot
        self.is_given_up = False

    def check(self) -> None:
        """Raise ``StoreError`` where it was given up. Called between steps, without the mutex."""
        if self.is_given_up:
            raise StoreError(
                "the files of a snapshot or a fetch are not needed any more: the round they were "
                "made for has ended. The next round makes its own."
            )


class Makings:
    """All that run in one store.

    Args:
        changed: The condition of the store's mutex.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._running: set[Making] = set()
        self._is_closed = False

    @contextmanager
    def begin(self, *, is_snapshot: bool) -> Iterator[Making]:
        """Run one. A snapshot begins after earlier ones have ended, and gives them up: the files of
        two would not fit. Holds no mutex while it runs.

        Raises:
            StoreError: The store is closed, or an earlier one does not end.
        """
        making = Making(is_snapshot=is_snapshot)
        with self._changed:
            if is_snapshot:
                self.give_up()
                self._wait(lambda: not any(other.is_snapshot for other in self._running))
            if self._is_closed:
                raise StoreError("the store is closed: the job has ended.")
            self._running.add(making)
        try:
            yield making
        finally:
            with self._changed:
                self._running.discard(making)
                self._changed.notify_all()

    def give_up(self) -> None:
        """End the snapshot that is being made, if any: the round that it is for has ended."""
        with self._changed:
            for making in self._running:
                making.is_given_up |= making.is_snapshot

    def close(self) -> None:
        """End all, wait until they have ended, and let none begin."""
        with self._changed:
            self._is_closed = True
            for making in self._running:
                making.is_given_up = True
            self._changed.notify_all()
            self._wait(lambda: not self._running)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        if not self._changed.wait_for(is_so, END_S):
            raise StoreError(
                f"the files of an earlier snapshot are still being made {END_S:.0f} s after they "
                "were given up. Is this host short of memory?"
            )
