"""Megatron's reads of a file that Scalai has mounted: each ends in bytes or with a reason.

A memory map of such a file would have the kernel kill its reader (SIGBUS) where the mount gives no
bytes, and a reader that waits in a map answers nobody. A call of the system returns an error, and
leaves the process to its other threads while it waits.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.errors import RefusedError
from scalai.vfs.mounts import Health, Mount, health_of, silence_of

START_S = 60.0
"""How long a mount may take to answer before a data set is opened."""
LOOK_S = 5.0
SAY_S = 30.0
"""A read that takes longer is told of, and again after twice as long each time."""

log = logging.getLogger(__name__)


class MountedReader:
    """What Megatron calls a ``_BinReader``: the tokens at any byte of a ``.bin`` of a mount.

    Args:
        path: The file.
        mount: Where it lies.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: str, mount: Mount) -> None:
        self._path, self._mount = path, mount
        with asking(path, mount):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._size_bytes = os.fstat(self._descriptor).st_size

    def read(self, dtype: Any, count: int, offset: int) -> npt.NDArray[Any]:
        """Return ``count`` tokens from byte ``offset`` on.

        Raises:
            OSError: The mount does not give them. RefusedError: The file ends before.
        """
        size = count * np.dtype(dtype).itemsize
        if offset + size > self._size_bytes:
            raise RefusedError(
                f"{self._path} has {self._size_bytes} bytes, and its index wants {count} tokens "
                f"from byte {offset} on. They do not fit: put the right file back."
            )
        with asking(self._path, self._mount):
            data = self._read(size, offset)
        return np.frombuffer(data, dtype)

    def _read(self, size: int, offset: int) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        while len(data) < size:
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                raise OSError(errno.EIO, "it ends before its size")
            data += more
        return data

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)


class _Watch:
    """Says that reads wait, by a thread of its own: who reads cannot."""

    def __init__(self) -> None:
        self._process = -1
        self.waiting: dict[int, tuple[float, str, Mount]] = {}
        """By thread: since when (monotonic), for which file, of which mount."""

    def begin(self, path: str, mount: Mount) -> None:
        if self._process != os.getpid():  # of a process that was forked, threads are its parent's
            self._process, self.waiting = os.getpid(), {}
            threading.Thread(target=self._look, name="mounted reads", daemon=True).start()
        self.waiting[threading.get_ident()] = time.monotonic(), path, mount

    def end(self) -> None:
        self.waiting.pop(threading.get_ident(), None)

    def _look(self) -> None:
        due: dict[tuple[float, str, Mount], float] = {}
        while True:
            time.sleep(LOOK_S)
            reads = list(self.waiting.values())
            due = {read: due.get(read, SAY_S) for read in reads}
            for since, path, mount in reads:
                if (waited := time.monotonic() - since) >= due[since, path, mount]:
                    due[since, path, mount] *= 2
                    log.warning(
                        "event=read_waits path=%s seconds=%.0f: the mount at %s %s",
                        path, waited, mount.point, silence_of(mount.point),
                    )  # fmt: skip


_WATCH = _Watch()


def check_mount(mount: Mount) -> None:
    """See that somebody serves a mount. Raises ``OSError``."""
    health = health_of(mount, START_S)
    if health is Health.SILENT:
        raise OSError(errno.ETIMEDOUT, f"{mount.point} {silence_of(mount.point)}")
    if health is Health.DEAD:
        raise _dead(str(mount.point), mount, errno.ENOTCONN)


@contextmanager
def asking(path: str, mount: Mount) -> Iterator[None]:
    """Ask a mount for a file: a long wait is told of, and errors name the file, the reason and the
    way out."""
    _WATCH.begin(path, mount)
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            raise _dead(path, mount, error.errno) from error
        if error.errno != errno.EIO:
            raise
        raise OSError(
            errno.EIO,
            f"{path} cannot be read: its source changed, or gives errors. The log of the mount at "
            f"{mount.point} has the reason (event=read_failed). Put the source back, mount again, "
            "and start the job again.",
        ) from error
    finally:
        _WATCH.end()


def _dead(path: str, mount: Mount, number: int) -> OSError:
    return OSError(
        number,
        f"{path} cannot be read: the process of the mount at {mount.point} has ended "
        f"({os.strerror(number)}). Mount again (scalai mount), and start the job again: it goes on "
        "from the state that it keeps.",
    )
