"""A file behind a URL, as whoever reads it sees it; and what there is at a URL."""

import time
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from scalai.remote.calls import Calls
from scalai.remote.facts import Facts, check_same, facts_of
from scalai.remote.http_file import HttpFile
from scalai.remote.patience import Patience

LEAST_S = 1.0
"""How long it may take at least to ask whether a file is the same, behind a long read."""


class RemoteFile(Protocol):
    """A file that is read in ranges; ``HttpFile`` says how."""

    def look(self, within_s: float) -> Facts: ...

    def read(
        self, facts: Facts, ranges: Sequence[tuple[int, int]], within_s: float
    ) -> list[bytes]: ...


class FsspecFile:
    """A file of any file system of fsspec. Methods and errors are those of ``HttpFile``.

    That the file is the same is asked behind a read, so that what changed before it ended is seen.
    """

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path
        self._calls = Calls(files)

    def look(self, within_s: float) -> Facts:
        self._files.invalidate_cache(self._path)
        info = self._calls.call("info", within_s, self._path)
        if info.get("type", "file") != "file":
            raise IsADirectoryError("it is no file")
        return facts_of(info)

    def read(self, facts: Facts, ranges: Sequence[tuple[int, int]], within_s: float) -> list[bytes]:
        until = time.monotonic() + within_s
        begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
        try:
            if len(ranges) == 1:
                # By name: what is second and third is another thing of s3fs.
                place = {"start": begins[0], "end": ends[0]}
                found = [self._calls.call("cat_file", within_s, self._path, **place)]
            else:
                paths = [self._path] * len(ranges)
                found = self._calls.call(
                    "cat_ranges", within_s, paths, begins, ends, on_error="raise"
                )
        except (FileNotFoundError, PermissionError, TimeoutError):
            raise
        except Exception:
            self._check(facts, until)  # a range beyond the end of what is there now
            raise
        self._check(facts, until)
        for data, (begin, end) in zip(found, ranges, strict=True):
            if len(data) != end - begin:
                raise OSError(f"{len(data)} bytes came instead of {end - begin}")
        return [bytes(data) for data in found]

    def _check(self, facts: Facts, until: float) -> None:
        check_same(facts, self.look(max(until - time.monotonic(), LEAST_S)))


def _is_web(files: Any) -> bool:
    protocol = files.protocol
    return "http" in ((protocol,) if isinstance(protocol, str) else protocol)


def remote_file(files: Any, path: str) -> RemoteFile:
    """Return a file of an fsspec file system, which is not asked for it yet."""
    return HttpFile(files, path) if _is_web(files) else FsspecFile(files, path)


def files_at(files: Any, path: str, patience: Patience, ends: Sequence[str]) -> dict[str, str]:
    """Return the paths of what lies at a path of an fsspec file system, by their names below it: a
    file, the files of a folder, or else those of them that have its name before one of the ends.

    A web server's folder is a page of links, and its URL ends with a slash.

    Raises:
        OSError: That cannot be found out.
    """
    root = path.rstrip("/")
    if not (_is_web(files) and path.endswith("/")):
        try:
            patience.ask("looked at", remote_file(files, path).look)
            return {_name(files, root): path}
        except FileNotFoundError:
            both = [root + end for end in ends]
            return {_name(files, each): each for each in both if _is_there(files, each, patience)}
        except IsADirectoryError:
            pass
    calls = Calls(files)
    found = patience.ask("listed", lambda within_s: calls.call("find", within_s, path))
    below = {_unquoted(files, each[len(root) + 1 :]): each for each in found}
    return {name: each for name, each in below.items() if ".." not in name.split("/")}


def _is_there(files: Any, path: str, patience: Patience) -> bool:
    try:
        patience.ask("looked at", remote_file(files, path).look)
    except FileNotFoundError:
        return False
    return True


def _name(files: Any, path: str) -> str:
    """Return the name of a file; behind that of a web server there may be a query."""
    return _unquoted(files, urlsplit(path).path if _is_web(files) else path).rpartition("/")[2]


def _unquoted(files: Any, name: str) -> str:
    return unquote(name) if _is_web(files) else name
