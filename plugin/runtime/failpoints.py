"""Places at which a process can be made to die, to prove that nothing is lost there.

``SCALAI_FAILPOINT=<place>:<rank or host>:<file>`` kills the worker of that rank or the agent of
that host, with SIGKILL, when it or its partner on the same host first reaches the place; the file,
made by the kill, keeps it from happening again. Without the variable nothing is looked at.
"""

import os
import signal
from collections.abc import Mapping

VARIABLE = "SCALAI_FAILPOINT"
_processes: dict[str, int] = {}


def here(processes: Mapping[str, int]) -> None:
    """Name the processes that may be killed from this one: its own and, on an agent, its workers,
    on a worker, its agent. Numbers by rank and by host name."""
    _processes.clear()
    _processes.update(processes)


def reached(place: str) -> None:
    """Kill the process that was named, if it is one of those that ``here`` named."""
    order = os.environ.get(VARIABLE)
    if order is None:
        return
    wanted, name, once = order.split(":", 2)
    if wanted != place or name not in _processes:
        return
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(_processes[name], signal.SIGKILL)
