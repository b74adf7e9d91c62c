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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from scalai.vfs.cache import BLOCK_BYTES, BlockCache

LOOK_S = 1.0
"""How often it is asked whether a local file is still there under its name."""
TRIES = 4
PAUSE_S = 0.2
"""Between the first two tries; twice as long before each further one."""
WAIT_S = 120.0
"""How long a read waits for another one that fetches the same block."""
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


class FileSystem(Protocol):
    """What is used of an fsspec file system."""

    def info(self, path: str) -> Mapping[str, Any]:
        """Return size and what else is known of a file."""

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """Return bytes ``[start, end)``."""

    def invalidate_cache(self, path: str) -> None:
        """Forget what is known of a file."""


class RemoteSource:
    """A file behind an fsspec file system, read in blocks through a bounded cache.

    Args:
        url: For messages, and for the cache.
        files: Its file system.
        path: Its path there.
        cache: Shared by sources.
        pause: Waits so many seconds between tries.

    Raises:
        OSError: It cannot be found.
    """

    def __init__(
        self, url: str, files: FileSystem, path: str, cache: BlockCache,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._url, self._files, self._path = url, files, path
        self._cache, self._pause = cache, pause
        self._mutex = threading.Lock()
        self._in_flight: dict[int, threading.Event] = {}
        self._last = -1
        self._error: str | None = None
        info = self._tried("opened", self._info)
        size = info.get("size")
        if not isinstance(size, int):
            raise OSError(errno.EIO, f"{url} does not say its size, so it has no places to read at")
        self.size_bytes, self._identity = size, identity_of(info)
        self.mtime = _seconds(info)
        if self._identity == (size,):
            log.warning(
                "event=source_without_tag url=%s: only its size tells whether it changes", url
            )

    def _info(self) -> Mapping[str, Any]:
        self._files.invalidate_cache(self._path)
        return self._files.info(self._path)

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
            if not self._cache.has((self._url, number)):
                self._cache.beside(partial(self._quietly, number))

    def _quietly(self, number: int) -> None:
        try:
            self._block(number)
        except OSError:
            pass  # whoever asks for it gets the error

    def _block(self, number: int) -> bytes:
        """Return a block; one thread fetches it, others wait for that one."""
        key = (self._url, number)
        data = self._cache.get(key)
        if data is not None:
            return data
        with self._fetching(number):
            data = self._cache.get(key)
            if data is None:
                data = bytes(self._tried("read", lambda: self._fetch(number)))
                self._cache.put(key, data)
        return data

    @contextmanager
    def _fetching(self, number: int) -> Iterator[None]:
        end = time.monotonic() + WAIT_S
        while True:
            with self._mutex:
                other = self._in_flight.get(number)
                if other is None:
                    mine = self._in_flight[number] = threading.Event()
                    break
            if not other.wait(end - time.monotonic()):
                raise OSError(errno.EIO, f"{self._url} gave no bytes within {WAIT_S:.0f} s")
        try:
            yield
        finally:
            with self._mutex:
                del self._in_flight[number]
            mine.set()

    def _fetch(self, number: int) -> bytes:
        begin = number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self.size_bytes)
        data = self._files.cat_file(self._path, begin, end)
        if identity_of(self._info()) != self._identity:
            self._error = (
                f"{self._url} changed since it was opened. Mount again to read the new one."
            )
            raise _ChangedError(errno.EIO, self._error)
        if len(data) != end - begin:
            raise OSError(errno.EIO, f"{len(data)} bytes came instead of {end - begin}")
        return bytes(data)

    def _tried(self, what: str, call: "Callable[[], Any]") -> Any:
        """Call, again where it fails and that may pass. Raises ``OSError``."""
        pause = PAUSE_S
        for left in reversed(range(TRIES)):
            try:
                return call()
            except _ChangedError:
                raise
            except FileNotFoundError as error:
                raise OSError(errno.EIO, f"{self._url} is not there (any more): {error}") from error
            except Exception as error:  # each file system has its own
                if not left:
                    raise OSError(
                        errno.EIO, f"{self._url} cannot be {what} ({TRIES} tries): {error}"
                    ) from error
                log.warning("event=source_retry url=%s left=%d: %s", self._url, left, error)
            self._pause(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        self._cache.forget(self._url)


class _ChangedError(OSError):
    """Trying again does not help."""


_TAGS = ("ETag", "etag", "md5", "md5Hash", "checksum", "version_id", "generation")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "Last-Modified", "created")


def identity_of(info: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what tells a file from its later self, of what its file system says."""
    found = (str(info[name]) for name in (*_TAGS, *_TIMES) if info.get(name) is not None)
    return (info.get("size"), *found)


def _seconds(info: Mapping[str, Any]) -> float:
    """Return the time of a file's last change, 0 where none is known."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
    return 0.0
