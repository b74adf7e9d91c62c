"""Counts the kernel's out-of-memory kills on this host."""

import re
from collections.abc import Mapping
from pathlib import Path

from scalai.core.job.endings import OUT_OF_HOST_MEMORY

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def oom_kills(cgroups: Path = CGROUPS, proc: Path = PROC) -> dict[str, int]:
    """Return the number of out-of-memory kills so far, by counter: this process's cgroup (version
    2, else 1), and the whole machine. Unreadable ones are left out."""
    own = _text(proc / "self/cgroup")
    path = re.search(r"^0::/?(.*)$", own, re.MULTILINE)
    old = re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/?(.*)$", own, re.MULTILINE)
    texts = {
        "cgroup": _text(cgroups / (path[1] if path else "") / "memory.events")
        or _text(cgroups / "memory" / (old[1] if old else "") / "memory.oom_control"),
        "machine": _text(proc / "vmstat"),
    }
    counts = {
        where: re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for where, text in texts.items()
    }
    return {where: int(found[1]) for where, found in counts.items() if found}


def describe_rise(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Describe kills in between; empty: there were none."""
    for where in ("cgroup", "machine"):
        rise = after.get(where, 0) - before.get(where, 0)
        if where in before and rise > 0:
            whose = "this cgroup's" if where == "cgroup" else "the machine's"
            return f"{OUT_OF_HOST_MEMORY}: {whose} count of oom_kill rose by {rise}"
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
