"""The rate of this host's replicas: as fast as the training's steps allow, and in time."""

import logging
import threading
import time
from collections.abc import Callable

from scalai.core.tensors.replica_pace import (
    Bucket,
    Limit,
    ReplicaLook,
    ReplicaPace,
    Traffic,
    is_noticeable,
    limit,
    looked,
    take,
)

NAP_S = 0.1
"""Seconds between checks during a wait."""

log = logging.getLogger(__name__)


class ReplicaRate:
    """Learns from the steps of this host's workers, and delays fetching. Any thread may call it.

    Args:
        host: Name of this host.
        slowdown: Largest slowdown of a step (0.01 = 1 %).
        clock: Monotonic seconds.
        sleep: Sleeps for seconds.
    """

    def __init__(
        self,
        host: str,
        slowdown: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._host, self._every = host, 0
        self._clock, self._sleep = clock, sleep
        self._mutex = threading.Lock()
        self.pace = ReplicaPace(slowdown)
        self._said = self.pace.rate
        self._bucket = Bucket()
        self._traffic = Traffic.NONE
        self._step: int | None = None
        """The workers' step; None before the first."""
        self._of_step = 0
        self._left_bytes = self._came_bytes = 0
        self._is_hurried = self._was_hurried = False
        """Whether the present replicas, and the previous ones, are hurried; a change is logged."""

    def space(self, every: int) -> None:
        """Set the steps between generations; 0: unknown."""
        with self._mutex:
            self._every = every

    def look(self, seen: tuple[int, int] | None, *, is_giving: bool = False) -> None:
        """Record the workers' round and the step all have ended; None: none train. Called often.

        ``is_giving``: this host gives pieces to others.
        """
        with self._mutex:
            if seen is None:
                self._step = None
                return
            round, self._step = seen
            # Hurried replicas exceed the rate, so steps tell nothing about it; a host that only
            # gives sees steps beside another host's rate.
            is_free = self._traffic is Traffic.NONE
            traffic = (
                Traffic.OTHER if (is_giving if is_free else self._is_hurried) else self._traffic
            )
            look = ReplicaLook(self._clock(), round, self._step, traffic, self._came_bytes)
            self.pace = looked(self.pace, look)
            if not is_noticeable(self._said, self.pace.rate):
                return
            before, self._said = self._said, self.pace.rate
        log.info(
            "event=replica_rate host=%s bytes_per_s=%.0f before=%.0f step_s=%.3f slowdown=%g",
            self._host, self._said, before, self.pace.step_s or 0.0, self.pace.slowdown,
        )  # fmt: skip

    def begin(self, step: int, *, is_urgent: bool) -> None:
        """Begin replicas of the generation of this step; urgent ones without a limit."""
        with self._mutex:
            self._of_step, self._left_bytes = step, 0
            self._was_hurried, self._is_hurried = self._is_hurried, False
            self._traffic = Traffic.OTHER if is_urgent else Traffic.REPLICAS

    def end(self) -> None:
        """The replicas are done, or given up."""
        with self._mutex:
            self._traffic = Traffic.NONE

    def expect(self, size_bytes: int) -> None:
        """Set the bytes to come."""
        with self._mutex:
            self._left_bytes = size_bytes

    def came(self, size_bytes: int, check: Callable[[], None]) -> None:
        """Count arrived bytes; blocks until the next ones may come. ``check`` raises once they are
        not needed."""
        with self._mutex:
            now = self._clock()
            self._came_bytes += size_bytes
            self._left_bytes = max(0, self._left_bytes - size_bytes)
            self._bucket, wait_s = take(self._bucket, size_bytes, self._limit().rate, now)
        until = now + wait_s
        while (left_s := until - self._clock()) > 0:
            check()
            with self._mutex:
                if self._limit().rate is None:
                    return
            self._sleep(min(left_s, NAP_S))

    def _limit(self) -> Limit:
        if self._traffic is not Traffic.REPLICAS:
            return Limit(None)
        due = self._of_step + self._every if self._every else None
        left = None if due is None or self._step is None else due - self._step
        found = limit(self.pace, self._left_bytes, left)
        is_new, self._is_hurried = not self._is_hurried, self._is_hurried or found.is_hurried
        if found.is_hurried and is_new and not self._was_hurried:
            log.warning(
                "event=replica_hurried host=%s step=%d left_bytes=%d steps_left=%s: at %.0f bytes "
                "a second, which the steps bear, replicas would not be there before the next ones "
                "are due; they come faster. Make generations less often "
                "(--snapshot-every).",
                self._host, self._of_step, self._left_bytes, left, self.pace.rate,
            )  # fmt: skip
        return found
