"""Megatron's indexed data sets by ``scalai://<job>/dataset/<name>/...``, and through a mount.

``IndexedDataset`` knows local files and two object stores, by dicts and conditions of its own. So
its own ``initialize`` reads a local copy of the index, and the ``.bin`` gets another reader.

A memory map of a mounted file has the kernel kill its reader (SIGBUS) where the mount gives no
bytes, and a reader that waits in a map answers nobody. A system call returns an error instead, and
leaves the process to its other threads while it waits.

Source: megatron/core/datasets/indexed_dataset.py (0.14 to 0.20).
"""

import errno
import inspect
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import wrapt

from scalai.core.errors import RefusedError
from scalai.patches.hooking import Args, Call, Kwargs, given_to
from scalai.patches.megatron.data_facts import stated_data
from scalai.vfs.mounts import Mount, MountHealth, health_of, mount_of, silence_of
from scalai.vfs.sample_sources import LocalSource

START_S = 60.0
"""Deadline of a mount's answer before the opening of a data set, seconds."""
LOOK_S = 5.0
SAY_S = 30.0
"""Seconds of a read before its first warning; each further one after twice as long."""

log = logging.getLogger(__name__)


class MountedReader:
    """Megatron's ``_BinReader``: the tokens at any byte of a mount's ``.bin``.

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
    """Warns of waiting reads, in a thread of its own: a reader cannot."""

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
    """Check that a mount is served. Raises ``OSError``."""
    health = health_of(mount, START_S)
    if health is MountHealth.SILENT:
        raise OSError(errno.ETIMEDOUT, f"{mount.point} {silence_of(mount.point)}")
    if health is MountHealth.DEAD:
        raise _dead(str(mount.point), mount, errno.ENOTCONN)


@contextmanager
def asking(path: str, mount: Mount) -> Iterator[None]:
    """Ask a mount for a file: a long wait is a warning, and errors name the file, the reason and
    the way out."""
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


SCHEME = "scalai://"


CHECK_S = 0.001
"""Greatest age of the last look at a local file, seconds: below a tick of a file system's clock."""


class SourceReader:
    """Megatron's ``_BinReader``: the tokens at any byte of a ``.bin``.

    A local file is copied from a memory map: a system call costs as much as the copy.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        files, path = fsspec.core.url_to_fs(url)
        self._content = files.open_content(path)
        self._map = self._content.mapped() if isinstance(self._content, LocalSource) else None
        self._checked = 0.0

    def read(self, dtype: Any, count: int, offset: int) -> npt.NDArray[Any]:
        """Return ``count`` tokens from byte ``offset`` on.

        Raises:
            OSError: They cannot be read, or the source has changed. RefusedError: It ends before.
        """
        try:
            if self._map is None:
                return np.frombuffer(self._data(count * np.dtype(dtype).itemsize, offset), dtype)
            now = time.monotonic()
            if now - self._checked > CHECK_S:
                self._content.check()
                self._checked = now
            return np.frombuffer(self._map, dtype, count, offset).copy()
        except ValueError as error:
            raise RefusedError(
                f"{self._url} has {self._content.size_bytes} bytes, and its index wants {count} "
                f"tokens from byte {offset} on. They do not fit: put the right file back."
            ) from error

    def _data(self, size: int, offset: int) -> bytes:
        data = self._content.read(offset, size)
        if len(data) != size:
            raise ValueError("it ends before")
        return bytes(data)


def hook(module: Any) -> None:
    """Let the module of ``IndexedDataset`` read such URLs, and files of a mount."""
    wrapt.wrap_function_wrapper(module, "IndexedDataset.initialize", _initialize)
    wrapt.wrap_function_wrapper(module, "IndexedDataset.exists", _exists)


def check_cache(flags: Mapping[str, Any]) -> None:
    """Check that Megatron-LM has a place for indexes of its own.

    Args:
        flags: Its parsed arguments.

    Raises:
        RefusedError: It would write them beside data in a read-only tree.
    """
    if flags.get("data_cache_path"):
        return
    words: Sequence[str] = ()
    with suppress(OSError, ValueError, KeyError):  # Megatron-LM reads them, or says why not
        words = stated_data(flags)
    for word in words:
        if word.startswith(SCHEME) or mount_of(Path(word)) is not None:
            raise RefusedError(
                f"Megatron-LM would write indexes of its own beside {word}, and nothing can be "
                "written there. Add --data-cache-path FOLDER."
            )


def _exists(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    prefix = given_to(wrapped, args, kwargs)["path_prefix"]
    if not prefix.startswith(SCHEME):
        if (mount := mount_of(Path(prefix))) is not None:
            check_mount(mount)
        return wrapped(*args, **kwargs)
    files, path = fsspec.core.url_to_fs(prefix)
    return _is_there(files, path + ".idx") and _is_there(files, path + ".bin")


def _is_there(files: Any, path: str) -> bool:
    """The file is there. fsspec's own ``exists`` denies the file of a silent server. Raises
    ``OSError``."""
    try:
        files.info(path)
    except FileNotFoundError:
        return False
    return True


def _initialize(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    prefix, mmap = bound.arguments["path_prefix"], bound.arguments["mmap"]
    instance.bin_reader = instance.index = None  # which it deletes, also where it was never made
    copy_index, open_reader = _ways_to_read(prefix)
    if open_reader is None:
        wrapped(*args, **kwargs)
        return
    with tempfile.TemporaryDirectory(prefix="scalai-index-") as folder:
        copy = Path(folder) / "copy"
        copy_index(f"{copy}.idx")
        Path(f"{copy}.bin").touch()
        # The index stays mapped, and nothing reads the .bin before its reader is another one.
        bound.arguments.update(path_prefix=str(copy), mmap=False)
        wrapped(*bound.args, **bound.kwargs)
    instance.path_prefix, instance.mmap = prefix, mmap
    instance.bin_reader = open_reader()


def _ways_to_read(prefix: str) -> tuple[Callable[[str], Any], Callable[[], Any] | None]:
    """Calls that copy the index to a path and open the ``.bin``; None: Megatron's own reader does.
    Raises ``OSError``."""
    index, data = prefix + ".idx", prefix + ".bin"
    if prefix.startswith(SCHEME):
        files, path = fsspec.core.url_to_fs(index)
        return partial(files.get_file, path), partial(SourceReader, data)
    mount = mount_of(Path(prefix))
    if mount is None:
        return partial(shutil.copyfile, index), None
    check_mount(mount)
    return partial(_copy_mounted, index, mount), partial(MountedReader, data, mount)


def _copy_mounted(path: str, mount: Mount, target: str) -> None:
    with asking(path, mount):
        shutil.copyfile(path, target)
