"""Files behind URLs, by fsspec's own file systems, under one deadline.

Each call of a file system runs in a thread of its own: nothing else ends the wait for a hung
server in every protocol. At the deadline the reader gets an error; the thread stays until the call
returns.

A file's size, tags and times tell it from its later self. They are noted at the opening and
compared behind each read, so a file written anew gives an error and none of its bytes.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.caching import BlockCache

WITHIN_S = 60.0
"""Deadline of a read, of an opening and of a listing, seconds: no more than a job waits for a step
before it reports a hang (``resize.stall_s``)."""
HANGING = 8
"""Most calls of a URL under way; a server that comes back after an outage frees their threads."""
BLOCK_BYTES = 4 << 20
BLOCKS = 8
"""Blocks in memory of each open file: 32 MiB."""
_TAGS = ("ETag", "etag", "md5", "md5Hash", "checksum", "version_id", "generation")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "Last-Modified", "created")

log = logging.getLogger(__name__)

T = TypeVar("T")


class FileChangedError(OSError):
    """The file is another one than at its opening.

    Attributes:
        difference: Size and tags then and now.
    """

    def __init__(self, url: str, difference: str) -> None:
        self.difference = difference
        super().__init__(
            errno.EIO,
            f"{url} changed since it was opened: {difference}. Mount again, or open it again, to "
            "read the new one.",
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """Identity of a remote file: equal facts mean equal bytes, as far as a file system can tell.

    Attributes:
        size_bytes: Size; None: unknown.
        tags: Tags and times, as given.
        mtime: Time of the last change, seconds since 1970; 0: unknown.
    """

    size_bytes: int | None
    tags: tuple[str, ...]
    mtime: float = field(default=0.0, compare=False)


def facts_of(info: Mapping[str, Any]) -> Facts:
    """Facts from the ``info`` of a file system."""
    # A weak tag has a W/ before it, and some servers leave it out of some answers.
    tags = [str(info[name]).removeprefix("W/") for name in (*_TAGS, *_TIMES) if info.get(name)]
    size = info.get("size")
    return Facts(size if isinstance(size, int) else None, tuple(tags), _mtime(info))


def _mtime(info: Mapping[str, Any]) -> float:
    value = next((info[name] for name in _TIMES if info.get(name)), None)
    if isinstance(value, datetime):
        return value.timestamp()
    try:
        return parsedate_to_datetime(value).timestamp() if isinstance(value, str) else value or 0.0
    except ValueError:
        return 0.0


class RemoteFiles:
    """What an fsspec URL names: a file, a folder, or the common beginning of several names.

    May be used by several threads, and in a forked process: fsspec's file systems do not survive a
    fork, so each process opens its own.

    Attributes:
        path: The URL's path in its file system.

    Raises:
        ImportError, ValueError: fsspec knows no such file system, or lacks a library for it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._open()

    def _open(self) -> None:
        self._process, self._free = os.getpid(), threading.BoundedSemaphore(HANGING)
        self._files, self.path = fsspec.core.url_to_fs(self.url)
        protocol = self._files.protocol
        self.is_web = "http" in ((protocol,) if isinstance(protocol, str) else protocol)

    def find(self, ends: Sequence[str]) -> dict[str, str]:
        """Paths of the files by their names below the URL: a file itself; the files of a folder; or
        those with the URL's name and one of ``ends``. The URL of a web server's folder, a page of
        links, ends with a slash.

        Raises:
            OSError: The server does not tell.
        """
        until, path, root = time.monotonic() + WITHIN_S, self.path, self.path.rstrip("/")
        if not (self.is_web and path.endswith("/")):
            try:
                self.look(path, until)
                return {self._name(root): path}
            except FileNotFoundError:
                return {
                    self._name(each): each
                    for each in (root + end for end in ends) if self._is_there(each, until)
                }  # fmt: skip
            except IsADirectoryError:
                pass
        found: Iterable[str] = self.call(lambda files: files.find(path), "listed", path, until)
        below = {self._unquoted(each[len(root) + 1 :]): each for each in found}
        return {name: each for name, each in below.items() if ".." not in name.split("/")}

    def _is_there(self, path: str, until: float) -> bool:
        try:
            self.look(path, until)
        except FileNotFoundError:
            return False
        return True

    def _name(self, path: str) -> str:
        """Name of a file; a web server's path may end with a query."""
        return self._unquoted(urlsplit(path).path if self.is_web else path).rpartition("/")[2]

    def _unquoted(self, name: str) -> str:
        return unquote(name) if self.is_web else name

    def url_of(self, path: str) -> str:
        """URL of a path, for messages."""
        return str(self._files.unstrip_protocol(path))

    def options(self) -> dict[str, Any]:
        """Options of each read: a web server must not compress, or ranges have other places."""
        if not self.is_web:
            return {}
        own = self._files.kwargs.get("headers", {})
        return {"headers": {**own, "Accept-Encoding": "identity"}}

    def look(self, path: str, until: float, what: str = "looked at") -> Facts:
        """Present facts of a file. Raises as ``call``; ``IsADirectoryError``: it is a folder."""

        def ask(files: Any) -> Mapping[str, Any]:
            files.invalidate_cache(path)
            info: Mapping[str, Any] = files.info(path)
            return info

        info = self.call(ask, what, path, until)
        if info.get("type", "file") != "file":
            raise IsADirectoryError(errno.EISDIR, f"{self.url_of(path)} is no file")
        return facts_of(info)

    def call(self, call: Callable[[Any], T], what: str, path: str, until: float) -> T:
        """Result of a call with the file system. Blocks.

        Args:
            what: Participle for messages, such as ``read``.
            until: Deadline, seconds of ``time.monotonic``.

        Raises:
            FileNotFoundError: There is no such file.
            OSError: The server does not answer in time, or fails; the text has the reason.
        """
        if os.getpid() != self._process:
            self._open()
        cannot = f"{self.url_of(path)} cannot be {what}"
        files, free, done = self._files, self._free, Future[T]()
        silent = OSError(errno.EIO, f"{cannot}: no answer within {WITHIN_S:g} s")
        if (left_s := until - time.monotonic()) <= 0:
            raise silent
        if not free.acquire(timeout=left_s):
            raise OSError(errno.EIO, f"{cannot}: {HANGING} earlier calls have not come back")

        def run() -> None:
            try:
                done.set_result(call(files))
            except BaseException as error:
                done.set_exception(error)
            finally:
                free.release()

        threading.Thread(target=run, name="remote read", daemon=True).start()
        try:
            return done.result(max(until - time.monotonic(), 0))
        except Exception as error:  # each file system has its own
            if not done.done():
                raise silent from error
            cause = self._cause(error)
            if isinstance(cause, FileNotFoundError):
                why = f"{self.url_of(path)} is not there (any more)"
                raise FileNotFoundError(errno.ENOENT, why) from error
            why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            raise OSError(errno.EIO, f"{cannot}: {why}") from error

    def _cause(self, error: Exception) -> BaseException:
        """The error itself; of a web server the one behind a ``FileNotFoundError``, with which
        fsspec answers whatever fails, unless the server says 404 or 410."""
        cause = error.__cause__
        if not (self.is_web and isinstance(error, FileNotFoundError) and cause):
            return error
        return error if getattr(cause, "status", None) in (404, 410) else cause


