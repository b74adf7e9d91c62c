"""Waits for killed processes to be gone, with the memory of their devices."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from select import POLLIN, poll

from scalai.core.job.deadlines import GONE_S

GONE_REPORT_S = 5.0
"""Seconds before a killed worker still alive is logged."""
LOOK_MS = 500.0

log = logging.getLogger(__name__)


@contextmanager
def awaited_ends(pids: Iterable[int], is_over: Callable[[], bool]) -> Iterator[None]:
    """Wait, at the end of this context, for the processes killed in it: ``GONE_S`` at most, or
    until ``is_over``.

    Torch waits only a moment (2.13 and newer); a kernel with a hanging device, or much pinned
    memory, takes longer.
    """
    watched = dict[int, int]()
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                watched[os.pidfd_open(pid)] = pid
        yield
        _wait(watched, is_over)
    finally:
        for descriptor in watched:
            os.close(descriptor)


def _wait(watched: dict[int, int], is_over: Callable[[], bool]) -> None:
    waiter, began, next_report_s = poll(), time.monotonic(), GONE_REPORT_S
    for descriptor in watched:
        waiter.register(descriptor, POLLIN)
    while watched:
        for descriptor, _ in waiter.poll(LOOK_MS):
            waiter.unregister(descriptor)
            os.close(descriptor)
            del watched[descriptor]
        since_s = time.monotonic() - began
        if watched and since_s > next_report_s:
            next_report_s *= 2
            pids = ",".join(map(str, sorted(watched.values())))
            log.warning(
                "event=stuck pids=%s since_s=%.0f: the kernel has not ended these workers, which "
                "hold the memory of their devices; the next round waits for it",
                pids, since_s,
            )  # fmt: skip
        if since_s > GONE_S or is_over():
            return
