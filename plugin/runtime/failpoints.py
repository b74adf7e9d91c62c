"""Places to let a process die, to prove that nothing is lost there.

``SCALAI_FAILPOINT`` names a file with ``<place>:<rank or host>:<signal>``. The worker of this rank
or the agent of this host gets the signal (SIGKILL: it dies, SIGSTOP: it hangs) when it, or its
partner on the same host, first reaches the place; the file is renamed to ``<file>.reached``, so
that it happens once. Instead of a signal ``exit <code>`` ends the process itself, and ``raise <name
of an exception>`` raises in it. Without the variable nothing is read.
"""

import builtins
import os
import signal
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "SCALAI_FAILPOINT"
_processes: dict[str, int] = {}


def here(processes: Mapping[str, int]) -> None:
    """Set the processes this one may signal, by rank and by host name: itself with, on an agent,
    its workers; on a worker, its agent.
    """
    _processes.clear()
    _processes.update(processes)


def reached(place: str) -> None:
    """Signal the process in the file, if it is one of ``here``."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    try:
        wanted, name, number = Path(path).read_text().split(":")
        if wanted != place or name not in _processes:
            return
        what, _, value = number.strip().partition(" ")
        if what in ("exit", "raise") and _processes[name] != os.getpid():
            return
        os.rename(path, f"{path}.reached")
    except FileNotFoundError:
        return  # nothing is to happen, or it has just happened elsewhere
    if what == "exit":
        os._exit(int(value))
    if what == "raise":
        raise getattr(builtins, value)(f"{value} was wanted at {place}")
    os.kill(_processes[name], signal.Signals[what])
