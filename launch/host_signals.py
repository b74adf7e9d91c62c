"""Signals that a whole host is sent, by its scheduler or its terminal. They mean the agent: every
other process of the job lives on, and ends by the agent's or the coordinator's word."""

import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NOTICE = signal.SIGUSR1
"""Says that the host will be taken away: a scheduler may send it before it ends a job."""
MEANT_FOR_THE_AGENT = (signal.SIGTERM, signal.SIGINT, NOTICE)


@contextmanager
def blocked() -> Iterator[None]:
    """Have what is started in here begin with these signals blocked, so that it lives until it can
    say what it does at them. This thread handles what comes meanwhile afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, MEANT_FOR_THE_AGENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Live on at these signals from here on."""
    for number in MEANT_FOR_THE_AGENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MEANT_FOR_THE_AGENT)


class Heard:
    """The signals that this process was sent, to be acted on one by one.

    A handler interrupts its thread wherever it stands, in the middle of another handler and with
    any lock in its hands, so it may take none: it notes the signal in a queue that allows for that
    (``queue.SimpleQueue``, documented as reentrant), and nothing else.
    """

    def __init__(self) -> None:
        self._numbers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.count = 0
        """How often the agent was told to end: a notice does not count."""

    def listen(self) -> None:
        """Hear them from here on. Main thread only."""
        for number in MEANT_FOR_THE_AGENT:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.count += number != NOTICE
        self._numbers.put(number)

    def next(self, timeout_s: float) -> int | None:
        """Wait for the next one. Returns None after ``timeout_s``, or at once when woken."""
        try:
            return self._numbers.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Have whoever waits for the next one look around. Callable from any thread."""
        self._numbers.put(None)
