"""A file system of a few pages, filled while a checkpoint is written to it.

unshare -m --propagation private python full_disk.py DISK LAYOUT ...
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from scalai.converters.consistency import compare
from scalai.core.errors import ScalaiError
from support.checkpoints import carry, open_in_order, write

ALONE = ("unshare", "-m", "--propagation", "private")


def can_mount() -> bool:
    """Whether a file system can be mounted here that nobody else sees."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    probe = [*ALONE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, timeout=30, check=False).returncode == 0


def filler_of(disk: Path) -> Callable[[int, int], None]:
    def fill(done: int, total: int) -> None:
        with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert os.statvfs(disk).f_bavail == 0

    return fill


def main(disk: Path, layouts: list[str]) -> None:
    """Write each layout to the disk as it fills up, and again with room."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    subprocess.run(mount, check=True, timeout=30)
    source = write(disk / "source")
    for layout in layouts:
        new = disk / "new"
        try:
            carry(source, new, layout, progress=filler_of(disk))
        except ScalaiError as error:
            assert "No space left" in str(error) and "same command again" in str(error), error
        else:
            raise AssertionError(f"{layout} was written to a full disk")
        assert not new.exists(), f"{layout} left a checkpoint"
        (disk / "filler").unlink()
        carry(source, new, layout)
        assert list(compare(source, open_in_order(new), 0)) == [], layout
        assert sorted(entry.name for entry in disk.iterdir()) == ["new", "source"], layout
        shutil.rmtree(new)
        print(layout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
