"""The most memory that a command of ``scalai`` took: measured, not bounded.

A bound that is grazed fails or hangs with another numpy or allocator; a ratio of two peaks does
not.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from scalai.converters import checksums as records
from scalai.converters import consistency as verify
from scalai.converters import engine, forked
from scalai.launch import cli

TIMEOUT_S = 240
SAMPLE_S = 0.002


def peak_bytes(*arguments: object) -> int:
    """Run ``scalai`` in one fresh process, without workers of its own; return the most memory that
    it had beside mapped files."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.splitlines()[-1])


def in_this_process(function: Any, items: Any, _: int) -> Any:
    return forked.map_forked(function, items, 0)


def main() -> None:
    modules: tuple[Any, ...] = engine, records, verify
    for module in modules:
        module.map_forked = in_this_process
    peak, has_ended = [0], threading.Event()

    def sample() -> None:
        while not has_ended.wait(SAMPLE_S):
            peak[0] = max(peak[0], anonymous_bytes())

    threading.Thread(target=sample, daemon=True).start()
    try:
        cli.main(sys.argv[1:])
    finally:
        has_ended.set()
        print(max(peak[0], anonymous_bytes()))


def anonymous_bytes() -> int:
    """Return what this process has of memory that no file backs."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    kilobytes = next(line.split()[1] for line in status.splitlines() if "RssAnon" in line)
    return int(kilobytes) << 10


if __name__ == "__main__":
    main()
