"""Blocks of remote files, in memory or on a disk, of which the least used ones make way."""

import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from scalai.remote.silences import Silences
from scalai.vfs.read_ahead import ReadAhead

BLOCK_BYTES = 4 << 20
LIMIT_BYTES = 256 << 20
_PREFIX = "scalai-blocks-"

Key = tuple[str, int]
"""A file, and the number of the block in it."""

log = logging.getLogger(__name__)


class BlockCache:
    """Blocks by file and number. Methods may be called from several threads.

    Args:
        limit_bytes: What all blocks together take at most.
        directory: Where they lie, in a folder that goes with this process; None: in memory.

    Attributes:
        silences: Of the servers that the files lie on.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES, directory: Path | None = None) -> None:
        self._limit = limit_bytes
        self._mutex = threading.Lock()
        self._blocks: OrderedDict[Key, bytes | Path] = OrderedDict()
        self._sizes: dict[Key, int] = {}
        self._total = 0
        """Bytes of all blocks, also of those that are just being written."""
        self._number = 0
        self._ahead = ReadAhead()
        self.silences = Silences()
        self._folder: Path | None = None
        self._is_full = False
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            _remove_stale(directory)
            self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
            self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def has(self, key: Key) -> bool:
        """Whether a block is here."""
        with self._mutex:
            return key in self._blocks

    def get(self, key: Key) -> bytes | None:
        """Return a block, None where it is not here (any more)."""
        with self._mutex:
            held = self._blocks.get(key)
            if held is None:
                return None
            self._blocks.move_to_end(key)
            size = self._sizes[key]
        if isinstance(held, bytes):
            return held
        try:
            data = held.read_bytes()
        except OSError:
            data = b""
        if len(data) == size:
            return data
        with self._mutex:  # somebody has cut or removed it, or it has just made way
            gone = [self._taken(key)] if self._blocks.get(key) == held else []
        _remove(gone)
        return None

    def put(self, key: Key, data: bytes) -> None:
        """Keep a block. Where a disk has no room it is not kept, which is said once."""
        if len(data) > self._limit:
            return
        with self._mutex:
            gone = [self._taken(key)]
            while self._blocks and self._total + len(data) > self._limit:
                gone.append(self._taken(next(iter(self._blocks))))
            self._total += len(data)
            self._number += 1
            path = None if self._folder is None else self._folder / str(self._number)
        _remove(gone)  # without the mutex, for which every reader waits
        if path is not None and not self._write(path, data):
            return
        with self._mutex:
            gone = [self._taken(key)]  # another thread has fetched it, too
            self._blocks[key] = data if path is None else path
            self._sizes[key] = len(data)
        _remove(gone)

    def _write(self, path: Path, data: bytes) -> bool:
        """Write a block to the disk; where there is no room, say so once and return False."""
        try:
            path.write_bytes(data)
        except OSError as error:
            path.unlink(missing_ok=True)
            with self._mutex:
                self._total -= len(data)
                is_said, self._is_full = self._is_full, True
            if not is_said:
                log.warning(
                    "event=cache_full directory=%s: %s. What does not fit is fetched again.",
                    path.parent, error.strerror,
                )  # fmt: skip
            return False
        self._is_full = False
        return True

    def _taken(self, key: Key) -> bytes | Path | None:
        """Take a block out, and return what is to be removed. Whoever calls holds the mutex."""
        self._total -= self._sizes.pop(key, 0)
        return self._blocks.pop(key, None)

    def forget(self, name: str) -> None:
        """Drop all blocks of a file."""
        with self._mutex:
            gone = [self._taken(key) for key in list(self._blocks) if key[0] == name]
        _remove(gone)

    def beside(self, key: Key, fetch: Callable[[], None]) -> None:
        """Have a block fetched before it is asked for, unless it is here or many others wait."""
        if not self.has(key):
            self._ahead.submit(key, fetch)

    def close(self) -> None:
        """Drop everything. What is being fetched ends with the try that it is at."""
        self.silences.is_over = True
        self._ahead.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None


def _remove(blocks: Iterable[bytes | Path | None]) -> None:
    for block in blocks:
        if isinstance(block, Path):
            block.unlink(missing_ok=True)


def _remove_stale(directory: Path) -> None:
    """Remove the folders of processes that are gone: their locks went with them."""
    for folder in directory.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # it is in use
        finally:
            os.close(descriptor)
