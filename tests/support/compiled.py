"""What DeepSpeed compiles at its first use, compiled before a test waits for it."""

import fcntl
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from support.waiting import wait_until

DEADLINE_S = 1500.0
"""A minute on an idle machine; a busy one takes many times as long."""
BUILD = """
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder({!r}).load()
"""


def compile_op(builder: str, name: str) -> None:
    """Have an extension of DeepSpeed compiled for the CPU, by one of the processes of a run.

    Args:
        builder: DeepSpeed's class that builds it.
        name: Its folder below ``TORCH_EXTENSIONS_DIR``.

    Workers that compile in a test may be given up there: the lock that they leave would stop all
    that come later.
    """
    path = Path(tempfile.gettempdir()) / f"scalai-tests-compile-{os.getuid()}.lock"
    with path.open("a") as file:

        def is_mine() -> bool:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        wait_until(is_mine, f"the lock {path}", DEADLINE_S, every_s=0.5)
        root = os.environ.get("TORCH_EXTENSIONS_DIR")
        if root is not None:  # of this checkout alone: nobody else compiles there now
            Path(root, name, "lock").unlink(missing_ok=True)
        subprocess.run(
            [sys.executable, "-c", BUILD.format(builder)], check=True, capture_output=True,
            timeout=DEADLINE_S, env={**os.environ, "DS_ACCELERATOR": "cpu"},
        )  # fmt: skip
