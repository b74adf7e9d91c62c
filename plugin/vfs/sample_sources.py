"""Files that samples come from, here or behind a URL: read at any place, unchanged or not at all.

A local file's size, time and inode tell it from its later self. They are noted at the opening and
compared behind each read, so a file written anew gives an error and never a mixture.
"""

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from scalai.core.errors import UsageError
from scalai.vfs.remote import Facts, RemoteFiles, RemoteSource

LOOK_S = 1.0
"""Least seconds between two looks for a local file under its name."""
_ENDS = (".bin", ".idx")


class SourceFile(Protocol):
    """A file of samples."""

    @property
    def size_bytes(self) -> int:
        """Size at the opening."""

    @property
    def mtime(self) -> float:
        """Time of its last change, seconds since 1970; 0: unknown."""

    def read(self, offset: int, size: int) -> bytes:
        """Bytes, fewer only at the end of the file. Raises ``OSError``."""

    def close(self) -> None:
        """End reading."""


class LocalSource:
    """A file on a disk of this machine. The kernel caches it.

    Args:
        expected: Status at the listing of its folder; None: the present one.

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
        """Memory map of the file; None: it is empty. Readers call ``check`` first; a cut between
        the two kills them (SIGBUS)."""
        if not self.size_bytes:
            return None
        return mmap.mmap(self._descriptor, self.size_bytes, access=mmap.ACCESS_READ)

    def check(self) -> None:
        """Raise ``OSError`` for another file than at the opening."""
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


OpenSource = Callable[[], SourceFile]
"""Opens a source. Raises ``OSError``."""


def open_files(url: str) -> dict[str, OpenSource]:
    """Openers of the files at a URL, by their paths below it.

    Raises:
        UsageError: Nothing is there, or its file system is unknown or does not answer.
    """
    try:
        files, path = fsspec.core.url_to_fs(url)
        is_local = isinstance(files, LocalFileSystem)
        found = _local_files(Path(path)) if is_local else _remote_files(RemoteFiles(url))
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be opened: {error}") from error
    except Exception as error:  # each file system has its own
        raise UsageError(f"{url} cannot be read: {error}") from error
    if not found:
        raise UsageError(
            f"there is nothing at {url}. Name a file, a folder with files, or a prefix of .bin and "
            ".idx."
        )
    return found


def _local_files(path: Path) -> dict[str, OpenSource]:
    if path.is_file():
        paths = {path.name: path}
    elif path.is_dir():
        paths = {str(each.relative_to(path)): each for each in _files_below(path)}
    else:
        both = [path.with_name(path.name + end) for end in _ENDS]
        paths = {each.name: each for each in both if each.is_file()}
    return {name: partial(LocalSource, each, os.stat(each)) for name, each in paths.items()}


def _files_below(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder by name, links followed, but for a link to a folder above
    itself. Raises ``OSError``.

    Args:
        above: Device and inode of the folders above.
    """
    status = folder.stat()
    here = status.st_dev, status.st_ino
    if here in above:
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files_below(path, (*above, here))
        elif path.is_file():
            yield path


def _remote_files(remote: RemoteFiles) -> dict[str, OpenSource]:
    return {name: _Opener(remote, path) for name, path in remote.find(_ENDS).items()}


class _Opener:
    """Opens a remote file; each opening expects the facts of the first one."""

    def __init__(self, remote: RemoteFiles, path: str) -> None:
        self._remote, self._path, self._mutex = remote, path, threading.Lock()
        self._facts: Facts | None = None

    def __call__(self) -> SourceFile:
        with self._mutex:
            source = RemoteSource(self._remote, self._path, self._facts)
            self._facts = source.facts
            return source
