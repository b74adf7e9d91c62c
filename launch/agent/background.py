"""What blocks (faulting pages in, planning and fetching, sealing) runs beside the agent's loop.
What touches a disk that is not this host's memory runs in threads of its own: it may answer nobody.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from scalai.core.errors import ScalaiError

THREADS = 4
Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Background:
    """Threads that work beside an agent's loop and hand their results to it.

    Args:
        put: Hands the loop something to do.
    """

    def __init__(self, put: Callable[[Callable[[], None]], object]) -> None:
        self._put = put
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        """By whether they touch such disks."""

    def start(self) -> None:
        """Start all threads now: later there may be no room for another one (``ulimit -u``, the
        limit of a container), and the agent would end by it."""
        for on_disk, name in ((False, "agent"), (True, "agent-disk")):
            threads = self._threads[on_disk] = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
            all_there = threading.Barrier(THREADS)
            for _ in range(THREADS):
                threads.submit(all_there.wait)

    def submit(self, work: Callable[[], None], *, on_disk: bool = False) -> None:
        """Run ``work``, of which nothing comes. What fails in it for want of room, of a file or of
        a process is logged and ends nothing; any other error ends the agent, in its loop.
        ``on_disk``: it touches a disk that is not this host's memory."""

        def safely() -> None:
            try:
                work()
            except (ScalaiError, OSError):
                log.exception("event=error: nothing is ended by it")

        self.run(safely, lambda result: None, on_disk=on_disk)

    def run(
        self,
        work: Callable[[], Result],
        then: Callable[[Result], None],
        *,
        on_disk: bool = False,
    ) -> None:
        """Run ``work`` beside the loop and ``then`` with its result. An error ends the agent, in
        its loop. ``on_disk`` as of ``submit``."""
        assert self._threads, "start was called"

        def done(result: "Future[Result]") -> None:
            error = result.exception()
            if error is None:
                then(result.result())  # it is done
            else:
                self._put(lambda: _fail(error))

        self._threads[on_disk].submit(work).add_done_callback(done)


def _fail(error: BaseException) -> None:
    raise error
