"""The one executor of a server process: named lanes, each with threads and a queue of its own, so
that a hanging foreign disk holds up no work on memory.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from scalai.core.errors import ScalaiError

FULL_S = 10.0
"""Seconds of waiting work until its lane counts as full."""

Result = TypeVar("Result")
Work = tuple[str, Callable[[], None]]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lane:
    """One lane. Attributes change under its mutex."""

    threads: int
    due: "queue.SimpleQueue[Work]" = field(default_factory=queue.SimpleQueue)
    mutex: threading.Lock = field(default_factory=threading.Lock)
    waiting: list[float] = field(default_factory=list)
    """Submission times of waiting work, oldest first, in seconds of the monotonic clock."""
    at_work: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Name and begin of present work, by thread."""
    is_said: bool = False


class Lanes:
    """Work beside a loop; results go back to it.

    Args:
        threads: Number of threads by name of the lane. Work of a lane with one thread is done in
            order.
        put: Hands the loop a function to call.
    """

    def __init__(
        self, threads: Mapping[str, int], put: Callable[[Callable[[], None]], object]
    ) -> None:
        self._lanes = {name: _Lane(count) for name, count in threads.items()}
        self._put = put

    def start(self) -> None:
        """Start all threads now: later there may be no room for one (``ulimit -u``, the limit of a
        container), and the process would end.

        They end with the process.
        """
        for name, lane in self._lanes.items():
            for number in range(lane.threads):
                work = (lane, number)
                threading.Thread(target=_serve, args=work, name=name, daemon=True).start()

    def submit(self, lane: str, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` without a result.

        ``ScalaiError`` and ``OSError`` are logged and end nothing; other errors are raised in the
        loop.
        """

        def safely() -> None:
            try:
                work()
            except (ScalaiError, OSError):
                log.exception("event=error: %s has failed; nothing is ended by it", name)

        self.run(lane, name, safely, lambda result: None)

    def run(
        self, lane: str, name: str, work: Callable[[], Result], then: Callable[[Result], object]
    ) -> None:
        """Run ``work`` in a lane, and ``then`` in its thread with the result. Errors of both are
        raised in the loop.

        Args:
            name: Name of the work, in messages.
            work: May block.
        """
        chosen = self._lanes[lane]

        def safely() -> None:
            try:
                then(work())
            except BaseException as error:
                self._put(lambda failed=error: _fail(failed))  # type: ignore[misc]

        with chosen.mutex:
            chosen.waiting.append(time.monotonic())
            chosen.due.put((name, safely))

    def look(self) -> None:
        """Log each newly full lane with its threads' work, and each lane with room again. Called
        now and then.
        """
        now = time.monotonic()
        for name, lane in self._lanes.items():
            with lane.mutex:
                is_full = bool(lane.waiting) and now - lane.waiting[0] > FULL_S
                is_new, lane.is_said = is_full != lane.is_said, is_full
                count = len(lane.waiting)
                busy = "; ".join(
                    f"{what} for {now - at:.0f} s" for what, at in lane.at_work.values()
                )
            if is_new and is_full:
                log.warning(
                    "event=lane_full lane=%s waiting=%d: all its threads are at work (%s). A disk "
                    "or a host may not answer; other lanes go on.", name, count, busy,
                )  # fmt: skip
            elif is_new:
                log.info("event=lane_free lane=%s", name)


def _serve(lane: _Lane, thread: int) -> None:
    while True:
        name, work = lane.due.get()
        with lane.mutex:
            del lane.waiting[0]
            lane.at_work[thread] = name, time.monotonic()
        work()
        with lane.mutex:
            del lane.at_work[thread]


def _fail(error: BaseException) -> None:
    raise error
