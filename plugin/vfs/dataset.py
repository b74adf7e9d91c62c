"""A data set as a folder: its sources unchanged, and the samples of each replica of any DP."""

import errno
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from scalai.core.dataset.order import GlobalBatches, Shuffled
from scalai.core.errors import RefusedError
from scalai.vfs.nodes import File, ListedFolder, Node, listed, missing
from scalai.vfs.sample_sources import OpenSource, SourceFile, open_files
from scalai.vfs.token_index import read_dtype, read_index
from scalai.vfs.views import (
    FixedRecords,
    ReplicaFolder,
    ReplicaShare,
    SampleOrder,
    SampleRecords,
    Samples,
    Sequential,
    json_lines,
    sequences,
)

LINES = ".jsonl"
"""End of a file's name with a sample in each line."""
_REPLICA = re.compile(r"dp-(0|[1-9]\d{0,8})-of-([1-9]\d{0,8})")
KEPT = 64
"""Folders of replicas in memory."""


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """Place and samples of a data set, as of ``DatasetTable``.

    Attributes:
        tokens: Tokens of a sample of a ``.bin``; None: its sequences are the samples.
        seed: Seed of its order; None: the order of the file.
    """

    name: str
    url: str
    tokens: int | None = None
    seed: int | None = None

    def order(self, samples: int) -> SampleOrder:
        """Order of so many samples. Raises ``OSError``: they can have none."""
        if self.seed is None:
            return Sequential(samples)
        try:
            return Shuffled(samples, self.seed, self.name)
        except RefusedError as error:
            raise OSError(errno.EIO, f"{self.name} has no order: {error}") from error


@dataclass(frozen=True, slots=True)
class ViewedJob:
    """Facts of the job for its views.

    Attributes:
        batches: Global batches; None: unknown.
        dp: Returns the present DP; None: there is no state. Asked at every look.
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

    def __init__(self, spec: DatasetSpec, job: ViewedJob) -> None:
        self._spec, self._job = spec, job
        self._files = open_files(spec.url)
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

    def _share(self, dp_rank: int, dp: int) -> ReplicaShare:
        """Share of a replica. Raises ``FileNotFoundError``: no job can run so."""
        if self._job.batches is None:
            raise missing(f"dp-{dp_rank}-of-{dp}", "give --global-batch-size for views")
        try:
            return ReplicaShare(dp_rank, dp, self._job.batches)
        except RefusedError as error:
            raise missing(f"dp-{dp_rank}-of-{dp}", str(error)) from error

    def _pass(self) -> int:
        return self._job.consumed_samples() // max(self.samples().order.length, 1)

    def _has_views(self, dp: int) -> bool:
        with suppress(FileNotFoundError):
            return self._share(0, dp) is not None and self._record_file() is not None
        return False

    def _record_file(self) -> str | None:
        """The one file of samples among the sources; None: none, or several."""
        files = list(self._files)
        found = [name for name in files if name.endswith(LINES)]
        found += [name for name in files
                  if name.endswith(".bin") and name[:-4] + ".idx" in files]  # fmt: skip
        return found[0] if len(found) == 1 else None

    def samples(self) -> Samples:
        """The samples; the first call finds their places. Raises ``OSError``."""
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

    def _token_records(
        self, dtype: "np.dtype[Any]", index: SourceFile, bin_bytes: int
    ) -> SampleRecords:
        """The samples of a ``.bin`` of so many bytes."""
        if self._spec.tokens is None:
            return sequences(read_index(index), bin_bytes)
        record_bytes = self._spec.tokens * dtype.itemsize
        return FixedRecords(bin_bytes // record_bytes, record_bytes)


def source_folder(files: Mapping[str, OpenSource]) -> ListedFolder:
    """Folder of sources by their paths: their bytes, unchanged."""
    below: dict[str, dict[str, OpenSource]] = {}
    children: dict[str, Callable[[], Node]] = {}
    for path, open_source in files.items():
        first, slash, rest = path.partition("/")
        if slash:
            below.setdefault(first, {})[rest] = open_source
        else:
            children[first] = partial(_file, open_source)
    folders = listed({name: source_folder(inside) for name, inside in below.items()})
    return ListedFolder(dict(sorted({**children, **folders.children}.items())), 0.0)


def _file(open_source: OpenSource) -> File:
    source = open_source()
    try:
        return File(source.size_bytes, source.mtime, open_source)
    finally:
        source.close()
