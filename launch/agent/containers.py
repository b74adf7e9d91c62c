"""Containers: processes killed with this one, because it is, or leads to, the first process of a
PID namespace (of a pod, say)."""

import os
from collections.abc import Iterator
from pathlib import Path

_INITIAL_NAMESPACE = 0xEFFFFFFC
"""Inode of the machine's own PID namespace. Source: PROC_PID_INIT_INO in the kernel's
include/linux/proc_ns.h."""
_WAITERS = {
    "ash", "bash", "busybox", "catatonit", "dash", "docker-init", "dumb-init", "env", "nice",
    "nohup", "sh", "tini", "tini-static", "timeout", "zsh",
}  # fmt: skip
"""First programs of containers that end with their child."""


def all_end_with_this_process() -> bool:
    """Return whether this process's end makes the kernel kill its whole container.

    True if it is the container's first process, or the first only waits for it. Other ends of a
    container, such as its pod's deletion, are invisible from inside.
    """
    if os.stat("/proc/self/ns/pid").st_ino == _INITIAL_NAMESPACE:
        return False
    if os.readlink("/proc/self") != str(os.getpid()):
        return os.getpid() == 1  # this /proc is another namespace's
    return all(_program(pid) in _WAITERS for pid in _ancestors(os.getpid()))


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the processes above one, up to the container's first; 0: started from outside (``docker
    exec``)."""
    while pid > 1:
        # Its second field, the program's name in brackets, may hold anything.
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def _program(pid: int) -> str:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""
