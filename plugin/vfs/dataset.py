"""A data set as a folder: its sources unchanged, and the samples of each replica of any DP."""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from scalai.core.dataset.global_batches import GlobalBatches
from scalai.core.dataset.own_order import Shuffled
from scalai.core.errors import RefusedError, UsageError
from scalai.remote.files import files_at, remote_file
from scalai.remote.patience import WITHIN_S, Patience
from scalai.vfs.cache import BlockCache
from scalai.vfs.nodes import File, Listed, Node, listed, missing
from scalai.vfs.records import FixedRecords, Records, json_lines, sequences
from scalai.vfs.shares import Order, Sequential, Share
from scalai.vfs.sources import LocalSource, RemoteSource, Source
from scalai.vfs.token_index import read_dtype, read_index
from scalai.vfs.views import ReplicaFolder, Samples

OpenSource = Callable[[], Source]
"""Opens a source. Raises ``OSError``."""
LOCAL = ("file", "local")
LINES = ".jsonl"
"""How files end that have a sample in each line."""
_REPLICA = re.compile(r"dp-(0|[1-9]\d{0,8})-of-([1-9]\d{0,8})")
KEPT = 64
"""Replicas whose folders stay in memory."""


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """Where a data set lies, and what its samples are: as of ``DatasetTable``.

    Attributes:
        tokens: Tokens of a sample, of a ``.bin``; None: its sequences are the samples.
        seed: Of its order; None: the samples come as they lie.
        remote_timeout_s: How long what a read needs of a URL may take, all tries together.
    """

    name: str
    url: str
    tokens: int | None = None
    seed: int | None = None
    remote_timeout_s: float = WITHIN_S

    def order(self, samples: int) -> Order:
        """Return the order of so many samples.

        Raises:
            OSError: They can have none.
        """
        if self.seed is None:
            return Sequential(samples)
        try:
            return Shuffled(samples, self.seed, self.name)
        except RefusedError as error:
            raise OSError(errno.EIO, f"{self.name} has no order: {error}") from error


@dataclass(frozen=True, slots=True)
class Job:
    """What the views need to know of the job.

    Attributes:
        batches: Its global batches, None where nobody has said them.
        dp: Returns the present DP, None where there is no state; asked at every look.
        consumed_samples: Returns the samples consumed so far; likewise.
    """

    batches: GlobalBatches | None
    dp: Callable[[], int | None]
    consumed_samples: Callable[[], int]


