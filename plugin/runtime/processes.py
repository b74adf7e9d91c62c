"""A process of a job: quick imports, the agent's signals, an end with its parent."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from select import POLLIN, poll
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalai.core.messages.worker_messages import Imports

_PR_SET_PDEATHSIG = 1
VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""torchrun's variable for ``--signals-to-handle``, set by an agent for its children."""
NOTICE = signal.SIGUSR1
"""The host will be taken away: a scheduler may send it before it ends a job."""
_ALWAYS = (signal.SIGTERM, signal.SIGINT, NOTICE)
_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import without garbage collection during it, or ever among the imported objects.

    An import brings tens of thousands of permanent objects: a search through them takes a fourth of
    the time of importing torch, and again at the end of the process.
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
    """Return this script's imports and paths, for the fork server of later rounds; one worker a
    host.
    """
    from scalai.core.messages.worker_messages import (
        Imports,  # imports numpy, unneeded by questions to a job
    )

    if local_rank != 0:
        return None
    modules = [
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__spec__", None) is not None and not name.startswith("__")
    ]
    return Imports(tuple(modules), tuple(map(str, sys.path)))


def private_bytes(pid: int) -> int:
    """Return the private memory of a process, in bytes; 0: it is gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process at the end of its forking thread.

    ``parent``: process id of the parent; if it is gone already, this process ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_with(other: int) -> None:
    """Kill this process when another one ends, whatever forked this one.

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
        ValueError: No process can handle a signal of this name.
    """
    found: Sequence[str] = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name!r} is no signal that a process can handle")
    return tuple(signal.Signals[name] for name in found)


def meant_for_the_agent() -> tuple[signal.Signals, ...]:
    """Return the agent's signals: ``--signals-to-handle``, SIGTERM, SIGINT and the notice."""
    named = parse_signals(os.environ.get(VARIABLE, _DEFAULT))
    return tuple(dict.fromkeys((*_ALWAYS, *named)))
