"""Places at which a process can be made to die, to prove that nothing is lost there.

``SCALAI_FAILPOINT=<place>:<rank or host>:<file>`` kills the first process of that rank or host that
reaches the place, with SIGKILL; the file, made by the kill, keeps it from happening again. Without
the variable nothing is looked at.
"""

import os
import signal

VARIABLE = "SCALAI_FAILPOINT"


def reached(place: str, who: str | None = None) -> None:
    """Die here if this process (``who``: a host's name; None: this worker's rank) was told to."""
    order = os.environ.get(VARIABLE)
    if order is None:
        return
    wanted, name, once = order.split(":", 2)
    if wanted != place or name != (who or os.environ.get("RANK")):
        return
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
