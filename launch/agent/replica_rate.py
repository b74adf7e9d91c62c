"""How fast replicas come to this host: as fast as the training's steps bear it, and in time."""

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
"""Who waits looks so often whether it still must."""

log = logging.getLogger(__name__)


class ReplicaRate:
    """Learns from the steps of this host's workers, and holds back those who fetch. Any thread may
    call it.

    Args:
        host: This host.
        slowdown: By what part of its time a step may take longer.
        clock: Seconds that only grow.
        sleep: Waits for so many.
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
        """The workers', None before they make any."""
        self._of_step = 0
        self._left_bytes = self._came_bytes = 0
        self._is_hurried = self._was_hurried = False
        """Whether the present replicas are, and whether those before them were: then it is said."""

    def space(self, every: int) -> None:
        """So many steps lie between generations; 0: nobody knows when the next one comes."""
        with self._mutex:
            self._every = every

    def look(self, seen: tuple[int, int] | None, *, is_giving: bool = False) -> None:
        """Take note of the round of the workers and the step that all have ended; None: there are
        none that train. Called often. ``is_giving``: this host gives pieces to others."""
        with self._mutex:
            if seen is None:
                self._step = None
                return
            round, self._step = seen
            # What is hurried comes faster than the rate, of which the steps then say nothing; and
            # who only gives sees steps beside replicas whose rate is another host's.
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
        """Replicas of the generation of this step are made; those that are urgent as fast as they
        come."""
        with self._mutex:
            self._of_step, self._left_bytes = step, 0
            self._was_hurried, self._is_hurried = self._is_hurried, False
            self._traffic = Traffic.OTHER if is_urgent else Traffic.REPLICAS

    def end(self) -> None:
        """They are made, or given up."""
        with self._mutex:
            self._traffic = Traffic.NONE

    def expect(self, size_bytes: int) -> None:
        """So many bytes will come."""
        with self._mutex:
            self._left_bytes = size_bytes

    def came(self, size_bytes: int, check: Callable[[], None]) -> None:
        """Bytes have come; blocks until the next ones may. ``check`` raises where nobody needs them
        any more."""
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
