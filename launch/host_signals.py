"""Signals to a whole host, from its scheduler or its terminal: all rules for them, beside those of
workers (``scalai.runtime.processes``).

They mean the agent: every other process of the job lives on, and ends by the agent's or the
coordinator's word.
"""

import faulthandler
import os
import queue
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from scalai.runtime.processes import NOTICE, VARIABLE, meant_for_the_agent

NEVER_SECOND = (NOTICE, signal.SIGHUP)
"""Neither a first nor a second signal: a closing terminal sends SIGHUP more than once, and systemd
SIGTERM with it."""


SHOWN_S = 3.0
"""Time for the workers' stacks to be logged, before SIGQUIT ends this host, in seconds."""


class StoppedError(BaseException):
    """A signal came before this host had a part in its job."""


@contextmanager
def blocked() -> Iterator[None]:
    """Block these signals in processes started here, until they can handle them.

    This thread handles signals from meanwhile afterwards.
    """
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
    """Set the agent's signals for this process and its children (``--signals-to-handle``, as
    torchrun sets it).
    """
    os.environ[VARIABLE] = signals_to_handle


def end_at_the_first() -> None:
    """Raise ``StoppedError`` at a signal from here on. Main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGQUIT:
            show_own_stacks()
        raise StoppedError(signal.Signals(number).name)

    for number in _heeded():
        signal.signal(number, stop)


def show_own_stacks() -> None:
    """Write this process's stacks to standard error."""
    with suppress(OSError, ValueError, AttributeError):  # it may be closed
        faulthandler.dump_traceback(sys.stderr)


def _heeded() -> list[signal.Signals]:
    """Return the signals to act on: ignored ones (``nohup``) stay ignored, except every
    scheduler's.
    """
    return [
        number
        for number in meant_for_the_agent()
        if number in (signal.SIGTERM, signal.SIGINT, NOTICE)
        or signal.getsignal(number) is not signal.SIG_IGN
    ]


class HeardSignals:
    """The signals to this process, to be acted on one by one.

    A handler interrupts its thread anywhere, even inside another handler or with a lock held. So it
    may take no lock: it only puts the signal into a reentrant queue (``queue.SimpleQueue``).
    """

    def __init__(self) -> None:
        self._numbers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.count = 0
        """Signals to end this process, without those of ``NEVER_SECOND``."""

    def listen(self) -> None:
        """Hear them from here on. Main thread only."""
        for number in _heeded():
            signal.signal(number, self.hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, meant_for_the_agent())

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """Hear a signal; a handler of signals."""
        self.count += number not in NEVER_SECOND
        self._numbers.put(number)

    def next(self, timeout_s: float) -> int | None:
        """Wait for the next one. Returns None after ``timeout_s``, or at once when woken."""
        try:
            return self._numbers.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def wake(self) -> None:
        """Wake the waiter of ``next``. Callable from any thread."""
        self._numbers.put(None)
