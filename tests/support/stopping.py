"""Processes that stand still."""

import os
import signal
from pathlib import Path

from support.waiting import wait_until

STOPS_S = 20.0


def stop(process: int) -> None:
    """Stop a process, and return once every thread of it stands still: until then one of them may
    answer."""
    os.kill(process, signal.SIGSTOP)

    def stands() -> bool:
        threads = Path(f"/proc/{process}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads)

    wait_until(stands, f"process {process} stands still", STOPS_S)
