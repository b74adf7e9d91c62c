"""The making of files, and files of dropped generations kept for the next one.

Writing into existing pages is ten times as fast as into new ones. Faulting new pages in takes
seconds a GB: it ends early once nobody needs the file.
"""

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.store.files import prefault

END_S = 60.0
"""Longest wait for the end of a given-up making; a step takes milliseconds."""

STEP_BYTES = 256 << 20
"""Bytes of pages made in one step; it can be given up between steps."""


class Making:
    """A running making of files. Made by ``Makings`` alone."""

    def __init__(self, *, is_snapshot: bool) -> None:
        self.is_snapshot = is_snapshot
        self.is_given_up = False

    def check(self) -> None:
        """Raise ``StoreError`` if it was given up. Called between steps, without the mutex."""
        if self.is_given_up:
            raise StoreError(
                "the files of a snapshot or a fetch are not needed any more: the round they were "
                "made for has ended. The next round makes its own."
            )


class Makings:
    """All makings of one store.

    Args:
        changed: Condition of the store's mutex.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._running: set[Making] = set()
        self._is_closed = False

    @contextmanager
    def begin(self, *, is_snapshot: bool) -> Iterator[Making]:
        """Run one, without the mutex.

        A snapshot gives earlier snapshots up and waits for their end: the files of two would not
        fit.

        Raises:
            StoreError: The store is closed, or an earlier one does not end.
        """
        making = Making(is_snapshot=is_snapshot)
        with self._changed:
            if is_snapshot:
                self.give_up()
                self._wait(lambda: not any(other.is_snapshot for other in self._running))
            if self._is_closed:
                raise StoreError("the store is closed: the job has ended.")
            self._running.add(making)
        try:
            yield making
        finally:
            with self._changed:
                self._running.discard(making)
                self._changed.notify_all()

    def give_up(self) -> None:
        """End the running snapshot, if any: its round has ended."""
        with self._changed:
            for making in self._running:
                making.is_given_up |= making.is_snapshot

    def close(self) -> None:
        """End all, wait for their end, and let none begin."""
        with self._changed:
            self._is_closed = True
            for making in self._running:
                making.is_given_up = True
            self._changed.notify_all()
            self._wait(lambda: not self._running)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        if not self._changed.wait_for(is_so, END_S):
            raise StoreError(
                f"the files of an earlier snapshot are still being made {END_S:.0f} s after they "
                "were given up. Is this host short of memory?"
            )


class FilePool:
    """The directory of reusable files. For one process (by the store's lock), any thread.

    Args:
        mutex: Mutex of the store: protects names and sizes of all its files.
    """

    def __init__(self, directory: Path, mutex: "threading.RLock") -> None:
        self.directory = directory
        self._mutex = mutex
        directory.mkdir(mode=0o700, exist_ok=True)
        numbers = [int(name) for name in os.listdir(directory) if name.isdigit()]
        self._next = max(numbers, default=-1) + 1

    def size_bytes(self) -> int:
        """Return the bytes of all files in the pool."""
        return sum(size for size, _ in self._files())

    def give(self, path: Path) -> None:
        """Take a file in by a move.

        A file with another hard link is only unlinked: its bytes belong to another reader.
        """
        with self._mutex:
            status = path.lstat()
            is_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1  # no link to a disk
            if not is_own or status.st_size == 0:
                path.unlink()
                return
            os.rename(path, self.directory / str(self._next))
            self._next += 1

    def take(self, path: Path, size_bytes: int, making: Making) -> None:
        """Make a file of ``size_bytes`` at ``path``, of old pages if there are any, the rest
        allocated and faulted in.

        The content is undefined. Blocks for seconds a GB of new pages, without the mutex.

        Raises:
            StoreError: The file system is full, or it was given up; then the file stays with the
                pages made so far.
        """
        kept = 0
        with self._mutex:
            making.check()
            old = self._choose(size_bytes)
            if old is not None:
                kept = min(old.stat().st_size, size_bytes)
                os.rename(old, path)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, kept)
            for low in range(kept, size_bytes, STEP_BYTES):
                making.check()
                high = min(low + STEP_BYTES, size_bytes)
                os.posix_fallocate(descriptor, low, high - low)
                prefault(descriptor, low, high)
        except OSError as error:
            with self._mutex:
                path.unlink(missing_ok=True)
            raise StoreError(
                f"{path} needs {size_bytes} bytes, but {error.strerror}; {free_bytes(path.parent)} "
                "are free. Enlarge the shared memory (--shm-size of docker run) or choose another "
                "--store-dir."
            ) from error
        finally:
            os.close(descriptor)

    def trim(self, keep_bytes: int) -> None:
        """Remove files, small ones first, until at most ``keep_bytes`` are left."""
        with self._mutex:
            files = self._files()
            total = sum(size for size, _ in files)
            for size, path in files:
                if total <= keep_bytes:
                    break
                path.unlink()
                total -= size

    def _files(self) -> list[tuple[int, Path]]:
        with self._mutex:
            return sorted(
                (entry.stat().st_size, Path(entry.path)) for entry in os.scandir(self.directory)
            )

    def _choose(self, size_bytes: int) -> Path | None:
        """Return the smallest file of at least this size, else the largest, else None."""
        files = [path for _, path in self._files() if path.lstat().st_nlink == 1]
        enough = [path for path in files if path.stat().st_size >= size_bytes]
        best = enough[:1] or files[-1:]
        return best[0] if best else None


def free_bytes(directory: Path) -> int:
    """Return the bytes still writable below ``directory``; at most the available memory on
    tmpfs.
    """
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    return min(free, available_memory()) if _is_in_memory(directory) else free


def _is_in_memory(directory: Path) -> bool:
    path = str(directory.resolve())
    kind, longest = "", -1
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, this_kind = line.split()[:3]
        is_inside = point == "/" or path == point or path.startswith(point + "/")
        if is_inside and len(point) >= longest:
            kind, longest = this_kind, len(point)
    return kind in {"tmpfs", "ramfs"}


def host_memory() -> int:
    """Return the bytes of memory for this host's processes: of the host, or of its container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):  # no limit, or no such group
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)


def available_memory(unknown: int = 1 << 62) -> int:
    """Return the bytes available to new processes and files of this host before it swaps.

    ``unknown`` if the kernel does not say.
    """
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return unknown
