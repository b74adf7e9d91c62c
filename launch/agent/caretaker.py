"""The agent that started a coordinator in its own container: stays until the job has ended, because
its end would end the coordinator."""

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scalai.launch.config.job_spec import JobSpec

log = logging.getLogger(__name__)

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


POLL_S = 0.1
AHEAD = (
    "event=container The coordinator runs in this container and ends with it. Drained first, this "
    "agent stays, without workers, until the job has ended on the other hosts; where the container "
    "is killed sooner (the scheduler's grace period is over), these hosts stop too, and keep their "
    "newest generation. To drain hosts in any order start `scalai coordinator` in a container of "
    "its own, before the agents."
)


def say_ahead(spec: JobSpec) -> None:
    """This agent has just started a coordinator: warn of the consequences in a container."""
    if spec.max_hosts > 1 and all_end_with_this_process():
        log.warning(AHEAD)


def stay(coordinator: "subprocess.Popen[bytes]", must_end: Callable[[], bool]) -> None:
    """Return after the coordinator's end, or at a signal; at once if it needs nobody."""
    if coordinator.poll() is not None or not all_end_with_this_process():
        return
    log.info(
        "event=stay This agent is done; it stays for the coordinator, which runs in its container, "
        "until the job has ended. Another signal ends both, and with them the job."
    )
    while coordinator.poll() is None and not must_end():
        time.sleep(POLL_S)
