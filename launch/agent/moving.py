"""How many bytes have come from other hosts for a round, as the coordinator hears of it."""

import threading
import time

TELL_EVERY_S = 10.0
"""How often the coordinator hears of bytes that arrive."""


class Moving:
    """Bytes that come from other hosts for one round. ``arrived`` is called by the threads that
    fetch them, the rest by the agent's own."""

    def __init__(self, round: int) -> None:
        self.round = round
        self._mutex = threading.Lock()
        self._bytes = self._reported = 0
        self._report_at = 0.0

    def arrived(self, count: int) -> None:
        """Count bytes that have come."""
        with self._mutex:
            self._bytes += count

    def news(self) -> int | None:
        """Return how many bytes have come, where that is to be reported: now and then, and only
        where there are more than before."""
        now = time.monotonic()
        if self._bytes == self._reported or now < self._report_at:
            return None
        self._reported, self._report_at = self._bytes, now + TELL_EVERY_S
        return self._reported
