"""Mount points: which are in use, which are dead or silent, and how one is given back.

A mount is dead when the process that served it was killed: whatever touches it gets ENOTCONN at
once, nothing hangs. It stays in the kernel's table until somebody unmounts it. It is silent where
that process is stopped or hangs: whatever touches it waits until the process goes on or ends.
"""

import errno
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from scalai.core.errors import RefusedError, UsageError

KIND = "fuse.scalai"
UNMOUNT_S = 30.0
ANSWER_S = 10.0
"""How long a mount may take to answer before it is called silent."""
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


def mount_of(path: Path) -> Mount | None:
    """Return the mount of Scalai's that a path lies in; None: it lies in none. Links are followed;
    a mount is asked only where one leads into it."""
    whole = Path(os.path.abspath(path))
    if found := _mount_above(whole):
        return found
    return _mount_above(Path(os.path.realpath(whole)))


def _mount_above(path: Path) -> Mount | None:
    mounts = filter(None, map(find_mount, (path, *path.parents)))
    found = next(mounts, None)
    return found if found is not None and found.kind == KIND else None


class MountHealth(Enum):
    """Whether somebody serves a mount."""

    ANSWERS = "answers"
    DEAD = "dead"
    SILENT = "silent"


def health_of(mount: Mount, within_s: float | None = None) -> MountHealth:
    """Ask a mount, in a thread: nothing else ends the wait for one that is silent.

    Args:
        within_s: It is silent when it has not answered by then, in seconds; None: ``ANSWER_S``.
    """
    found = MountHealth.SILENT

    def ask() -> None:
        nonlocal found
        try:
            os.statvfs(mount.point)  # what stat() answers the kernel may remember
            found = MountHealth.ANSWERS
        except OSError as error:
            is_dead = error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
            found = MountHealth.DEAD if is_dead else MountHealth.ANSWERS

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWER_S if within_s is None else within_s)
    return found


def silence_of(point: Path) -> str:
    """Say what can be done about a silent mount, as the end of a sentence about it."""
    return (
        "does not answer: its process is stopped or hangs. Have that go on (kill -CONT) or end it "
        f"(kill -KILL; pgrep -f 'mount .*{point.name}' finds it), and mount anew (scalai mount)."
    )


def absolute(point: Path) -> Path:
    """Return a mount point as the kernel's table has it; what is mounted there is not touched."""
    return Path(os.path.realpath(point.parent)) / point.name


def prepare(point: Path) -> None:
    """See that a folder can be mounted over; a dead mount of Scalai that is there goes first.

    Raises:
        UsageError: It is in use, no folder, not empty, or another user's.
    """
    mount = find_mount(point)
    if mount is not None and mount.kind == KIND:
        health = health_of(mount)
        if health is MountHealth.SILENT:
            raise UsageError(f"{point} is in use, and {silence_of(point)}")
        if health is MountHealth.DEAD:
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
        UsageError: Nothing of Scalai's is mounted there. RefusedError: It is busy, or silent.
    """
    mount = find_mount(point)
    if mount is None or mount.kind != KIND:
        found = "nothing" if mount is None else f"{mount.source} ({mount.kind})"
        raise UsageError(f"{found} is mounted at {point}, no tree of Scalai's.")
    health = MountHealth.DEAD if is_lazy else health_of(mount)
    if health is MountHealth.SILENT:
        raise RefusedError(f"{point} {silence_of(point)} Or free its name: add --lazy.")
    done = subprocess.run(
        _program(health is MountHealth.DEAD, point), capture_output=True, text=True,
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
