"""Processes that do not outlive the one that started them."""

import ctypes
import os
import signal
import threading
from select import POLLIN, poll

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends.

    ``parent``: the parent's process id; if it is gone already, this process ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_with(other: int) -> None:
    """Kill this process when another one ends, whichever thread or process has forked this one.

    ``other``: its process id; if it is gone already, this process ends at once.
    """
    try:
        watched = os.pidfd_open(other)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        waiter = poll()
        waiter.register(watched, POLLIN)
        waiter.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-other", daemon=True).start()
