"""A data set as a folder: its sources unchanged, and the samples of each replica of any DP.

Views are computed from ranges of the source at each read, in the order in which the replica draws
its samples. Nothing is written.
"""

import errno
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from scalai.core.dataset.order import GlobalBatches, Places, Shuffled
from scalai.core.degrees.batches import fit_batches
from scalai.core.errors import RefusedError
from scalai.vfs.nodes import Content, File, ListedFolder, Node, listed, missing
from scalai.vfs.sample_sources import OpenSource, SourceFile, open_files
from scalai.vfs.token_index import IndexContent, TokenIndex, index_content, read_dtype, read_index

MAX_PLACE = 1 << 62
"""Highest place of the global order."""


class SampleOrder(Protocol):
    """The order of a data set's samples over all replicas, pass after pass."""

    @property
    def length(self) -> int:
        """Places of a pass."""

    def samples_at(self, places: Places) -> Places:
        """Samples at these places over all passes, [places]."""


@dataclass(frozen=True, slots=True)
class Sequential:
    """The order of the samples in their file."""

    length: int

    def samples_at(self, places: Places) -> Places:
        return np.asarray(places % self.length, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    """The samples of replica ``dp_rank`` of ``dp``: of each global batch a contiguous part, all of
    one size, as ``scalai.OrderedBatches`` draws it.

    Its samples are numbered from the job's first one on: ``1 / dp`` of the places before a global
    batch are its own. After a change of DP a replica goes on there.

    Raises:
        RefusedError: ``dp`` does not divide every global batch.
    """

    dp_rank: int
    dp: int
    batches: GlobalBatches
    _begin: Places = field(init=False, repr=False, compare=False)
    _size: Places = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for _, size in self.batches.stages:
            fit_batches(size, self.dp, size)
        begin, size = np.array(self.batches.stages, dtype=np.int64).T
        object.__setattr__(self, "_begin", begin)
        object.__setattr__(self, "_size", size)

    def before(self, place: int) -> int:
        """Number of its samples before a place of the global order."""
        stage = np.searchsorted(self._begin, place, side="right") - 1
        begin, share = int(self._begin[stage]), int(self._size[stage]) // self.dp
        batches, rest = divmod(place - begin, share * self.dp)
        of_batch = min(max(rest - share * self.dp_rank, 0), share)
        return begin // self.dp + batches * share + of_batch

    def places(self, low: int, high: int) -> Places:
        """Places of its samples ``[low, high)``, [high - low]."""
        samples = np.arange(low, high, dtype=np.int64)
        stage = np.searchsorted(self._begin // self.dp, samples, side="right") - 1
        begin, size = self._begin[stage], self._size[stage]
        batch, within = np.divmod(samples - begin // self.dp, size // self.dp)
        return np.asarray(
            begin + batch * size + size // self.dp * self.dp_rank + within, dtype=np.int64
        )


SCAN_BYTES = 8 << 20
MAX_LINES = 1 << 28
"""Most lines of a source; their places take 2 GiB of memory."""


class SampleRecords(Protocol):
    """The samples of a source, one behind the other."""

    @property
    def count(self) -> int:
        """Number of samples."""

    @property
    def record_bytes(self) -> int | None:
        """Bytes of each; None: they differ."""

    def begins(self, samples: Places) -> Places:
        """First bytes of these samples in the source, [samples]."""

    def sizes(self, samples: Places) -> Places:
        """Sizes of these samples in bytes, [samples]."""


@dataclass(frozen=True, slots=True)
class FixedRecords:
    """Records of one size, from the beginning of the source; an incomplete one at the end is left
    out."""

    count: int
    record_bytes: int

    def begins(self, samples: Places) -> Places:
        return samples * self.record_bytes

    def sizes(self, samples: Places) -> Places:
        return np.full(len(samples), self.record_bytes, dtype=np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class MeasuredRecords:
    """Records with first bytes ``begin`` [count] and sizes ``size`` [count] in bytes."""

    begin: Places
    size: Places
    record_bytes: None = None

    @property
    def count(self) -> int:
        return len(self.begin)

    def begins(self, samples: Places) -> Places:
        return self.begin[samples]

    def sizes(self, samples: Places) -> Places:
        return self.size[samples]


def sequences(index: TokenIndex, bin_bytes: int) -> SampleRecords:
    """The sequences of Megatron's ``.bin``, of ``bin_bytes``, as samples.

    Raises:
        OSError: The index names bytes beyond its end, or sequences of less than no tokens.
    """
    begin, size_of = index.pointers, index.lengths.astype(np.int64) * index.dtype.itemsize
    wrong = np.flatnonzero((size_of < 0) | (begin < 0) | (begin > bin_bytes - size_of))
    if len(wrong):
        first = int(wrong[0])
        raise OSError(
            errno.EIO,
            f"the .idx says that sequence {first} has {size_of[first]} bytes from byte "
            f"{begin[first]} on, and the .bin has {bin_bytes}: they do not belong together, or one "
            "of them was cut or damaged.",
        )
    return MeasuredRecords(begin, size_of)


def json_lines(source: SourceFile) -> SampleRecords:
    """The lines of a source as samples, without empty ones; reads all of it once.

    Raises:
        OSError: It cannot be read, or has more than ``MAX_LINES`` lines.
    """
    ends: list[Places] = []
    count = 0
    for low in range(0, source.size_bytes, SCAN_BYTES):
        data = np.frombuffer(source.read(low, SCAN_BYTES), dtype=np.uint8)
        ends.append(np.flatnonzero(data == ord("\n")) + low + 1)
        count += len(ends[-1])
        if count > MAX_LINES:
            raise OSError(errno.EFBIG, f"more than {MAX_LINES} lines: cut the source into several")
    end = np.concatenate([*ends, np.zeros(0, np.int64)])
    if source.size_bytes and (not len(end) or end[-1] < source.size_bytes):
        # The last line has no end; ``read_record`` gives it one, so that lines can be dealt out.
        end = np.append(end, source.size_bytes + 1)
    begin = np.concatenate([np.zeros(min(len(end), 1), np.int64), end[:-1]])
    is_line = end - begin > 1
    return MeasuredRecords(begin[is_line], (end - begin)[is_line])


def read_records(source: SourceFile, records: SampleRecords, samples: Places) -> bytes:
    """Bytes of these samples, one behind the other. Adjacent samples of the source are read at
    once.

    Raises:
        OSError: The source cannot be read, or ends within a sample.
    """
    begins, sizes = records.begins(samples), records.sizes(samples)
    ends = begins + sizes
    breaks = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    parts = []
    for low, high in zip([0, *breaks.tolist()], [*breaks.tolist(), len(samples)], strict=True):
        begin, size = int(begins[low]), int(ends[high - 1] - begins[low])
        data = source.read(begin, size)
        if begin + size == source.size_bytes + 1 and len(data) == size - 1:
            data += b"\n"
        if len(data) != size:
            raise OSError(
                errno.EIO, f"the source ends at byte {begin + len(data)}, within a sample"
            )
        parts.append(data)
    return b"".join(parts)


MAX_MEASURED = 1 << 28
"""Most samples of different sizes in one view: their places are kept in memory."""
_PASS = re.compile(r"pass-(0|[1-9]\d{0,8})(\.\w+)")


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """The samples of a data set: their bytes, and their order.

    ``end`` is the end of a file's name; ``dtype`` is the type of tokens, None: of lines.
    """

    source: SourceFile
    records: SampleRecords
    order: SampleOrder
    end: str
    dtype: "np.dtype[Any] | None" = None


class PassContent:
    """A replica's samples of one pass, one behind the other.

    Raises:
        OSError: There are too many samples of different sizes to keep their places in memory.
    """

    def __init__(self, samples: Samples, share: ReplicaShare, number: int) -> None:
        self._samples, self._share = samples, share
        length = samples.order.length
        self._low = share.before(number * length)
        self.count = share.before((number + 1) * length) - self._low
        self._bytes = samples.records.record_bytes
        self._ends: Places | None = None
        if self._bytes is not None:
            self.size_bytes = self.count * self._bytes
            return
        if self.count > MAX_MEASURED:
            raise OSError(
                errno.EFBIG,
                f"{self.count} samples of different sizes are in one view; at most {MAX_MEASURED} "
                "are possible. Use a larger DP, or records of one size.",
            )
        self._ends = np.cumsum(samples.records.sizes(self._at(0, self.count)))
        self.size_bytes = int(self._ends[-1]) if self.count else 0

    def _at(self, low: int, high: int) -> Places:
        """Samples ``[low, high)`` of the pass, by their numbers in the source."""
        places = self._share.places(self._low + low, self._low + high)
        return self._samples.order.samples_at(places)

    def begins(self, low: int, high: int) -> Places:
        """First bytes of samples ``[low, high)`` in the view."""
        if self._ends is None:
            return np.arange(low, high, dtype=np.int64) * (self._bytes or 0)
        return self._ends[low:high] - self.sizes(low, high)

    def sizes(self, low: int, high: int) -> Places:
        """Sizes of samples ``[low, high)`` in bytes."""
        return self._samples.records.sizes(self._at(low, high))

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size_bytes)
        if offset >= end:
            return b""
        low, high = self._covering(offset, end)
        data = read_records(self._samples.source, self._samples.records, self._at(low, high))
        skip = offset - int(self.begins(low, low + 1)[0])
        return data[skip : skip + end - offset]

    def _covering(self, begin: int, end: int) -> tuple[int, int]:
        """Samples with bytes in ``[begin, end)`` of the view."""
        if self._ends is None:
            assert self._bytes is not None
            return begin // self._bytes, -(-end // self._bytes)
        low, high = np.searchsorted(self._ends, [begin, end - 1], side="right")
        return int(low), int(high) + 1

    def index(self, dtype: "np.dtype[Any]") -> IndexContent:
        """The ``.idx`` of the view: each sample is a sequence and a document."""
        item = dtype.itemsize
        return index_content(dtype, self.count, lambda a, b: self.sizes(a, b) // item, self.begins)

    def close(self) -> None:
        pass


class ReplicaFolder:
    """The files of one replica: ``pass-0.bin`` and ``pass-0.idx``, or ``pass-0.jsonl``, and so on.

    Passes have no end; a listing shows the first one, and the job's present one.

    Args:
        at: Returns the job's present pass.
    """

    mtime = 0.0
    KEPT = 8

    def __init__(self, samples: Samples, share: ReplicaShare, at: Callable[[], int]) -> None:
        self._samples, self._share, self._at = samples, share, at
        self._mutex = threading.Lock()
        self._passes: dict[int, PassContent] = {}

    def names(self) -> Iterable[str]:
        ends = [self._samples.end, *([".idx"] if self._samples.dtype is not None else [])]
        return [f"pass-{number}{end}" for number in sorted({0, self._at()}) for end in ends]

    def child(self, name: str) -> Node:
        match = _PASS.fullmatch(name)
        if match is None:
            raise missing(name, "expected pass-0" + self._samples.end)
        content: Content
        if match[2] == self._samples.end:
            content = self._pass(int(match[1]))
        elif match[2] == ".idx" and self._samples.dtype is not None:
            content = self._pass(int(match[1])).index(self._samples.dtype)
        else:
            raise missing(name)
        return File(content.size_bytes, self._samples.source.mtime, lambda: content)

    def _pass(self, number: int) -> PassContent:
        with self._mutex:
            if number not in self._passes:
                if (number + 1) * self._samples.order.length > MAX_PLACE:
                    raise missing(f"pass-{number}", "no training comes so far")
                self._passes[number] = PassContent(self._samples, self._share, number)
                while len(self._passes) > self.KEPT:
                    del self._passes[next(iter(self._passes))]
            return self._passes[number]


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
        found += [name for name in files if name.endswith(".bin") and name[:-4] + ".idx" in files]
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
