"""Ranges of bytes of a file that must not change while it is read, here or behind a URL.

They are read, not mapped: a file that is truncated under a map kills the process that touches it
(SIGBUS), and what a map reads ahead is not known. ``bytes_read`` counts what was asked for; the
kernel reads whole pages, and ahead.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from scalai.core.errors import RefusedError, UsageError
from scalai.store.files import read_at

RANGES_AT_ONCE = 1024
BYTES_AT_ONCE = 1 << 26
"""A URL is asked for so many ranges, or of so many bytes, at a time."""

_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems of fsspec call that by which one state of a file is told from another."""


class ByteRanges(Protocol):
    """A file that is open for reading.

    Attributes:
        name: As a person has given it.
        size: Of the file when it was opened, in bytes.
        bytes_read: So far.
    """

    name: str
    size: int
    bytes_read: int

    def fill(self, begins: Sequence[int], length: int, into: memoryview) -> None:
        """Fill ``into`` [ranges * length] with the bytes from each of ``begins`` on. Blocks.

        Raises:
            RefusedError: The file has changed, is gone, or ends before.
        """

    def check_unchanged(self) -> None:
        """Raise ``RefusedError`` where the file is not what it was when it was opened."""

    def close(self) -> None:
        """Give back what it holds."""


def open_ranges(path_or_url: str | Path) -> ByteRanges:
    """Open a file of this machine, or what an fsspec URL names.

    Raises:
        RefusedError: It is not there, no file, or cannot be read.
        UsageError: It is a URL, and fsspec or what it needs for it is not installed.
    """
    name = os.fspath(path_or_url)
    return UrlRanges(name) if "://" in name else LocalRanges(name)


def read_range(source: ByteRanges, begin: int, length: int) -> bytes:
    """Return one range."""
    data = bytearray(length)
    source.fill([begin], length, memoryview(data))
    return bytes(data)


class LocalRanges:
    """A file of this machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes_read = 0
        self._descriptor = -1
        try:
            self._descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(self._descriptor)
        except OSError as error:
            self.close()
            raise RefusedError(f"{name} cannot be read ({error.strerror}).") from error
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise RefusedError(f"{name} is no file.")
        self.size, self._was = found.st_size, _state(found)

    def fill(self, begins: Sequence[int], length: int, into: memoryview) -> None:
        try:
            for number, begin in enumerate(begins):
                read_at(self._descriptor, into[number * length : (number + 1) * length], begin)
        except OSError as error:
            self.check_unchanged()
            raise RefusedError(f"{self.name} cannot be read ({error.strerror}).") from error
        self.bytes_read += len(begins) * length

    def check_unchanged(self) -> None:
        try:
            now = _state(os.stat(self.name))
        except OSError as error:
            raise RefusedError(f"{self.name} is gone ({error.strerror}).") from error
        if now != self._was:
            raise _changed(self.name, self._was[2:], now[2:])

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _state(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class UrlRanges:
    """What an fsspec URL names. A range goes over the network as it is, without read-ahead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes_read = 0
        try:
            from fsspec.core import url_to_fs

            self._system, self._path = url_to_fs(name)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{name}: {error} (scalai[slabs] brings fsspec).") from error
        self._was = self._state()
        if not isinstance(self._was[0], int):
            raise RefusedError(f"{name} does not say its size, so that ranges of it are unknown.")
        self.size = self._was[0]

    def fill(self, begins: Sequence[int], length: int, into: memoryview) -> None:
        step = max(min(RANGES_AT_ONCE, BYTES_AT_ONCE // max(length, 1)), 1)
        for first in range(0, len(begins), step):
            some = [int(begin) for begin in begins[first : first + step]]
            for number, data in enumerate(self._ask(some, length), first):
                into[number * length : (number + 1) * length] = data

    def _ask(self, begins: list[int], length: int) -> list[bytes]:
        ends = [begin + length for begin in begins]
        try:
            found: list[bytes] = self._system.cat_ranges(
                [self._path] * len(begins), begins, ends, on_error="raise"
            )
        except OSError as error:
            self.check_unchanged()
            raise RefusedError(f"{self.name} cannot be read ({error}).") from error
        self.bytes_read += sum(map(len, found))
        wrong = [len(data) for data in found if len(data) != length]
        if wrong:
            self.check_unchanged()
            raise RefusedError(
                f"{self.name} has answered with {wrong[0]} bytes where {length} were asked for: it "
                "is truncated, or its server sends no ranges."
            )
        return found

    def check_unchanged(self) -> None:
        now = self._state()
        if now != self._was:
            raise _changed(self.name, self._was, now)

    def _state(self) -> tuple[Any, str]:
        try:
            self._system.invalidate_cache()
            found = self._system.info(self._path)
        except OSError as error:
            raise RefusedError(f"{self.name} cannot be read ({error}).") from error
        if found.get("type", "file") != "file":
            raise RefusedError(f"{self.name} is no file.")
        version = next((str(found[key]) for key in _VERSIONS if found.get(key)), "")
        return found.get("size"), version

    def close(self) -> None:
        """The file system is shared by all that use its URLs, and stays."""


def _changed(name: str, was: tuple[Any, ...], now: tuple[Any, ...]) -> RefusedError:
    return RefusedError(
        f"{name} has changed since it was opened: size and time were {was}, and are {now}. What "
        "was read before is of another file. Open it again, or put back what was there."
    )