class RemoteSource:
    """A file behind a URL, read in blocks through fsspec's cache, or in ranges past it.

    May be used by several threads, and in a forked process.

    Args:
        remote: Where it lies.
        path: Path there.
        expected: Facts of an earlier opening, which the file must still have; None: those of now.

    Raises:
        OSError: There is no such file, it has no known size, or its server fails.
    """

    def __init__(self, remote: RemoteFiles, path: str, expected: Facts | None = None) -> None:
        self._remote, self._path, self.url = remote, path, remote.url_of(path)
        facts = expected or remote.look(path, time.monotonic() + WITHIN_S)
        if facts.size_bytes is None:
            raise OSError(errno.EIO, f"{self.url} does not say its size: no place to read at")
        if expected is None and not facts.tags:
            log.warning("event=source_without_tag url=%s: only its size shows a change", self.url)
        self.facts, self.size_bytes, self.mtime = facts, facts.size_bytes, facts.mtime
        self._changed: str | None = None
        self._begin()

    def _begin(self) -> None:
        self._process, self._mutex, self._until = os.getpid(), threading.Lock(), 0.0
        self._cache = BlockCache(BLOCK_BYTES, self._fetch, self.size_bytes, BLOCKS)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes, fewer only at the end of the file. Raises ``OSError`` within ``WITHIN_S``."""
        if self._changed is not None:
            raise FileChangedError(self.url, self._changed)
        if os.getpid() != self._process:
            self._begin()
        until = time.monotonic() + WITHIN_S
        # Readers of one file wait for one deadline together, and a block comes once.
        if not self._mutex.acquire(timeout=WITHIN_S):
            raise OSError(errno.EIO, f"{self.url} cannot be read: no answer within {WITHIN_S:g} s")
        try:
            self._until = until
            found: bytes = self._cache._fetch(offset, min(offset + size, self.size_bytes))
            return found
        finally:
            self._mutex.release()

    def _fetch(self, begin: int, end: int) -> bytes:
        """Bytes of a block, for the cache. fsspec's file reads them, as it takes no more than the
        range from a server without ranges."""
        end = min(end, self.size_bytes)
        options = {"size": self.size_bytes, **self._remote.options()}

        def fetch(files: Any) -> list[bytes]:
            with files.open(self._path, cache_type="none", **options) as file:
                file.seek(begin)
                return [file.read(end - begin)]

        return self._unchanged(fetch, [(begin, end)], self._until)[0]

    def check_ranges(self) -> None:
        """Refuse a web server without ranges, before it sends the whole file for each of them.
        Raises ``OSError``."""
        if self._remote.is_web and self.size_bytes:
            self._until = time.monotonic() + WITHIN_S
            self._fetch(self.size_bytes - 1, self.size_bytes)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes of each range ``[begin, end)``, with nothing around them. Raises as ``read``."""
        begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]

        def fetch(files: Any) -> list[bytes]:
            paths = [self._path] * len(ranges)
            options = self._remote.options()
            return list(files.cat_ranges(paths, begins, ends, on_error="raise", **options))

        return self._unchanged(fetch, ranges, time.monotonic() + WITHIN_S)

    def check(self) -> None:
        """Raise ``FileChangedError`` where the file is another one now, ``OSError`` where that
        cannot be found out."""
        self._check(time.monotonic() + WITHIN_S)

    def _unchanged(
        self, fetch: Callable[[Any], list[bytes]], ranges: Sequence[tuple[int, int]], until: float
    ) -> list[bytes]:
        """Bytes of these ranges, if the file was the same until they had come."""
        if self._changed is not None:
            raise FileChangedError(self.url, self._changed)
        found, failure = list[bytes](), None
        try:
            found = self._remote.call(fetch, "read", self._path, until)
        except OSError as error:
            failure = error  # perhaps for a range beyond the end of the present file
        self._check(until)
        if failure is not None:
            raise OSError(errno.EIO, failure.strerror) from failure
        for data, (begin, end) in zip(found, ranges, strict=True):
            if len(data) != end - begin:
                raise OSError(
                    errno.EIO, f"{self.url}: {len(data)} bytes came instead of {end - begin}"
                )
        return [bytes(data) for data in found]

    def _check(self, until: float) -> None:
        try:
            now = self._remote.look(self._path, until, "read")
        except OSError as error:
            raise OSError(errno.EIO, error.strerror) from error
        if now != self.facts:
            was = (self.facts.size_bytes, *self.facts.tags)
            self._changed = f"size and tags were {was}, and are {(now.size_bytes, *now.tags)}"
            raise FileChangedError(self.url, self._changed)

    def close(self) -> None:
        """End reading. A call under way ends in its own time."""
        self._begin()
