"""The tree of a job as a mounted file system, by FUSE (libfuse 3 and mfusepy).

Every file has its content for ever (``tree.py``), so the kernel may cache all of it: a second pass
over a file reads memory, without this process. Only names come and go. ``direct_io`` would be
faster at the first pass, and breaks the memory maps that Megatron reads by.
"""

import errno
import itertools
import logging
import os
import stat
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import mfusepy

from scalai.vfs.nodes import Content, File, Node, TreeLink, is_folder, walk
from scalai.vfs.tree import Tree

NAMES_S = 1.0
"""How long the kernel believes that a name is there."""
FOREVER_S = 3600.0
"""How long it believes a size: one that never changes."""
SWEEP_S = 5.0
AUTO_INVAL_DATA = 1 << 12
"""FUSE_CAP_AUTO_INVAL_DATA of fuse_common.h."""
AHEAD_BYTES = 1 << 20
"""What the kernel reads ahead of a sequential reader, in one request."""

log = logging.getLogger(__name__)


class TreeOperations(mfusepy.Operations):  # type: ignore[misc]
    """What the kernel asks. Called by several threads."""

    use_ns = True

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._handles = itertools.count(1)
        self._open: dict[int, Content] = {}
        self._said: set[str] = set()
        self._is_over = threading.Event()

    def init_with_config(self, conn_info: Any, config_3: Any) -> None:
        if conn_info is not None:
            conn_info.max_readahead = AHEAD_BYTES
            # Content never changes, so the kernel need not ask before each read of its cache.
            conn_info.want &= ~AUTO_INVAL_DATA
        # After the daemon has its final process: threads do not live through a fork.
        threading.Thread(target=self._sweep, daemon=True).start()

    def destroy(self, path: str) -> None:
        self._is_over.set()
        self._tree.close()

    def _sweep(self) -> None:
        while not self._is_over.wait(SWEEP_S):
            self._tree.pins.sweep()

    def _at(self, path: str) -> Node:
        try:
            return walk(self._tree, path)
        except FileNotFoundError as error:
            log.debug("event=not_there path=%s: %s", path, error)
            raise
        except OSError as error:
            self._say(path, error)
            raise

    def _say(self, path: str, error: OSError) -> None:
        """Log why something cannot be read: the reader gets a number only. Each reason once."""
        text = error.strerror or str(error)
        if text not in self._said:
            if len(self._said) > 1000:
                self._said.clear()
            self._said.add(text)
            log.error("event=read_failed path=%s: %s", path, text)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        node = self._at(path)
        common = {"st_uid": os.getuid(), "st_gid": os.getgid(), "st_mtime": int(node.mtime * 1e9)}
        if isinstance(node, File):
            return {"st_mode": stat.S_IFREG | 0o400, "st_nlink": 1, "st_size": node.size_bytes,
                    **common}  # fmt: skip
        if isinstance(node, TreeLink):
            return {"st_mode": stat.S_IFLNK | 0o777, "st_nlink": 1, "st_size": len(node.target),
                    **common}  # fmt: skip
        return {"st_mode": stat.S_IFDIR | 0o500, "st_nlink": 2, **common}

    def readlink(self, path: str) -> str:
        node = self._at(path)
        if not isinstance(node, TreeLink):
            raise OSError(errno.EINVAL, f"{path} is no link")
        return node.target

    def readdir(self, path: str, fh: int) -> Iterator[str]:
        node = self._at(path)
        if not is_folder(node):
            raise NotADirectoryError(errno.ENOTDIR, path)
        return iter([".", "..", *node.names()])  # type: ignore[attr-defined]

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, path)
        node = self._at(path)
        if not isinstance(node, File):
            raise IsADirectoryError(errno.EISDIR, path)
        try:
            content = node.open()
        except OSError as error:
            self._say(path, error)
            raise
        handle = next(self._handles)
        self._open[handle] = content
        return handle

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        try:
            return self._open[fh].read(offset, size)
        except OSError as error:
            self._say(path, error)
            raise OSError(errno.EIO, error.strerror) from error

    def release(self, path: str, fh: int) -> int:
        self._open.pop(fh).close()
        return 0


def source_name(name: str) -> str:
    """Return what the kernel's table calls a mount of this job or path. A comma in it would be the
    begin of another option, so all but plain characters are quoted as in a URL."""
    return "scalai:" + quote(os.fsencode(name), safe="/")


def serve(tree: Tree, mount_point: str, name: str) -> None:
    """Mount a tree and serve it until it is unmounted. Only this user may look into it.

    Raises:
        RuntimeError: It cannot be mounted; libfuse has said why.
    """
    mfusepy.FUSE(
        TreeOperations(tree), mount_point, foreground=True, ro=True, nosuid=True, nodev=True,
        fsname=source_name(name), subtype="scalai", kernel_cache=True, entry_timeout=NAMES_S,
        attr_timeout=FOREVER_S, negative_timeout=0.0, default_permissions=True,
    )  # fmt: skip
