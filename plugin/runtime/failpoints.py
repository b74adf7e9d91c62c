"""Places at which a process can be made to die, to prove that nothing is lost there.

``SCALAI_FAILPOINT`` names a file. While that file says ``<place>:<rank or host>:<signal>``, the
worker of that rank or the agent of that host gets the signal (SIGKILL: it dies, SIGSTOP: it hangs)
when it, or its partner on the same host, first reaches the place; the file is renamed to
``<file>.reached``, so that it happens once. Without the variable nothing is looked at.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from select import POLLIN, poll

VARIABLE = "SCALAI_FAILPOINT"
ENDING_MS = 5000
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
        os.rename(path, f"{path}.reached")
    except FileNotFoundError:
        return  # nothing is to happen, or it has just happened elsewhere
    victim = _processes[name]
    ending = os.pidfd_open(victim)
    os.kill(victim, signal.Signals[number])
    if number == "SIGKILL" and victim != os.getpid():
        # Torch hangs where it ends a worker that is finished, and dying, but not yet dead.
        waiter = poll()
        waiter.register(ending, POLLIN)
        waiter.poll(ENDING_MS)
    os.close(ending)
