"""On the path of a job under test: files of checkpoints are not written to the end while there is a
file that the test has made. Python imports it in every process, also in those that write saves."""

import os
import time

GATE = os.environ.get("SCALAI_TEST_GATE")
"""Saves wait before the end of each ``.distcp`` file while this path exists."""

if GATE is not None:
    _fsync = os.fsync

    def _wait_and_sync(file: int, gate: str = GATE) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".distcp"):
            while os.path.exists(gate):
                time.sleep(0.05)
        _fsync(file)

    os.fsync = _wait_and_sync  # type: ignore[assignment]
