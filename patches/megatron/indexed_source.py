"""Megatron's indexed data sets by ``scalai://<job>/dataset/<name>/…``, and through a mount.

``IndexedDataset`` knows local files and two object stores, by dicts and conditions of its own. So
its own ``initialize`` reads a local copy of the index, and the ``.bin`` gets another reader. It
would map files of a mount, and die of the first byte that the mount cannot give, without a reason.

Source: megatron/core/datasets/indexed_dataset.py (0.14 to 0.20).
"""

import inspect
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from scalai.patches.megatron.mounted_source import MountedReader, asking, check_mount
from scalai.vfs.mounts import Mount, mount_of
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
    """Have the module of ``IndexedDataset`` read such URLs, and files of a mount."""
    wrapt.wrap_function_wrapper(module, "IndexedDataset.initialize", _initialize)
    wrapt.wrap_function_wrapper(module, "IndexedDataset.exists", _exists)


def check_cache(flags: Mapping[str, Any]) -> None:
    """See that Megatron-LM has a place for indexes of its own.

    Args:
        flags: Its parsed arguments.

    Raises:
        RefusedError: It would write them beside data, where nothing can be written.
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
    """Return what copies the index to a path, and what opens the ``.bin``, None where Megatron's
    own reader does. Raises ``OSError``."""
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
