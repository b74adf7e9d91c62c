"""A script on one rank, without any launcher: the reference of a job that changes its ranks."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.accelerator import ACCELERATOR
from support.ports import free_port


def start_alone(folder: Path, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start a script; what it prints goes to ``log`` in the folder."""
    environment = {
        **os.environ, "DS_ACCELERATOR": ACCELERATOR, "OMP_NUM_THREADS": "1",
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")),
    }  # fmt: skip
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
