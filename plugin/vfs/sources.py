"""Files that samples come from, wherever they lie: read at any place, unchanged or not at all.

What tells a file from its later self is its size, with its time, its inode or its tag. It is noted
when the source is opened and compared again whenever bytes come from it, so that a file that was
written anew gives an error and never a mixture.
"""

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from scalai.remote.files import RemoteFile
from scalai.remote.patience import ChangedError, Patience
from scalai.vfs.cache import BLOCK_BYTES, BlockCache

LOOK_S = 1.0
"""How often it is asked whether a local file is still there under its name."""
SLACK_S = 10.0
"""How much longer than a fetch may take others wait for it."""
AHEAD = 2
"""Blocks that are read before they are asked for, once a reader goes from one to the next."""

log = logging.getLogger(__name__)


class Source(Protocol):
    """A file of samples."""

    @property
    def size_bytes(self) -> int:
        """Its size when it was opened."""

    @property
    def mtime(self) -> float:
        """Seconds since 1970 of its last change, 0 where nobody says."""

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes, fewer only at the end of the file. Raises ``OSError``."""

    def close(self) -> None:
        """End reading."""


class LocalSource:
    """A file on a disk of this machine. The kernel caches it.

    Args:
        expected: What it was when its folder was listed; None: what it is now.

    Raises:
        OSError: It cannot be opened, or has changed.
    """

    def __init__(self, path: Path, expected: os.stat_result | None = None) -> None:
        self._path = path
        self._error: str | None = None
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._status = status = os.fstat(self._descriptor)
        if expected is not None and _state(expected) != _state(status):
            self.close()
            self._refuse("its size, its time or the file itself is another one")
        self.size_bytes, self.mtime = self._status.st_size, self._status.st_mtime
        self._looked = time.monotonic()

    def read(self, offset: int, size: int) -> bytes:
        if self._error is not None:
            raise OSError(errno.EIO, self._error)
        wanted = min(size, self.size_bytes - offset)
        if wanted <= 0:
            return b""
        data = os.pread(self._descriptor, wanted, offset)
        while len(data) < wanted:
            more = os.pread(self._descriptor, wanted - len(data), offset + len(data))
            if not more:
                break
            data += more
        # Behind the read: what was changed before it ended is seen.
        self.check()
        if len(data) < wanted:
            self._refuse("it is shorter")
        return data

    def mapped(self) -> mmap.mmap | None:
        """Return a memory map of the file, None of an empty one. Who reads it calls ``check``, and
        is killed (SIGBUS) where the file is cut between the two."""
        if not self.size_bytes:
            return None
        return mmap.mmap(self._descriptor, self.size_bytes, access=mmap.ACCESS_READ)

    def check(self) -> None:
        """Raise ``OSError`` where the file is not what was opened."""
        if self._error is not None:
            raise OSError(errno.EIO, self._error)
        if _state(os.fstat(self._descriptor)) != _state(self._status):
            self._refuse("its size or time changed")
        if time.monotonic() - self._looked > LOOK_S:
            self._look()

    def _look(self) -> None:
        try:
            is_there = os.path.samestat(os.stat(self._path), self._status)
        except OSError as error:
            self._refuse(f"it cannot be found any more ({error.strerror})")
        if not is_there:
            self._refuse("another file has its name now")
        self._looked = time.monotonic()

    def _refuse(self, why: str) -> None:
        self._error = (
            f"{self._path} is not what was opened: {why}. Put it back and mount again; a job that "
            "reads it without a mount, start again."
        )
        raise OSError(errno.EIO, self._error)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _state(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


class RemoteSource:
    """A file behind an fsspec file system, read in blocks through a bounded cache.

    Args:
        url: For messages, and for the cache.
        file: What is asked for its bytes.
        cache: Shared by sources.
        patience: How long it is asked.

    Raises:
        OSError: It cannot be found.
    """

    def __init__(
        self, url: str, file: RemoteFile, cache: BlockCache, patience: Patience | None = None
    ) -> None:
        self._url, self._file, self._cache = url, file, cache
        self._patience = patience or Patience(url)
        self._mutex = threading.Lock()
        self._in_flight: dict[int, Future[bytes]] = {}
        self._last = -1
        self._error: str | None = None
        self._facts = facts = self._asked("opened", file.look)
        if facts.size_bytes is None:
            raise OSError(errno.EIO, f"{url} does not say its size, so it has no places to read at")
        self.size_bytes, self.mtime = facts.size_bytes, facts.mtime
        if not facts.tags:
            log.warning(
                "event=source_without_tag url=%s: only its size tells whether it changes", url
            )

    def read(self, offset: int, size: int) -> bytes:
        if self._error is not None:
            raise OSError(errno.EIO, self._error)
        end = min(offset + size, self.size_bytes)
        if offset >= end:
            return b""
        parts, first, last = [], offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        for number in range(first, last + 1):
            begin = number * BLOCK_BYTES
            parts.append(self._block(number)[max(offset - begin, 0) : end - begin])
        if last in (self._last, self._last + 1):
            self._read_ahead(last)
        self._last = last
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_ahead(self, last: int) -> None:
        blocks = -(-self.size_bytes // BLOCK_BYTES)
        for number in range(last + 1, min(last + 1 + AHEAD, blocks)):
            self._cache.beside((self._url, number), partial(self._quietly, number))

    def _quietly(self, number: int) -> None:
        try:
            self._block(number)
        except OSError:
            pass  # whoever asks for it gets the error

    def _block(self, number: int) -> bytes:
        """Return a block; one thread fetches it, others get what comes of that."""
        key = (self._url, number)
        data = self._cache.get(key)
        if data is not None:
            return data
        with self._mutex:
            other = self._in_flight.get(number)
            mine = self._in_flight[number] = Future() if other is None else other
        if other is not None:
            return self._awaited(other)
        try:
            data = self._cache.get(key)
            if data is None:
                data = self._fetch(number)
                self._cache.put(key, data)
            mine.set_result(data)
            return data
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._mutex:
                del self._in_flight[number]

    def _awaited(self, other: "Future[bytes]") -> bytes:
        try:
            return other.result(self._patience.within_s + SLACK_S)
        except TimeoutError as error:
            raise OSError(errno.EIO, f"{self._url} gave no bytes in time") from error

    def _fetch(self, number: int) -> bytes:
        begin = number * BLOCK_BYTES
        ranges = [(begin, min(begin + BLOCK_BYTES, self.size_bytes))]
        found: list[bytes] = self._asked(
            "read", lambda within_s: self._file.read(self._facts, ranges, within_s)
        )
        return found[0]

    def _asked(self, what: str, call: Callable[[float], Any]) -> Any:
        """Return an answer. Raises ``OSError`` with a number that readers know."""
        try:
            return self._patience.ask(what, call)
        except ChangedError as error:
            self._error = (
                f"{self._url} changed since it was opened: {error.strerror}. Mount again to read "
                "the new one."
            )
            raise OSError(errno.EIO, self._error) from error
        except OSError as error:
            raise OSError(errno.EIO, error.strerror or f"{self._url}: {error}") from error

    def close(self) -> None:
        self._cache.forget(self._url)
