"""``scalai://<job>/…``: the tree of a job as a file system of fsspec, without a mount."""

import errno
import logging
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from scalai.vfs.model_files import HEADERS
from scalai.vfs.nodes import Content, File, Node, TreeLink, is_folder, resolve
from scalai.vfs.tree import Tree, find_store, read_table

log = logging.getLogger(__name__)

_SLICED = re.compile(rf"({'|'.join(map(re.escape, HEADERS))})\?slice=([^/?]*)\Z")
"""A slice by query, of a tensor by its name."""


class ScalaiFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Jobs of this machine, and their directories. Only for reading.

    Args:
        sources, record_tokens, shuffle, global_batch_size, rampup_batch_size: As of
            ``DatasetTable``; they overrule the job's own. fsspec's configuration has those for
            every process of a job (``FSSPEC_SCALAI='{"sources": {"corpus": "/data/corpus"}}'``).
        store_dir: Directory of stores, if not in shared memory.
        directory: Directory of the job's generations, for a job without a store here.

    Raises:
        UsageError: A value is wrong.
    """

    protocol = "scalai"
    cachable = True

    def __init__(
        self, sources: Mapping[str, str] | None = None,
        record_tokens: Mapping[str, int] | None = None, shuffle: Mapping[str, int] | None = None,
        global_batch_size: int | None = None, rampup_batch_size: Sequence[int] = (),
        store_dir: str | None = None, directory: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        if options.pop("remote_timeout_s", None) is not None:
            log.warning(
                "event=option_ignored remote_timeout_s: a read of a URL has 60 s. Leave it out."
            )
        super().__init__(**options)
        self._given = read_table({
            "sources": sources or {}, "record_tokens": record_tokens or {},
            "shuffle": shuffle or {}, "global_batch_size": global_batch_size,
            "rampup_batch_size": list(rampup_batch_size),
        })  # fmt: skip
        self._store_dir, self._directory = store_dir, directory
        self._trees: dict[str, Tree] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Path of a URL. ``w.npy?slice=0:2,:`` is ``w[0:2,:].npy``: a question mark would be a
        pattern."""
        path = super()._strip_protocol(path)
        return path if isinstance(path, list) else _SLICED.sub(r"[\2]\1", path)

    def _at(self, path: str) -> Node:
        """Node at ``<job>/…``; links are followed. Raises ``OSError``."""
        job, _, inside = self._strip_protocol(path).partition("/")
        tree = self._trees.get(job)
        if tree is None or (tree.is_new and tree.generations.numbers()):
            tree = self._trees[job] = Tree(self._find(job), self._given)
        tree.pins.sweep()
        return resolve(tree, inside)[1]

    def _find(self, job: str) -> Path:
        if self._directory is not None:
            return Path(self._directory)
        store_dir = None if self._store_dir is None else Path(self._store_dir)
        return find_store(job, store_dir, may_be_new=bool(self._given.sources))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return _info(path, self._at(path))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        node = self._at(path)
        if not is_folder(node):
            return [_info(path, node) if detail else path]
        names = [f"{path}/{name}" for name in node.names()]  # type: ignore[attr-defined]
        return [self.info(name) for name in names] if detail else names

    def expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, **options: Any
    ) -> list[str]:
        """Paths of patterns. A slice has brackets in its name, and is no pattern."""
        given = [path] if isinstance(path, str | os.PathLike) else path
        names = [self._strip_protocol(name) for name in given]
        slices = {name for name in names if self._is_slice(name)}
        patterns = [name for name in names if name not in slices]
        if patterns or not slices:
            slices.update(super().expand_path(patterns, recursive, maxdepth, **options))
        return sorted(slices)

    def get(self, rpath: Any, lpath: Any, recursive: bool = False, **options: Any) -> None:
        """Copy files to this machine, as every file system of fsspec does; a slice by its name."""
        path = self._strip_protocol(rpath)
        if isinstance(path, str) and isinstance(lpath, str) and self._is_slice(path):
            target = Path(lpath)
            is_folder_named = lpath.endswith("/") or target.is_dir()
            lpath = [str(target / path.rpartition("/")[2]) if is_folder_named else lpath]
            rpath = [path]
        super().get(rpath, lpath, recursive, **options)

    def _is_slice(self, path: str) -> bool:
        return "[" in path and self.isfile(path)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        content = self.open_content(path)
        try:
            low, high, _ = slice(start, end).indices(content.size_bytes)
            return content.read(low, max(high - low, 0))
        finally:
            content.close()

    def open_content(self, path: str) -> Content:
        """Open a file for reads at any place, without a file object. Raises ``OSError``."""
        node = self._at(path)
        if not isinstance(node, File):
            raise IsADirectoryError(errno.EISDIR, f"{path} is a folder")
        return node.open()

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None,
        cache_options: Mapping[str, Any] | None = None, **options: Any,
    ) -> "ScalaiFile":  # fmt: skip
        if mode != "rb":
            raise OSError(errno.EROFS, f"{path}: the tree of a job is only for reading")
        return ScalaiFile(self, path, self.open_content(path), **options)

    def created(self, path: str) -> Any:
        raise NotImplementedError("a job's tree does not say when something was created")

    def modified(self, path: str) -> Any:
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)


class ScalaiFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file; it keeps its generation."""

    def __init__(
        self, files: ScalaiFileSystem, path: str, content: Content, **options: Any
    ) -> None:
        self._content = content
        options = {**options, "size": content.size_bytes, "cache_type": "none"}
        super().__init__(files, path, "rb", **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._content.read(start, end - start)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._content.close()


def _info(path: str, node: Node) -> dict[str, Any]:
    assert not isinstance(node, TreeLink), "links were followed"
    if isinstance(node, File):
        return {"name": path, "size": node.size_bytes, "type": "file", "mtime": node.mtime}
    return {"name": path, "size": 0, "type": "directory", "mtime": node.mtime}