class DatasetFolder:
    """The folder of a data set.

    Raises:
        UsageError: There is nothing at its URL.
    """

    mtime = 0.0

    def __init__(self, spec: DatasetSpec, cache: BlockCache, job: Job) -> None:
        self._spec, self._job = spec, job
        self._files = open_files(spec.url, cache, spec.remote_timeout_s)
        self._source = source_folder(self._files)
        self._mutex = threading.RLock()
        self._samples: Samples | None = None
        self._replicas: dict[tuple[int, int], ReplicaFolder] = {}

    def names(self) -> Iterable[str]:
        dp = self._job.dp() or 0
        return ["source", *(f"dp-{rank}-of-{dp}" for rank in range(dp) if self._has_views(dp))]

    def child(self, name: str) -> Node:
        if name == "source":
            return self._source
        match = _REPLICA.fullmatch(name)
        if match is None or not int(match[1]) < int(match[2]):
            raise missing(name, "expected source, or dp-R-of-D with R below D")
        return self._replica(int(match[1]), int(match[2]))

    def _replica(self, dp_rank: int, dp: int) -> ReplicaFolder:
        key = dp_rank, dp
        with self._mutex:
            if key not in self._replicas:
                share = self._share(dp_rank, dp)
                self._replicas[key] = ReplicaFolder(self.samples(), share, self._pass)
                while len(self._replicas) > KEPT:
                    del self._replicas[next(iter(self._replicas))]
            return self._replicas[key]

    def _share(self, dp_rank: int, dp: int) -> Share:
        """Return what a replica draws. Raises ``FileNotFoundError`` where no job can run so."""
        if self._job.batches is None:
            raise missing(f"dp-{dp_rank}-of-{dp}", "give --global-batch-size for views")
        try:
            return Share(dp_rank, dp, self._job.batches)
        except RefusedError as error:
            raise missing(f"dp-{dp_rank}-of-{dp}", str(error)) from error

    def _pass(self) -> int:
        return self._job.consumed_samples() // max(self.samples().order.length, 1)

    def _has_views(self, dp: int) -> bool:
        with suppress(FileNotFoundError):
            return self._share(0, dp) is not None and self._record_file() is not None
        return False

    def _record_file(self) -> str | None:
        """Return the one file of samples among the sources; None: none, or several."""
        files = list(self._files)
        found = [name for name in files if name.endswith(LINES)]
        found += [name for name in files
                  if name.endswith(".bin") and name[:-4] + ".idx" in files]  # fmt: skip
        return found[0] if len(found) == 1 else None

    def samples(self) -> Samples:
        """Return the samples; finds out where they lie at the first call. Raises ``OSError``."""
        with self._mutex:
            if self._samples is None:
                self._samples = self._find_samples()
            return self._samples

    def _find_samples(self) -> Samples:
        name = self._record_file()
        if name is None:
            raise missing(
                self._spec.name,
                "views need one file of samples: .jsonl, or .bin with its .idx. Name that file.",
            )
        source = self._files[name]()
        if name.endswith(LINES):
            records = json_lines(source)
            return Samples(source, records, self._spec.order(records.count), LINES)
        index = self._files[name[:-4] + ".idx"]()
        try:
            dtype = read_dtype(index)
            records = self._token_records(dtype, index, source.size_bytes)
        finally:
            index.close()
        return Samples(source, records, self._spec.order(records.count), ".bin", dtype)

    def _token_records(self, dtype: "np.dtype[Any]", index: Source, bin_bytes: int) -> Records:
        """Return the samples of a ``.bin`` of so many bytes."""
        if self._spec.tokens is None:
            return sequences(read_index(index), bin_bytes)
        record_bytes = self._spec.tokens * dtype.itemsize
        return FixedRecords(bin_bytes // record_bytes, record_bytes)


def source_folder(files: Mapping[str, OpenSource]) -> Listed:
    """Return the folder of sources, by their paths: their bytes, unchanged."""
    below: dict[str, dict[str, OpenSource]] = {}
    children: dict[str, Callable[[], Node]] = {}
    for path, open_source in files.items():
        first, slash, rest = path.partition("/")
        if slash:
            below.setdefault(first, {})[rest] = open_source
        else:
            children[first] = partial(_file, open_source)
    folders = listed({name: source_folder(inside) for name, inside in below.items()})
    return Listed(dict(sorted({**children, **folders.children}.items())), 0.0)


def _file(open_source: OpenSource) -> File:
    source = open_source()
    try:
        return File(source.size_bytes, source.mtime, open_source)
    finally:
        source.close()


def open_files(
    url: str, cache: BlockCache, remote_timeout_s: float = WITHIN_S
) -> dict[str, OpenSource]:
    """Return what opens each file at a URL, by its path below it.

    Raises:
        UsageError: Nothing is there, or its file system is unknown or does not answer.
    """
    try:
        files, path = fsspec.core.url_to_fs(url)
        is_local = bool({files.protocol} & {*LOCAL} if isinstance(files.protocol, str)
                        else {*files.protocol} & {*LOCAL})  # fmt: skip
        found = (
            _local_files(Path(path))
            if is_local
            else _remote_files(url, files, path, cache, remote_timeout_s)
        )
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be opened: {error}") from error
    except Exception as error:  # each file system has its own
        raise UsageError(f"{url} cannot be read: {error}") from error
    if not found:
        raise UsageError(
            f"there is nothing at {url}. Name a file, a folder with files, or a prefix of .bin and "
            ".idx."
        )
    return found


_ENDS = (".bin", ".idx")


def _local_files(path: Path) -> dict[str, OpenSource]:
    if path.is_file():
        paths = {path.name: path}
    elif path.is_dir():
        paths = {str(each.relative_to(path)): each for each in _files_below(path)}
    else:
        both = [path.with_name(path.name + end) for end in _ENDS]
        paths = {each.name: each for each in both if each.is_file()}
    return {name: partial(LocalSource, each, os.stat(each)) for name, each in paths.items()}


def _files_below(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder by name, also where links lead, but for a link to one of the
    folders that it lies in. Raises ``OSError``.

    Args:
        above: Device and inode of these folders.
    """
    status = folder.stat()
    here = status.st_dev, status.st_ino
    if here in above:
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files_below(path, (*above, here))
        elif path.is_file():
            yield path


def _remote_files(
    url: str, files: Any, path: str, cache: BlockCache, within_s: float
) -> dict[str, OpenSource]:
    found = files_at(files, path, _patience(url, cache, within_s), _ENDS)
    return {
        name: _Once(partial(_remote, files.unstrip_protocol(each), files, each, cache, within_s))
        for name, each in found.items()
    }


def _remote(url: str, files: Any, path: str, cache: BlockCache, within_s: float) -> Source:
    return RemoteSource(url, remote_file(files, path), cache, _patience(url, cache, within_s))


def _patience(url: str, cache: BlockCache, within_s: float) -> Patience:
    return Patience(url, within_s, silences=cache.silences)


class _Once:
    """Opens a source at the first call, and gives the same one from then on: what it was then is
    what it has to stay."""

    def __init__(self, open_source: Callable[[], Source]) -> None:
        self._open, self._mutex = open_source, threading.Lock()
        self._source: Source | None = None

    def __call__(self) -> Source:
        with self._mutex:
            if self._source is None:
                self._source = _Shared(self._open())
            return self._source


class _Shared:
    """A source that stays open for as long as the process runs."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.size_bytes, self.mtime = source.size_bytes, source.mtime
        self.read = source.read

    def close(self) -> None:
        pass
