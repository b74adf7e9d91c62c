"""What the jobs of the resize benchmarks share: notes of what ended when, and when to end."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

LAST_STEP = "last_step"


class Marks:
    """What a rank has done and when."""

    def __init__(self, folder: Path, round_number: str) -> None:
        self._file = open(folder / f"round-{round_number}-{dist.get_rank()}.jsonl", "a")
        self.note("process", pid=os.getpid())

    def note(self, event: str, moment: tuple[float, float] | None = None, **facts: Any) -> None:
        """Note an event: now, or at a moment (monotonic clock, processor time)."""
        at, cpu = moment or (time.monotonic(), time.process_time())
        line = {"event": event, "at": at, "cpu": cpu, **facts}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def is_last(options: argparse.Namespace, first: int, step: int) -> bool:
    """Whether the job ends here: told by the flag, or by a file that is written well ahead."""
    if options.steps is not None:
        return bool(step - first >= options.steps)
    path = options.marks / LAST_STEP
    return path.exists() and step >= int(path.read_text())
