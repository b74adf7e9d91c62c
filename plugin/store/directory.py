"""The directory of one host in a store: its lock, its numbered folders, and files that are used
again."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from scalai.core.errors import StoreError
from scalai.store.budget import Room
from scalai.store.files import FileLayout
from scalai.store.lock import StoreLock
from scalai.store.places import MANIFEST, NUMBERED
from scalai.store.pool import FilePool, free_bytes

RECYCLED = "recycled"


class HostDirectory:
    """An open directory. Methods may be called from several threads; closing ends the lock.

    Raises:
        StoreError: Another live process has it open, or it belongs to another user.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be made ({error.strerror}). Choose another --store-dir."
            ) from error
        if path.stat().st_uid != os.getuid():
            raise StoreError(
                f"{path} belongs to user {path.stat().st_uid}, this is user {os.getuid()}. "
                "Choose another --store-dir."
            )
        self._lock = StoreLock.acquire(path)
        self._mutex = threading.Lock()
        self._pool = FilePool(path / RECYCLED)
        self._next_number = 0

    def close(self) -> None:
        """Give the lock up. What is there stays for the next owner."""
        self._lock.release()

    def remove(self) -> None:
        """Remove all that is there, and close; the job's directory too if it is the last host's."""
        shutil.rmtree(self.path)
        self.close()
        try:
            self.path.parent.rmdir()
        except OSError:
            pass  # Other hosts of the job are still there.

    def adopt(self) -> Iterator[tuple[str, int, Path]]:
        """Yield kind, number and path of the folders that an earlier owner left. New ones get
        higher numbers."""
        for entry in sorted(os.listdir(self.path)):
            match = NUMBERED.fullmatch(entry)
            if match is not None:
                number = int(match[2])
                self._next_number = max(self._next_number, number + 1)
                yield match[1], number, self.path / entry

    def new(self, kind: str) -> Path:
        """Make a folder of this kind, with a number that none has had."""
        with self._mutex:
            path = self.path / f"{kind}-{self._next_number}"
            self._next_number += 1
            path.mkdir(mode=0o700)
        return path

    def make_file(self, path: Path, layout: FileLayout) -> None:
        """Make a file with this header, its pages faulted in. Blocks for seconds a GB where pages
        are new. Raises ``StoreError`` where there is no room."""
        self._pool.take(path, layout.size_bytes)
        with open(path, "r+b") as file:
            file.write(layout.header)

    def recycle_file(self, path: Path) -> None:
        """Keep a file for ``make_file``."""
        self._pool.give(path)

    def recycle(self, folder: Path) -> None:
        """Keep the files of a folder for ``make_file``, and remove it."""
        # Without its manifest it is torn, whatever happens next.
        (folder / MANIFEST).unlink(missing_ok=True)
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name.startswith("."):
                os.unlink(entry.path)
            else:
                self._pool.give(Path(entry.path))
        folder.rmdir()

    def trim(self, keep_bytes: int) -> None:
        """Remove files that wait for reuse, until at most so many bytes are left."""
        self._pool.trim(keep_bytes)

    def room(self) -> Room:
        """Return what is in use, what waits for reuse, and what is free."""
        in_use = sum(
            entry.stat().st_size
            for kind in ("generation-*", "deposit-*", "dropped-*", "fetched-*")
            for entry in self.path.glob(f"{kind}/*")
        )
        return Room(in_use, self._pool.size_bytes(), free_bytes(self.path))
