"""Nodes of a virtual file system, folders, files and links, and the walk along a path.

A front end (``fuse.py``, ``filesystem.py``) walks the tree; each refusal is an ``OSError`` with its
reason.
"""

import errno
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol


class Content(Protocol):
    """The bytes of an open file; they stay the same until its end."""

    @property
    def size_bytes(self) -> int:
        """Size."""

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on, fewer at the end of the file.

        Raises:
            OSError: They cannot be read, or the file has changed.
        """

    def close(self) -> None:
        """End reading; a second call does nothing."""


class Node(Protocol):
    """Something with a name."""

    @property
    def mtime(self) -> float:
        """Time of its content, seconds since 1970."""


@dataclass(frozen=True, slots=True)
class TreeLink:
    """A name for another path, relative to the link's folder."""

    target: str
    mtime: float


@dataclass(frozen=True, slots=True)
class File:
    """A file. ``open`` raises ``OSError``."""

    size_bytes: int
    mtime: float
    open: Callable[[], Content]


@dataclass(frozen=True, slots=True)
class ListedFolder:
    """A folder of known children: their makers by name."""

    children: dict[str, Callable[[], Node]]
    mtime: float

    def names(self) -> Iterable[str]:
        return list(self.children)

    def child(self, name: str) -> Node:
        if name not in self.children:
            raise missing(name)
        return self.children[name]()


def listed(nodes: Mapping[str, Node]) -> ListedFolder:
    """A folder of these nodes."""
    return ListedFolder({name: partial(_same, node) for name, node in nodes.items()}, 0.0)


def _same(node: Node) -> Node:
    return node


@dataclass(frozen=True, slots=True)
class InMemory:
    """Content in memory."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def close(self) -> None:
        pass


def in_memory(data: bytes, mtime: float) -> File:
    """A file with this content."""
    content = InMemory(data)
    return File(len(data), mtime, lambda: content)


def is_folder(node: Node) -> bool:
    """Whether a node has children."""
    return not isinstance(node, File | TreeLink)


def missing(name: str, why: str = "there is none of that name") -> FileNotFoundError:
    """Error of a name without a node."""
    return FileNotFoundError(errno.ENOENT, f"{name}: {why}")


def walk(root: Node, path: str) -> Node:
    """Node at a path, without following links.

    Raises:
        OSError: There is none, or a file is in the way. ``..`` is no name here: front ends resolve
            it first, so a caller with ``..`` wants out of the tree.
    """
    node = root
    for name in path.strip("/").split("/"):
        if name in ("", "."):
            continue
        if name == "..":
            raise missing(path, "a path may not have '..'")
        if isinstance(node, File | TreeLink):
            raise NotADirectoryError(errno.ENOTDIR, f"{path}: what lies above {name!r} is a file")
        node = node.child(name)  # type: ignore[attr-defined]
    return node


MAX_LINKS = 8
"""Longest chain of links."""


def resolve(root: Node, path: str) -> tuple[str, Node]:
    """Path without links, and its node, after following all links. Raises ``OSError``."""
    done: list[str] = []
    left = [name for name in path.split("/") if name not in ("", ".")]
    links = 0
    node = root
    while left:
        name = left.pop(0)
        node = walk(node, name)
        if isinstance(node, TreeLink):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, f"{path} leads through more than {MAX_LINKS} links")
            left = [*node.target.split("/"), *left]
            node = walk(root, "/".join(done))
        else:
            done.append(name)
    return "/".join(done), node
