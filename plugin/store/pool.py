"""Files of dropped generations, kept for the next one: writing into pages that exist is ten times
as fast as into new ones."""

import os
import threading
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.store.prefault import prefault


class FilePool:
    """The directory of files that wait for reuse. For one process (the store's lock sees to that),
    any thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mutex = threading.Lock()
        directory.mkdir(mode=0o700, exist_ok=True)
        numbers = [int(name) for name in os.listdir(directory) if name.isdigit()]
        self._next = max(numbers, default=-1) + 1

    def size_bytes(self) -> int:
        """Return the bytes of all files in the pool."""
        return sum(size for size, _ in self._files())

    def give(self, path: Path) -> None:
        """Take a file in, moving it. One that has another name as well (a hard link) is only
        unlinked: its bytes are someone else's."""
        status = path.lstat()
        if status.st_nlink > 1 or status.st_size == 0 or not path.is_file() or path.is_symlink():
            path.unlink()
            return
        with self._mutex:
            os.rename(path, self.directory / str(self._next))
            self._next += 1

    def take(self, path: Path, size_bytes: int) -> None:
        """Make a file of ``size_bytes`` at ``path``, of old pages as far as they go, the rest
        allocated and faulted in.

        The content is undefined. Blocks while pages are made: seconds a GB.

        Raises:
            StoreError: The file system is full.
        """
        kept = 0
        with self._mutex:
            old = self._choose(size_bytes)
            if old is not None:
                kept = min(old.stat().st_size, size_bytes)
                os.rename(old, path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, kept)
            if size_bytes > kept:
                os.posix_fallocate(descriptor, kept, size_bytes - kept)
                prefault(descriptor, kept, size_bytes)
        except OSError as error:
            path.unlink()
            raise StoreError(
                f"{path} needs {size_bytes} bytes, but {error.strerror}; {free_bytes(path.parent)} "
                "are free. Enlarge the shared memory (--shm-size of docker run) or choose another "
                "--store-dir."
            ) from error
        finally:
            os.close(descriptor)

    def trim(self, keep_bytes: int) -> None:
        """Remove files, small ones first, until at most ``keep_bytes`` are left."""
        files = self._files()
        total = sum(size for size, _ in files)
        for size, path in files:
            if total <= keep_bytes:
                break
            path.unlink()
            total -= size

    def _files(self) -> list[tuple[int, Path]]:
        """List size and path of the pooled files, small ones first."""
        return sorted(
            (entry.stat().st_size, Path(entry.path)) for entry in os.scandir(self.directory)
        )

    def _choose(self, size_bytes: int) -> Path | None:
        """Return the smallest file that is large enough, else the largest, None where there is
        none."""
        files = [path for _, path in self._files() if path.lstat().st_nlink == 1]
        enough = [path for path in files if path.stat().st_size >= size_bytes]
        best = enough[:1] or files[-1:]
        return best[0] if best else None


def free_bytes(directory: Path) -> int:
    """Return how many bytes may still be written below ``directory``: of a file system in memory,
    no more than there is."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    return min(free, available_memory()) if _is_in_memory(directory) else free


def _is_in_memory(directory: Path) -> bool:
    """Does ``directory`` lie on a file system that lives in memory?"""
    path = str(directory.resolve())
    kind, longest = "", -1
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, this_kind = line.split()[:3]
        is_inside = point == "/" or path == point or path.startswith(point + "/")
        if is_inside and len(point) >= longest:
            kind, longest = this_kind, len(point)
    return kind in {"tmpfs", "ramfs"}


def available_memory() -> int:
    """Return the bytes that new processes and files of this host can take before it swaps."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62
