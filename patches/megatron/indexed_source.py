"""Megatron's indexed data sets by ``scalai://<job>/dataset/<name>/…``, without a mount.

``IndexedDataset`` knows local files and two object stores, by dicts and conditions of its own. So
its own ``initialize`` reads a local copy of the index, and the ``.bin`` gets another reader.

Source: megatron/core/datasets/indexed_dataset.py (0.14 to 0.20).
"""

import inspect
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import wrapt

from scalai.core.errors import RefusedError
from scalai.patches.calls import Args, Call, Kwargs
from scalai.vfs.sources import LocalSource

SCHEME = "scalai://"


CHECK_S = 0.001
"""How old the last look at a local file may be: less than a tick of a file system's own clock."""


class SourceReader:
    """What Megatron calls a ``_BinReader``: the tokens at any byte of a ``.bin``.

    A local file is copied from a memory map: a system call costs as much as the copy.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._open()

    def _open(self) -> None:
        files, path = fsspec.core.url_to_fs(self._url)
        self._content, self._process = files.open_content(path), os.getpid()
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
                f"tokens from byte {offset} on. They do not belong together."
            ) from error

    def _data(self, size: int, offset: int) -> bytes:
        if os.getpid() != self._process:
            self._open()  # a worker of a loader was forked: threads and locks are its parent's
        data = self._content.read(offset, size)
        if len(data) != size:
            raise ValueError("it ends before")
        return bytes(data)


def hook(module: Any) -> None:
    """Have the module of ``IndexedDataset`` read such URLs too."""
    wrapt.wrap_function_wrapper(module, "IndexedDataset.initialize", _initialize)
    wrapt.wrap_function_wrapper(module, "IndexedDataset.exists", _exists)


def _exists(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    prefix = inspect.signature(wrapped).bind(*args, **kwargs).arguments["path_prefix"]
    if not prefix.startswith(SCHEME):
        return wrapped(*args, **kwargs)
    files, path = fsspec.core.url_to_fs(prefix)
    return _is_there(files, path + ".idx") and _is_there(files, path + ".bin")


def _is_there(files: Any, path: str) -> bool:
    """Whether a file is there. fsspec's own ``exists`` says of a server that does not answer that
    there is none. Raises ``OSError``."""
    try:
        files.info(path)
    except FileNotFoundError:
        return False
    return True


def _initialize(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> None:
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    prefix, mmap = bound.arguments["path_prefix"], bound.arguments["mmap"]
    if not prefix.startswith(SCHEME):
        wrapped(*args, **kwargs)
        return
    files, path = fsspec.core.url_to_fs(prefix)
    with tempfile.TemporaryDirectory(prefix="scalai-index-") as folder:
        copy = Path(folder) / "copy"
        files.get_file(path + ".idx", f"{copy}.idx")
        Path(f"{copy}.bin").touch()
        # The index stays mapped, and nothing reads the .bin before its reader is another one.
        bound.arguments.update(path_prefix=str(copy), mmap=False)
        wrapped(*bound.args, **bound.kwargs)
    instance.path_prefix, instance.mmap = prefix, mmap
    instance.bin_reader = SourceReader(prefix + ".bin")
