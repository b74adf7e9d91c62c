"""A process of a job: quick imports, signals that mean the agent, an end with its parent."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from select import POLLIN, poll
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalai.core.messages.worker_messages import Imports

_PR_SET_PDEATHSIG = 1
VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""torchrun's variable for ``--signals-to-handle``: an agent sets it, and what it starts inherits
it."""
NOTICE = signal.SIGUSR1
"""Says that the host will be taken away: a scheduler may send it before it ends a job."""
_ALWAYS = (signal.SIGTERM, signal.SIGINT, NOTICE)
_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import without looking for garbage on the way, nor ever among what was imported.

    An import brings tens of thousands of objects that stay: to look through them takes a fourth of
    the time of importing torch, and again when the process ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def imported(local_rank: int) -> "Imports | None":
    """Tell what this script has imported and from where, for the fork server of later rounds. One
    worker a host tells."""
    from scalai.core.messages.worker_messages import (
        Imports,  # numpy, which questions to a job do without
    )

    if local_rank != 0:
        return None
    modules = [
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__spec__", None) is not None and not name.startswith("__")
    ]
    return Imports(tuple(modules), tuple(map(str, sys.path)))


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


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Read ``--signals-to-handle``: names, separated by commas.

    Raises:
        ValueError: No process can handle a signal of that name.
    """
    found: Sequence[str] = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name!r} is no signal that a process can handle")
    return tuple(signal.Signals[name] for name in found)


def meant_for_the_agent() -> tuple[signal.Signals, ...]:
    """Return the signals that mean the agent: those of ``--signals-to-handle``, SIGTERM, SIGINT and
    the notice."""
    named = parse_signals(os.environ.get(VARIABLE, _DEFAULT))
    return tuple(dict.fromkeys((*_ALWAYS, *named)))
