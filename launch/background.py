"""What blocks (faulting pages in, planning and fetching, sealing) runs beside the agent's loop."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from scalai.core.errors import ScalaiError
from scalai.launch.workforce import Workforce

THREADS = 4

log = logging.getLogger(__name__)


class Background:
    """Threads that work for the present round and hand their results to the agent's loop.

    Args:
        workforce: Whose round it is.
        put: Hands the loop something to do.
    """

    def __init__(self, workforce: Workforce, put: Callable[[Callable[[], None]], object]) -> None:
        self._workforce, self._put = workforce, put
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agent")
        # All of them now: later there may be no room for another thread (``ulimit -u``, the limit
        # of a container), and the agent would end by it.
        all_there = threading.Barrier(THREADS)
        for _ in range(THREADS):
            self._threads.submit(all_there.wait)

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` for no round in particular. What fails in it for want of room, of a file or
        of a process is logged and ends nothing; any other error ends the agent, in its loop."""

        def deliver(result: "Future[None]") -> None:
            try:
                result.result()  # it is done
            except (ScalaiError, OSError):
                log.exception("event=error: nothing is ended by it")

        self._threads.submit(work).add_done_callback(
            lambda result: self._put(lambda: deliver(result))
        )

    def run(
        self,
        work: Callable[[], Any],
        then: Callable[[Any], None],
        what: str,
        too_late: Callable[[Any], None] = lambda result: None,
        survives: Callable[[str], bool] = lambda reason: False,
    ) -> None:
        """Run ``work`` beside the loop and ``then`` in it. An error of ``work`` fails the round,
        unless it ``survives`` that; ``too_late`` takes the result where the round has ended
        meanwhile."""
        current = self._workforce.round

        def done(result: "Future[Any]") -> None:
            def deliver() -> None:
                error = result.exception()
                is_present = current is self._workforce.round
                if error is None:
                    (then if is_present else too_late)(result.result())
                elif isinstance(error, ScalaiError | OSError):
                    if is_present and not survives(str(error)):
                        self._workforce.fail(f"{what}: {error}")
                else:
                    raise error

            self._put(deliver)

        self._threads.submit(work).add_done_callback(done)
