"""Bounds for the memory of one piece of work, and for the kind and size of small files."""

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

MAX_POINTER_BYTES = 4096
"""Of a file with another one's name, as ``latest``."""


@contextmanager
def bounded_memory(size_bytes: int) -> Iterator[None]:
    """Limit this process's further memory to ``size_bytes``, if the system reports its use.

    A few bytes of a pickle can ask for any amount (a memo index, a ``bytearray``): a MemoryError is
    better than the end of the machine.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    except (OSError, StopIteration):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [used + size_bytes, *(limit for limit in (soft, hard) if limit >= 0)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a pipe or a device (it may never end) raises ``OSError``."""
    return open(path, "rb", opener=_regular)


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def read_pointer(path: Path) -> str | None:
    """Return the one name in a small file; None: there is no such file."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_POINTER_BYTES + 1)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENXIO):
            return None
        raise
    if len(data) > MAX_POINTER_BYTES or b"\0" in data:
        return None
    try:
        return data.decode().strip()
    except ValueError:
        return None


def short_text(where: object, error: MemoryError) -> str:
    """Say that reading ran out of memory; its two possible causes look alike."""
    return (
        f"memory ran out while {where} was read ({str(error) or 'MemoryError'}). Let the command "
        "have more (`ulimit -d -v`, the limit of this container); where it has enough, a size in "
        "this file is damaged: use another checkpoint."
    )
