"""Ranges of bytes of a file that must not change while it is read, here or behind a URL.

They are read, not mapped: a file that is truncated under a map kills the process that touches it
(SIGBUS), and what a map reads ahead is not known. ``bytes_read`` counts what was asked for; the
kernel reads whole pages, and ahead.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from scalai.core.errors import RefusedError, UsageError
from scalai.store.files import read_at

RANGES_AT_ONCE = 1024
BYTES_AT_ONCE = 1 << 24
"""A URL is asked for so many ranges, or of so many bytes, at a time, within one deadline."""
PIECE_BYTES = 1 << 22
"""A longer range is asked for in pieces."""


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


def open_ranges(path_or_url: str | Path, remote_timeout_s: float) -> ByteRanges:
    """Open a file of this machine, or what an fsspec URL names.

    Args:
        remote_timeout_s: Seconds for what is asked of a URL at a time, all tries together.

    Raises:
        RefusedError: It is not there, no file, or cannot be read.
        UsageError: It is a URL, and fsspec or what it needs for it is not installed.
    """
    name = os.fspath(path_or_url)
    return UrlRanges(name, remote_timeout_s) if "://" in name else LocalRanges(name)


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

    def __init__(self, name: str, remote_timeout_s: float) -> None:
        self.name = name
        self.bytes_read = 0
        try:
            from fsspec.core import url_to_fs

            from scalai.remote.files import remote_file
            from scalai.remote.patience import Patience

            files, path = url_to_fs(name)
            self._file = remote_file(files, path)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{name}: {error} (scalai[slabs] brings fsspec).") from error
        self._patience = Patience(name, remote_timeout_s)
        self._was = self._asked(self._file.look)
        if self._was.size_bytes is None:
            raise RefusedError(f"{name} does not say its size, so that ranges of it are unknown.")
        self.size = self._was.size_bytes

    def fill(self, begins: Sequence[int], length: int, into: memoryview) -> None:
        for some in _batches(begins, length):
            ranges = [(begin, end) for begin, end, _ in some]
            found: list[bytes] = self._asked(partial(self._read, ranges))
            for (begin, end, at), data in zip(some, found, strict=True):
                into[at : at + end - begin] = data
            self.bytes_read += sum(map(len, found))

    def _read(self, ranges: list[tuple[int, int]], within_s: float) -> list[bytes]:
        return self._file.read(self._was, ranges, within_s)

    def _asked(self, call: Callable[[float], Any]) -> Any:
        """Return an answer, for which the patience waits. Raises ``RefusedError``."""
        from scalai.remote.patience import ChangedError

        try:
            return self._patience.ask("read", call)
        except ChangedError as error:
            raise RefusedError(
                f"{self.name} has changed since it was opened: {error.strerror}. {_ANOTHER}"
            ) from error
        except IsADirectoryError as error:
            raise RefusedError(f"{self.name} is no file.") from error
        except OSError as error:
            raise RefusedError(f"{error.strerror or error}: {self.name} cannot be read.") from error

    def check_unchanged(self) -> None:
        from scalai.remote.facts import check_same

        self._asked(lambda within_s: check_same(self._was, self._file.look(within_s)))

    def close(self) -> None:
        """The file system is shared by all that use its URLs, and stays."""


def _batches(begins: Sequence[int], length: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield ranges as pieces that are asked for together: begin, end, place in what is filled."""
    some: list[tuple[int, int, int]] = []
    size = 0
    for number, begin in enumerate(map(int, begins)):
        for low in range(0, length, PIECE_BYTES):
            high = min(low + PIECE_BYTES, length)
            if len(some) == RANGES_AT_ONCE or size + high - low > BYTES_AT_ONCE:
                yield some
                some, size = [], 0
            some.append((begin + low, begin + high, number * length + low))
            size += high - low
    if some:
        yield some


_ANOTHER = "What was read before is of another file. Open it again, or put back what was there."


def _changed(name: str, was: tuple[Any, ...], now: tuple[Any, ...]) -> RefusedError:
    return RefusedError(
        f"{name} has changed since it was opened: size and time were {was}, and are {now}. "
        f"{_ANOTHER}"
    )
