"""Signals that a whole host is sent, by its scheduler or its terminal. They mean the agent: every
other process of the job lives on, and ends by the agent's or the coordinator's word."""

import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from scalai.runtime.processes import NOTICE, VARIABLE, meant_for_the_agent

NEVER_SECOND = (NOTICE, signal.SIGHUP)
"""Neither the first signal nor the second: a terminal that closes sends SIGHUP more than once, and
systemd SIGTERM with it."""


class StoppedError(BaseException):
    """A signal came before this host had a part in its job."""


@contextmanager
def blocked() -> Iterator[None]:
    """Have what is started in here begin with these signals blocked, so that it lives until it can
    say what it does at them. This thread handles what comes meanwhile afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, meant_for_the_agent())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Live on at these signals from here on."""
    for number in meant_for_the_agent():
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, meant_for_the_agent())


def name(signals_to_handle: str) -> None:
    """Have this process, and what it starts, take these for the agent's (``--signals-to-handle``,
    as torchrun sets it)."""
    os.environ[VARIABLE] = signals_to_handle


def end_at_the_first() -> None:
    """Raise ``StoppedError`` at a signal from here on. Main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError(signal.Signals(number).name)

    for number in _heeded():
        signal.signal(number, stop)


def _heeded() -> list[signal.Signals]:
    """Return the signals to act on: one that whoever started this process has it ignore (``nohup``)
    stays ignored, unless every scheduler sends it."""
    return [
        number
        for number in meant_for_the_agent()
        if number in (signal.SIGTERM, signal.SIGINT, NOTICE)
        or signal.getsignal(number) is not signal.SIG_IGN
    ]


class HeardSignals:
    """The signals that this process was sent, to be acted on one by one.

    A handler interrupts its thread wherever it stands, in the middle of another handler and with
    any lock in its hands, so it may take none: it notes the signal in a queue that allows for that
    (``queue.SimpleQueue``, documented as reentrant), and nothing else.
    """

    def __init__(self) -> None:
        self._numbers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.count = 0
        """How often this process was told to end: what is never a second signal does not count."""

    def listen(self) -> None:
        """Hear them from here on. Main thread only."""
        for number in _heeded():
            signal.signal(number, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, meant_for_the_agent())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.count += number not in NEVER_SECOND
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
