"""One owner for a host's directory: a lock file with the process of its holder.

The kernel's lock (flock) ends with the process, yet a child with the inherited descriptor may keep
it after its parent's death; then the process id, its start time and the boot id prove the owner's
death.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.store.secure import Folder

LOCK = "lock"
GUARD = "lock.guard"
GUARD_S = 30.0
"""Longest hold of the guard by another process; normally a moment."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: id and start time (clock ticks since boot) in a pid namespace, on one boot of a
    machine.
    """

    pid: int
    started: int
    namespace: str
    boot: str

    @classmethod
    def of_this_process(cls) -> "Owner":
        """Return the calling process."""
        pid = os.getpid()
        return cls(pid, _start_time(pid) or 0, _namespace(), _boot_id())

    def is_gone(self) -> bool:
        """Return True if this process is surely dead. False if unknown here."""
        if self.boot != _boot_id():
            return True
        if self.namespace != _namespace():
            return False
        return _start_time(self.pid) != self.started

    def has_died_here(self) -> bool:
        """Return True for a surely dead process of this machine's present boot."""
        return self.boot == _boot_id() and self.is_gone()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _start_time(pid: int) -> int | None:
    """Return the start time of a process, None if there is none or it is an unreaped zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold spaces; the state follows it.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZXx" else int(fields[19])


def _read_owner(folder: Folder) -> Owner | None:
    try:
        text = folder.read(LOCK)
    except FileNotFoundError:
        return None
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        # An owner died between creating and writing the file.
        return None


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _guard(folder: Folder) -> Iterator[None]:
    """Let one process at a time look at the lock and replace it. Held for moments only.

    Raises:
        StoreError: Another process holds it for ``GUARD_S``: it stands still.
    """
    descriptor = folder.open_file(GUARD, os.O_RDWR | os.O_CREAT)
    try:
        end = time.monotonic() + GUARD_S
        while not _try_flock(descriptor):
            if time.monotonic() > end:
                raise StoreError(
                    f"another process has been looking at the lock of {folder.path} for "
                    f"{GUARD_S:.0f} s (it holds {GUARD}). Is an agent stopped? Let it go on, or "
                    "end it."
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


class StoreLock:
    """A held lock of one directory. ``release`` or the end of the process ends it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, folder: Folder) -> "StoreLock":
        """Take the lock of a folder without waiting.

        Raises:
            StoreError: A live process holds it; names the process. Or it cannot be signed.
        """
        with _guard(folder):
            descriptor = folder.open_file(LOCK, os.O_RDWR | os.O_CREAT)
            if not _try_flock(descriptor):
                os.close(descriptor)
                owner = _read_owner(folder)
                if owner is None or not owner.is_gone():
                    raise StoreError(_in_use(folder.path, owner))
                # An orphan of the dead owner still has the old file open: leave it that one, lock a
                # new one.
                folder.remove(LOCK)
                descriptor = folder.open_file(LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sign(descriptor, folder.path)
        return cls(descriptor)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _sign(descriptor: int, directory: Path) -> None:
    """Write this process into a held lock. Raises ``StoreError`` and releases the lock if there is
    no room.
    """
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(Owner.of_this_process())).encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"the lock of {directory} cannot be written ({error.strerror}). Make room there, or "
            "choose another --store-dir."
        ) from error


def _in_use(directory: Path, owner: Owner | None) -> str:
    who = f"process {owner.pid}" if owner else "another process"
    return (
        f"{directory} is in use by {who}. Stop that agent, or give this one another --job, host "
        "name or --store-dir."
    )


def find_owner(folder: Folder) -> Owner | None:
    """Return the live holder of a folder's lock, or None. Changes nothing."""
    try:
        descriptor = folder.open_file(LOCK, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        if _try_flock(descriptor):
            return None
    finally:
        os.close(descriptor)
    owner = _read_owner(folder)
    if owner is None:
        # Locked but not yet signed: a live process with an unknown pid.
        return Owner(0, 0, "", _boot_id())
    return None if owner.is_gone() else owner
