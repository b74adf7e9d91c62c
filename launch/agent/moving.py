"""Bytes from other hosts in a round, as reported to the coordinator."""

import threading
import time

TELL_EVERY_S = 10.0
"""Seconds between reports of arriving bytes."""


class Moving:
    """Bytes from other hosts for one round. Fetching threads call ``arrived``, the agent's own the
    rest."""

    def __init__(self, round: int) -> None:
        self.round = round
        self._mutex = threading.Lock()
        self._bytes = self._reported = 0
        self._report_at = 0.0

    def arrived(self, count: int) -> None:
        """Count arrived bytes."""
        with self._mutex:
            self._bytes += count

    def news(self) -> int | None:
        """Return the bytes so far, if due for a report: at intervals, and only after a change."""
        now = time.monotonic()
        if self._bytes == self._reported or now < self._report_at:
            return None
        self._reported, self._report_at = self._bytes, now + TELL_EVERY_S
        return self._reported
