"""Mount points in use, dead mounts, silent mounts, and their end.

A mount is dead after the death of its serving process: each access gets ENOTCONN at once. It stays
in the kernel's table until its unmount. It is silent while that process is stopped or hangs: each
access waits until the process goes on or ends.
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
"""Deadline of a mount's answer, seconds; behind it the mount is silent."""
_TABLE = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """An entry of the kernel's table: mount point, file system, and source."""

    point: Path
    kind: str
    source: str


def find_mount(point: Path) -> Mount | None:
    """Uppermost mount at a path; None: there is none."""
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
    """Mount of Scalai's above a path; None: there is none. Links are followed; the mount itself is
    asked only for a link into it."""
    whole = Path(os.path.abspath(path))
    if found := _mount_above(whole):
        return found
    return _mount_above(Path(os.path.realpath(whole)))


def _mount_above(path: Path) -> Mount | None:
    mounts = filter(None, map(find_mount, (path, *path.parents)))
    found = next(mounts, None)
    return found if found is not None and found.kind == KIND else None


class MountHealth(Enum):
    """State of a mount's serving process."""

    ANSWERS = "answers"
    DEAD = "dead"
    SILENT = "silent"


def health_of(mount: Mount, within_s: float | None = None) -> MountHealth:
    """Ask a mount, in a thread: nothing else ends the wait for one that is silent.

    Args:
        within_s: Deadline of the answer, seconds; None: ``ANSWER_S``.
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
    """Way out of a silent mount, as the end of a sentence about it."""
    return (
        "does not answer: its process is stopped or hangs. Have that go on (kill -CONT) or end it "
        f"(kill -KILL; pgrep -f 'mount .*{point.name}' finds it), and mount anew (scalai mount)."
    )


def absolute(point: Path) -> Path:
    """Mount point in the form of the kernel's table; the mount itself is not touched."""
    return Path(os.path.realpath(point.parent)) / point.name


def prepare(point: Path) -> None:
    """Check that a folder can be mounted over; a dead mount of Scalai's there goes first.

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
    """End a mount of Scalai's.

    Args:
        is_lazy: Also with open files: the name is free at once, and readers go on until they close
            them. Always so for a dead mount.

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
