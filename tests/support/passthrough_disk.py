"""A disk that a test can have hang: a folder, shown by ``support.passthrough_files``."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.stopping import stop
from support.waiting import wait_until

DEADLINE_S = 60.0
HAS_FUSE = Path("/dev/fuse").exists() and shutil.which("fusermount3") is not None


@dataclass(frozen=True, slots=True)
class Disk:
    """``folder``: what it shows at ``point``, to be looked at while it hangs."""

    folder: Path
    point: Path
    process: "subprocess.Popen[bytes]"

    def hang(self) -> None:
        """From now on it answers nobody."""
        stop(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def passthrough_disk(folder: Path) -> Iterator[Disk]:
    """Give a disk below a folder; at the end it is gone, and whoever waits for it goes on."""
    shown, point = folder / "shown", folder / "disk"
    shown.mkdir()
    point.mkdir()
    command = [sys.executable, "-m", "support.passthrough_files", str(shown), str(point)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    try:

        def is_mounted() -> bool:
            assert process.poll() is None, "it has ended"
            return point.is_mount()

        wait_until(is_mounted, f"a disk at {point}", DEADLINE_S)
        yield Disk(shown, point, process)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        subprocess.run(["fusermount3", "-uz", str(point)], check=False, timeout=DEADLINE_S)
