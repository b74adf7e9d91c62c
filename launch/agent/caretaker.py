"""The agent that started a coordinator in its own container: stays until the job has ended, because
its end would end the coordinator; with a named register, until another host may take over."""

import logging
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.registers import NO_LEASE
from scalai.launch.coordinator.server import FAREWELL_S

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
FOLLOWED_S = FAREWELL_S + 15.0
"""Stay beside a coordinator that another host can follow, in seconds: longer than the coordinator
of an ended job lives."""
AHEAD = "event=container The coordinator runs in this container and ends with it. "
FOLLOWED = (
    "Then another host takes over, and the workers train on meanwhile; drained, this agent stays "
    f"for {FOLLOWED_S:.0f} s."
)
ALONE = (
    "Drained first, this agent stays, without workers, until the job has ended on the other hosts; "
    "where the container is killed sooner (the scheduler's grace period is over), these hosts stop "
    "too, and keep their newest generation. To drain hosts in any order name --coordinator-lease, "
    "or start `scalai coordinator` in a container of its own, before the agents."
)


def say_ahead(spec: JobSpec) -> None:
    """This agent has just started a coordinator: warn of the consequences in a container."""
    if spec.max_hosts > 1 and all_end_with_this_process():
        if _can_be_followed(spec):
            log.info(AHEAD + FOLLOWED)
        else:
            log.warning(AHEAD + ALONE)


def stay(
    spec: JobSpec, coordinator: "subprocess.Popen[bytes]", must_end: Callable[[], bool]
) -> None:
    """Return after the coordinator's end, or at a signal; at once if it needs nobody. If another
    host can take over, return soon: a container that is to go is replaced behind its end."""
    if coordinator.poll() is not None or not all_end_with_this_process():
        return
    if _can_be_followed(spec):
        until, ends = time.monotonic() + FOLLOWED_S, f"for at most {FOLLOWED_S:.0f} s"
    else:
        until, ends = math.inf, "until the job has ended"
    log.info(
        "event=stay This agent is done; it stays for the coordinator, which runs in its container, "
        "%s. Another signal ends both%s.", ends, "" if until < math.inf else ", and the job",
    )  # fmt: skip
    while coordinator.poll() is None and not must_end() and time.monotonic() < until:
        time.sleep(POLL_S)


def _can_be_followed(spec: JobSpec) -> bool:
    """Whether another host can have the next coordinator: a person has named a register of all."""
    return spec.options.coordinator_lease not in (None, NO_LEASE)
