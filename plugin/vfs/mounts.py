"""Mount points: which are in use, which are dead, and how one is given back.

A mount is dead when the process that served it was killed: whatever touches it gets ENOTCONN at
once, nothing hangs. It stays in the kernel's table until somebody unmounts it.
"""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import RefusedError, UsageError

KIND = "fuse.scalai"
UNMOUNT_S = 30.0
_TABLE = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """An entry of the kernel's table: where, of which file system, and what it calls itself."""

    point: Path
    kind: str
    source: str


def find_mount(point: Path) -> Mount | None:
    """Return what is mounted at a path, the uppermost; None: nothing is."""
    found = None
    # Any byte may be in a name but these two, which the kernel quotes.
    for line in filter(None, _TABLE.read_bytes().split(b"\n")):
        before, _, behind = line.partition(b" - ")
        path = re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), before.split(b" ")[4])
        if path == os.fsencode(point):
            kind, source = map(os.fsdecode, behind.split(b" ")[:2])
            found = Mount(point, kind, source)
    return found


def is_dead(mount: Mount) -> bool:
    """Whether nobody serves a mount any more."""
    try:
        os.statvfs(mount.point)  # what stat() answers the kernel may remember
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def absolute(point: Path) -> Path:
    """Return a mount point as the kernel's table has it; what is mounted there is not touched."""
    return Path(os.path.realpath(point.parent)) / point.name


def prepare(point: Path) -> None:
    """See that a folder can be mounted over; a dead mount of Scalai that is there goes first.

    Raises:
        UsageError: It is in use, no folder, not empty, or another user's.
    """
    mount = find_mount(point)
    if mount is not None and mount.kind == KIND and is_dead(mount):
        unmount(point, is_lazy=True)
        mount = find_mount(point)
    if mount is not None:
        raise UsageError(
            f"{point} is in use: {mount.source} ({mount.kind}) is mounted there. Unmount it "
            "(scalai unmount), or name another folder."
        )
    if not point.is_dir():
        raise UsageError(f"{point} is no folder. Make it: mkdir -p {point}")
    if point.stat().st_uid != os.getuid():
        raise UsageError(f"{point} is another user's. Name a folder of your own.")
    if any(point.iterdir()):
        raise UsageError(f"{point} is not empty: a mount would hide that. Name an empty folder.")


def unmount(point: Path, *, is_lazy: bool) -> None:
    """Unmount what Scalai has mounted.

    Args:
        is_lazy: Also where files are open: the name is free at once, and readers go on until they
            close them. Always so of a dead mount.

    Raises:
        UsageError: Nothing of Scalai's is mounted there. RefusedError: It is busy.
    """
    mount = find_mount(point)
    if mount is None or mount.kind != KIND:
        found = "nothing" if mount is None else f"{mount.source} ({mount.kind})"
        raise UsageError(f"{found} is mounted at {point}, no tree of Scalai's.")
    done = subprocess.run(
        _program(is_lazy or is_dead(mount), point), capture_output=True, text=True,
        timeout=UNMOUNT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RefusedError(
            f"{point} cannot be unmounted: {done.stderr.strip()} Close what is open there (fuser "
            f"-m {point} lists it), or add --lazy."
        )


def _program(is_lazy: bool, point: Path) -> Sequence[str]:
    helper = shutil.which("fusermount3")
    if helper is not None:
        return [helper, "-uz" if is_lazy else "-u", str(point)]
    return ["umount", *(["-l"] if is_lazy else []), str(point)]
