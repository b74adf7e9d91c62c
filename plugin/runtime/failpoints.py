"""Places at which a process can be made to die, to prove that nothing is lost there.

``SCALAI_FAILPOINT`` names a file. While that file says ``<place>:<rank or host>:<signal>``, the
worker of that rank or the agent of that host gets the signal (SIGKILL: it dies, SIGSTOP: it hangs)
when it, or its partner on the same host, first reaches the place; the file is renamed to
``<file>.reached``, so that it happens once. Instead of a signal ``exit <code>`` ends the process,
and ``raise <name of an exception>`` raises it, where that process itself is there. Without the
variable nothing is looked at.
"""

import builtins
import os
import signal
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "SCALAI_FAILPOINT"
_processes: dict[str, int] = {}


def here(processes: Mapping[str, int]) -> None:
    """Name the processes that may be killed from this one: its own and, on an agent, its workers,
    on a worker, its agent. Numbers by rank and by host name."""
    _processes.clear()
    _processes.update(processes)


def reached(place: str) -> None:
    """Signal the process that was named, if it is one of those that ``here`` named."""
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
