"""Samples as ranges of bytes of a source: records of tokens, or lines of JSON."""

import errno
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scalai.core.dataset.order import Places
from scalai.vfs.sources import Source
from scalai.vfs.token_index import TokenIndex

SCAN_BYTES = 8 << 20
MAX_LINES = 1 << 28
"""Lines of a source whose places are kept in memory: 2 GiB of them."""


class Records(Protocol):
    """The samples of a source, one behind the other."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def record_bytes(self) -> int | None:
        """Bytes of each, None where they differ."""

    def begins(self, samples: Places) -> Places:
        """Return where these samples begin in the source, in bytes, [samples]."""

    def sizes(self, samples: Places) -> Places:
        """Return how long they are, in bytes, [samples]."""


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
    """Records that begin at ``begin`` [count] and are ``size`` [count] bytes long."""

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


def sequences(index: TokenIndex, bin_bytes: int) -> Records:
    """Return the sequences of Megatron's ``.bin`` of so many bytes as samples.

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


def json_lines(source: Source) -> Records:
    """Return the lines of a source; reads all of it once. Empty lines are no samples.

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


def read_records(source: Source, records: Records, samples: Places) -> bytes:
    """Return these samples' bytes, one behind the other. Samples that follow each other in the
    source are read at once.

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
