"""A replica's samples as files: made of ranges of the source, in the order in which the replica
reads them. Nothing is written; what is asked for is computed and read.
"""

import errno
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalai.core.dataset.order import Places
from scalai.vfs.nodes import Content, File, Node, missing
from scalai.vfs.records import Records, read_records
from scalai.vfs.shares import MAX_PLACE, Order, Share
from scalai.vfs.sources import Source
from scalai.vfs.token_index import IndexContent, index_content

MAX_MEASURED = 1 << 28
"""Samples of a pass and replica whose places are kept in memory, where their sizes differ."""
_PASS = re.compile(r"pass-(0|[1-9]\d{0,8})(\.\w+)")


@dataclass(frozen=True, eq=False, slots=True)
class Samples:
    """The samples of a data set: their bytes, and their order.

    ``end`` is how a file of them is called; ``dtype`` is that of tokens, None of lines.
    """

    source: Source
    records: Records
    order: Order
    end: str
    dtype: "np.dtype[Any] | None" = None


class PassContent:
    """What a replica reads in one pass, its samples one behind the other.

    Raises:
        OSError: There are too many samples of different sizes to know their places.
    """

    def __init__(self, samples: Samples, share: Share, number: int) -> None:
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
        """Return samples ``[low, high)`` of the pass, by their numbers in the source."""
        places = self._share.places(self._low + low, self._low + high)
        return self._samples.order.samples_at(places)

    def begins(self, low: int, high: int) -> Places:
        """Return where samples ``[low, high)`` begin in the view, in bytes."""
        if self._ends is None:
            return np.arange(low, high, dtype=np.int64) * (self._bytes or 0)
        return self._ends[low:high] - self.sizes(low, high)

    def sizes(self, low: int, high: int) -> Places:
        """Return how long they are, in bytes."""
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
        """Return the samples that have bytes in ``[begin, end)`` of the view."""
        if self._ends is None:
            assert self._bytes is not None
            return begin // self._bytes, -(-end // self._bytes)
        low, high = np.searchsorted(self._ends, [begin, end - 1], side="right")
        return int(low), int(high) + 1

    def index(self, dtype: "np.dtype[Any]") -> IndexContent:
        """Return the ``.idx`` of the view: each sample is a sequence and a document."""
        item = dtype.itemsize
        return index_content(dtype, self.count, lambda a, b: self.sizes(a, b) // item, self.begins)

    def close(self) -> None:
        pass


class ReplicaFolder:
    """The files of one replica: ``pass-0.bin`` and ``pass-0.idx``, or ``pass-0.jsonl``, and so on.

    Passes have no end; a listing shows the first one, and the one that the job is at.

    Args:
        at: Returns the pass that the job is at.
    """

    mtime = 0.0
    KEPT = 8

    def __init__(self, samples: Samples, share: Share, at: Callable[[], int]) -> None:
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
