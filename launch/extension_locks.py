"""Locks of torch's extension builds. A build that was killed leaves its lock, and whoever wants the
extension afterwards waits for it without a word and without end.

Source: ``FileBaton`` of torch/utils/file_baton.py and ``_get_build_directory`` of
torch/utils/cpp_extension.py, 2.13: who builds keeps the lock's file open.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

VARIABLE = "TORCH_EXTENSIONS_DIR"


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock: where, how old, and which process of this host has it open (None: none that may be
    looked at)."""

    path: Path
    age_s: float
    pid: int | None


def extensions_root() -> Path:
    """Return the directory below which torch builds extensions for this environment."""
    return Path(os.environ.get(VARIABLE) or get_default_build_root())


def find_locks(root: Path) -> Iterator[Lock]:
    """Yield the locks below a directory. Torch's own has one more level, for Python's version and
    the accelerator."""
    for path in sorted({*root.glob("*/lock"), *root.glob("*/*/lock")}):
        try:
            age_s = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            continue  # that build has just ended
        yield Lock(path, age_s, _holder(path))


def _holder(path: Path) -> int | None:
    """Return a process that has a file open."""
    wanted = os.path.realpath(path)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            for name in os.listdir(process / "fd"):
                if os.path.realpath(process / "fd" / name) == wanted:
                    return int(process.name)
    return None
