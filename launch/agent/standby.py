"""Decides whether to build the next round's model beside the running one; after a wrong guess on
memory, the kernel kills the new workers first."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from scalai.store.pool import available_memory

FIRST_TO_GO = "1000"
"""Adjustment of the kernel's choice when memory runs out (proc(5))."""
MEMORY_RESERVE = 1.25
"""Private memory of a new worker, relative to the largest present one."""


def obstacle(policy: str, workers: int, present: Iterable[int], *, on_devices: bool) -> str | None:
    """Return the obstacle to building ``workers`` more now; None: there is none.

    Args:
        policy: ``[resize] standby``: ``auto``, ``always`` or ``never``.
        workers: Number of workers to build on this host.
        present: Process numbers of the training workers here.
        on_devices: Whether their state is in device memory, seldom enough for two models.
    """
    if policy == "never":
        return "[resize] standby is never"
    used = max((private_bytes(pid) for pid in present), default=0)
    if policy == "always" or not used:
        return None
    if on_devices:
        return "device memory holds one model ([resize] standby = 'always' builds all the same)"
    needed, free = int(workers * used * MEMORY_RESERVE), available_memory()
    if needed > free:
        return f"{workers} workers may take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
    return None


def offer(processes: Iterable[int], *, is_standby: bool) -> None:
    """Mark processes as the first to kill when memory runs out, or as equal to this one."""
    adjustment = FIRST_TO_GO if is_standby else Path("/proc/self/oom_score_adj").read_text()
    for pid in _with_offspring(processes):
        with contextlib.suppress(OSError):  # it is gone
            Path(f"/proc/{pid}/oom_score_adj").write_text(adjustment)


def _with_offspring(workers: Iterable[int]) -> set[int]:
    """Return these processes and their descendants, such as writers of saves: each worker has its
    own session."""
    sessions, found = set(workers), set(workers)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, ProcessLookupError):
            if os.getsid(int(entry.name)) in sessions:
                found.add(int(entry.name))
    return found


def private_bytes(pid: int) -> int:
    """Return the private memory of a process, in bytes; 0: it is gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
