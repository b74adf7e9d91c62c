"""The directory of one host in a store: its lock, numbered folders, recycled files and budget."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.store.files import FileLayout
from scalai.store.lock import StoreLock
from scalai.store.manifest import is_spare
from scalai.store.pinned import expire_dropped, pinned_files, remove_stale
from scalai.store.places import MANIFEST, NUMBERED, check_host, check_job
from scalai.store.pool import FilePool, Making, Makings, free_bytes
from scalai.store.secure import open_below

RECYCLED = "recycled"
REMOVALS = 5
PAUSE_S = 0.05
"""Pause between two removals."""
GIVEN_BACK_S = 10.0
"""Longest wait of a snapshot for room already being given back."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a host's directory: in use by generations and snapshots, in reusable files, and free
    on the file system.
    """

    in_use: int
    reusable: int
    free: int


def check_budget(
    needed: int, others: int, room: Room, limit: int | None, host: str, directory: Path
) -> int:
    """Return the bytes of files to keep for reuse beside a snapshot of ``needed`` bytes.

    ``others`` are the bytes of other hosts in a generation here: the next one has as many, in the
    pages of the last but one. ``limit`` is the store's in bytes; None: the file system's.

    Raises:
        StoreError: There is no room for two generations of this size, beside the bytes in use.
    """
    budget = 2 * needed
    if limit is not None and max(budget, room.in_use + needed) > limit:
        raise StoreError(
            f"the pieces of host {host!r} are {needed} bytes and two generations of them "
            f"need {budget}, beside {room.in_use} in use; the store may take {limit}. Raise "
            "--store-budget-gb, or spread the job over more hosts."
        )
    available = room.free + room.reusable
    if needed > available or budget > available + room.in_use:
        raise StoreError(
            f"the pieces of host {host!r} are {needed} bytes and two generations of them "
            f"need {budget}; {directory} has {room.in_use} in use, {room.reusable} to reuse and "
            f"{room.free} free. Enlarge the shared memory (docker run "
            f"--shm-size={_gibibytes(budget)}g) or choose another --store-dir."
        )
    keep = max(budget + 2 * others - room.in_use, needed + others)
    return keep if limit is None else min(keep, limit - room.in_use)


def _gibibytes(size_bytes: int) -> int:
    return -(-size_bytes >> 30) if size_bytes else 1


class HostDirectory:
    """An open directory. Thread-safe; closing releases the lock.

    ``changed`` is notified of folders made and removed. Its mutex is the only one of a store: names
    and sizes of folders and files change under it alone. Pages are made without it.

    Raises:
        StoreError: Another live process has it open, or it is not this user's alone.
        UsageError: The name of a job or host is invalid.
    """

    def __init__(self, store_dir: Path, job: str, host: str) -> None:
        self.path = path = store_dir / check_job(job) / check_host(host)
        with open_below(store_dir, job, host, make=True) as folder:
            self._lock = StoreLock.acquire(folder)
        remove_stale(path)
        self.mutex = threading.RLock()
        self.changed = threading.Condition(self.mutex)
        self.makings = Makings(self.changed)
        self._pool = FilePool(path / RECYCLED, self.mutex)
        self._next_number = 0

    def close(self) -> None:
        """Release the lock. The content stays for the next owner."""
        self._lock.release()

    def remove(self) -> None:
        """Remove all content, and close; the job's directory too after the last host.

        Ends the making of files. Leaves unremovable folders, with a warning.
        """
        try:
            self.makings.close()
            with self.mutex:
                _remove(self.path)
        except (OSError, StoreError) as error:
            log.warning("event=left directory=%s: %s Run scalai clean.", self.path, error)
        self.close()
        try:
            self.path.parent.rmdir()
        except OSError:
            pass  # Other hosts of the job are still there.

    def adopt(self) -> Iterator[tuple[str, int, Path]]:
        """Yield kind, number and path of an earlier owner's folders. New numbers are higher."""
        for entry in sorted(os.listdir(self.path)):
            match = NUMBERED.fullmatch(entry)
            if match is not None:
                number = int(match[2])
                self._next_number = max(self._next_number, number + 1)
                yield match[1], number, self.path / entry

    def new(self, kind: str) -> Path:
        """Make a folder of this kind, with a new number."""
        with self.mutex:
            path = self.path / f"{kind}-{self._next_number}"
            self._next_number += 1
            path.mkdir(mode=0o700)
        return path

    def make_file(self, path: Path, layout: FileLayout, making: Making) -> None:
        """Make a file with this header, its pages faulted in. Blocks for seconds a GB for new
        pages.

        Ends pins of dropped generations if there is no room. Raises ``StoreError`` if there is
        still none, or it was given up.
        """
        try:
            self._pool.take(path, layout.size_bytes, making)
        except StoreError:
            making.check()
            if not self.expire_dropped():
                raise
            self._pool.take(path, layout.size_bytes, making)
        with open(path, "r+b") as file:
            file.write(layout.header)

    def recycle_file(self, path: Path) -> None:
        """Keep a file for ``make_file``."""
        self._pool.give(path)

    def recycle(self, folder: Path) -> None:
        """Keep the files of a folder for ``make_file``, and remove it."""
        with self.changed:
            # Without its manifest it is torn, even after a crash here.
            (folder / MANIFEST).unlink(missing_ok=True)
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                elif entry.name.startswith("."):
                    os.unlink(entry.path)
                else:
                    self._pool.give(Path(entry.path))
            folder.rmdir()
            self.changed.notify_all()

    def trim(self, keep_bytes: int) -> None:
        """Remove reusable files until at most so many bytes are left."""
        self._pool.trim(keep_bytes)

    def expire_dropped(self) -> bool:
        """End the pins of dropped generations: their room is needed. True if any ended."""
        with self.mutex:
            return expire_dropped(self.path)

    def room(self) -> Room:
        """Return the bytes in use, reusable and free.

        Room reserved for manifests counts as none of these: it is small, and soon given back.
        """
        with self.mutex:
            held = [
                entry.lstat()  # a link leads to bytes on a disk
                for kind in ("generation", "snapshot", "dropped", "fetched", "damaged")
                for entry in self.path.glob(f"{kind}-*/*")
                if not is_spare(entry)
            ]
            # A pin is a second name of a file.
            sizes = {each.st_ino: each.st_size for each in (*held, *pinned_files(self.path))}
            return Room(sum(sizes.values()), self._pool.size_bytes(), free_bytes(self.path))

    def make_room(
        self, needed: int, others: int, limit: int | None, is_temporary: Callable[[], bool]
    ) -> None:
        """Make a snapshot of ``needed`` bytes fit.

        Ends pins of dropped generations in the way. Waits up to ``GIVEN_BACK_S`` if the obstacle
        ``is_temporary``.

        Args:
            others: Bytes of other hosts in a generation here (``check_budget``).
            limit: Limit of the store in bytes; None: the file system's.

        Raises:
            StoreError: Two generations of this size do not fit, beside the bytes in use.
        """
        end = time.monotonic() + GIVEN_BACK_S
        with self.changed:
            while True:
                room = self.room()
                try:
                    keep = check_budget(needed, others, room, limit, self.path.name, self.path)
                    break
                except StoreError:
                    if self.expire_dropped():
                        continue
                    if not is_temporary() or not self.changed.wait(end - time.monotonic()):
                        raise
            self.trim(keep)
        log.info(
            "event=reserve host=%s distinct_bytes=%d budget_bytes=%d in_use_bytes=%d "
            "reusable_bytes=%d free_bytes=%d",
            self.path.name, needed, 2 * needed, room.in_use, room.reusable, room.free,
        )  # fmt: skip


def _remove(folder: Path) -> None:
    """Remove a folder while readers may still make and remove pins in it.

    Once the manifests are gone, readers find nothing to open. Raises ``OSError`` if it cannot be
    removed.
    """
    for _ in range(REMOVALS - 1):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(PAUSE_S)
    shutil.rmtree(folder)
