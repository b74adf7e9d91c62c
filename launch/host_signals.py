"""Signals that a whole host is sent, by its scheduler or its terminal. They mean the agent: every
other process of the job lives on, and ends by the agent's or the coordinator's word."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

MEANT_FOR_THE_AGENT = (signal.SIGTERM, signal.SIGINT)


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
