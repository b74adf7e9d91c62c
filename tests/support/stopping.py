"""Processes that stand still."""

import os
import signal
import time
from pathlib import Path

STOPS_S = 20.0


def stop(process: int) -> None:
    """Stop a process, and return once every thread of it stands still: until then one of them may
    answer."""
    os.kill(process, signal.SIGSTOP)
    end = time.monotonic() + STOPS_S
    while any(
        stat.read_text().rpartition(")")[2].split()[0] != "T"
        for stat in Path(f"/proc/{process}/task").glob("*/stat")
    ):
        assert time.monotonic() < end, "it does not stop"
        time.sleep(0.01)
