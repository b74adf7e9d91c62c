"""Whether this host can build the next round's model beside the one that trains, and that the
training is not what pays where that was a mistake."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from scalai.store.pool import available_memory

FIRST_TO_GO = "1000"
"""Adjustment of the kernel's choice of a process to kill when memory runs out (proc(5))."""
MEMORY_RESERVE = 1.25
"""Private memory that a worker to come may take, over what the largest present one takes."""


def obstacle(policy: str, workers: int, present: Iterable[int], *, on_devices: bool) -> str | None:
    """Return why ``workers`` more must not be built now, None where they can.

    Args:
        policy: ``[resize] standby``: ``auto``, ``always`` or ``never``.
        workers: How many would be built on this host.
        present: Process numbers of the workers that train here.
        on_devices: Whether the state of those is in device memory, which seldom holds two models.
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
    """Have the kernel kill these processes before any other when memory runs out, or as readily as
    this one, which started them."""
    adjustment = FIRST_TO_GO if is_standby else Path("/proc/self/oom_score_adj").read_text()
    for pid in _with_offspring(processes):
        with contextlib.suppress(OSError):  # it is gone
            Path(f"/proc/{pid}/oom_score_adj").write_text(adjustment)


def _with_offspring(workers: Iterable[int]) -> set[int]:
    """Return these processes and what they have started, such as the writers of their saves: each
    worker has a session of its own."""
    sessions, found = set(workers), set(workers)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, ProcessLookupError):
            if os.getsid(int(entry.name)) in sessions:
                found.add(int(entry.name))
    return found


def private_bytes(pid: int) -> int:
    """Return the memory that only this process has, in bytes; 0 where it is gone."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
