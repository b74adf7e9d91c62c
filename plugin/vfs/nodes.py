"""What a virtual file system is made of: folders, files, links, and how a path leads to one.

Nothing here knows of a mount: a front end (``fuse.py``, ``filesystem.py``) walks the tree, and
whatever it may not show is an ``OSError`` that says why.
"""

import errno
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol


class Content(Protocol):
    """The bytes of a file that is open, which stay the same until it is closed."""

    @property
    def size_bytes(self) -> int:
        """How many there are."""

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes from ``offset`` on, ``size`` of them, or fewer where the file ends.

        Raises:
            OSError: They cannot be read, or are not those of this file any more.
        """

    def close(self) -> None:
        """End reading; a second call does nothing."""


class Node(Protocol):
    """Something with a name."""

    @property
    def mtime(self) -> float:
        """Seconds since 1970 at which its content was made."""


@dataclass(frozen=True, slots=True)
class TreeLink:
    """A name for another path, which is given from the folder that the link lies in."""

    target: str
    mtime: float


@dataclass(frozen=True, slots=True)
class File:
    """A file. ``open`` raises ``OSError`` where its bytes are not to be had."""

    size_bytes: int
    mtime: float
    open: Callable[[], Content]


class TreeFolder(Node, Protocol):
    """A folder. It may have more children than it lists, such as slices of a tensor."""

    def names(self) -> Iterable[str]:
        """Return the children that a listing shows, in order."""

    def child(self, name: str) -> Node:
        """Return a child. Raises ``FileNotFoundError``."""


@dataclass(frozen=True, slots=True)
class ListedFolder:
    """A folder whose children are known: what makes each of them, by name."""

    children: dict[str, Callable[[], Node]]
    mtime: float

    def names(self) -> Iterable[str]:
        return list(self.children)

    def child(self, name: str) -> Node:
        if name not in self.children:
            raise missing(name)
        return self.children[name]()


def listed(nodes: Mapping[str, Node]) -> ListedFolder:
    """Return a folder of these nodes."""
    return ListedFolder({name: partial(_same, node) for name, node in nodes.items()}, 0.0)


def _same(node: Node) -> Node:
    return node


@dataclass(frozen=True, slots=True)
class InMemory:
    """Content that is at hand."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]

    def close(self) -> None:
        pass


def in_memory(data: bytes, mtime: float) -> File:
    """Return a file with this content."""
    content = InMemory(data)
    return File(len(data), mtime, lambda: content)


def is_folder(node: Node) -> bool:
    """Whether a node has children."""
    return not isinstance(node, File | TreeLink)


def missing(name: str, why: str = "there is none of that name") -> FileNotFoundError:
    """Return the error of a name that is not in a folder."""
    return FileNotFoundError(errno.ENOENT, f"{name}: {why}")


def walk(root: Node, path: str) -> Node:
    """Return what lies at a path, of which links are not followed.

    Raises:
        OSError: Nothing does, or a file is in the way. ``..`` is no name here: front ends resolve
            it before they ask, so whoever sends it wants out of the tree.
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
"""How many links lead on to each other at most."""


def resolve(root: Node, path: str) -> tuple[str, Node]:
    """Return what lies at a path when all links of the tree are followed, and its path without
    them. Raises ``OSError``."""
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
