"""The buckets of ``dp_reshardable``: their keys, taken apart, and what lies in them.

Source: ``sharded_param_state_dp_reshardable`` in megatron/core/optimizer/distrib_optimizer.py
(0.16.1).
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scalai.converters.checkpoint import Piece
from scalai.converters.megatron.bucket_fit import HEAD, Found
from scalai.converters.megatron.rank_parameters import ChunkBegin, Parameter, Part
from scalai.converters.megatron.torch_dist_metadata import Chunk, StoredKey
from scalai.converters.rounding import round_bytes, rounds_to
from scalai.core.errors import RefusedError
from scalai.core.tensors import region
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import FROM_TORCH, HALF, ITEM_BYTES
from scalai.store.files import map_file

CHECKED = 256
"""Elements at each end of a parameter that are compared with the weights."""

_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), [\w.]+\)\.bucket_idx_(\d+)\.(\w+)"
)
_DTYPES = ("F32", *HALF)
"""Of parameters that have buckets."""

Kinds = Mapping[str, StoredKey]
"""The tensors of one bucket by kind: param, exp_avg, exp_avg_sq."""


def is_bucket(key: str) -> bool:
    """Tell whether a key is that of a bucket."""
    return _BUCKET.fullmatch(key) is not None


@dataclass(frozen=True, eq=False)
class Buffers:
    """Buckets of all ranks: (chain, group, buffer) -> dtype of the parameters -> in order."""

    by_place: Mapping[tuple[int, int, int], Mapping[str, list[Kinds]]]

    @classmethod
    def of(cls, buckets: Iterable[StoredKey]) -> "Buffers":
        """Take the keys apart.

        Raises:
            RefusedError: They are of parameters of another dtype than 16 bits and fp32.
        """
        found: dict[tuple[int, int, int], dict[str, dict[int, dict[str, StoredKey]]]] = {}
        for stored in buckets:
            match = _BUCKET.fullmatch(stored.key)
            assert match
            chain, group, buffer = int(match[1] or 0), int(match[2]), int(match[3])
            dtype = FROM_TORCH.get(match[4])
            if dtype not in _DTYPES:
                raise RefusedError(
                    f"{stored.key}: buckets of torch.{match[4]} parameters are not known. Load the "
                    "checkpoint in Megatron and save it with --dist-ckpt-optim-fully-reshardable."
                )
            by_dtype = found.setdefault((chain, group, buffer), {})
            by_bucket = by_dtype.setdefault(dtype, {})
            by_bucket.setdefault(int(match[5]), {})[match[6]] = stored
        return cls(
            {
                place: {
                    dtype: [by_bucket[number] for number in sorted(by_bucket)]
                    for dtype, by_bucket in by_dtype.items()
                }
                for place, by_dtype in sorted(found.items())
            }
        )

    @property
    def chains(self) -> list[int]:
        """Numbers of the chained optimizers."""
        return sorted({chain for chain, _, _ in self.by_place})

    @property
    def are_several(self) -> bool:
        """Whether a buffer has more than one bucket."""
        return any(len(of) > 1 for by_dtype in self.by_place.values() for of in by_dtype.values())

    def groups(self, chain: int) -> set[int]:
        """Return the groups of data-parallel ranks that a chained optimizer has buckets of."""
        return {group for of, group, _ in self.by_place if of == chain}

    def chunks(self, chain: int) -> int:
        """Return how many model chunks a rank has. Parameters of another dtype have a buffer of
        their own in every chunk."""
        numbers = {buffer for of, _, buffer in self.by_place if of == chain}
        dtypes = {d for place, by in self.by_place.items() if place[0] == chain for d in by}
        return len(numbers) // max(len(dtypes), 1)

    def of_chunk(self, chain: int, group: int, chunk: int) -> Mapping[str, list[Kinds]]:
        """Return the buckets of a group's model chunk by dtype."""
        found: dict[str, list[Kinds]] = {}
        seen: dict[str, int] = {}
        for place, by_dtype in self.by_place.items():
            for dtype, buckets in by_dtype.items() if place[:2] == (chain, group) else ():
                if seen.setdefault(dtype, 0) == chunk:
                    found[dtype] = buckets
                seen[dtype] += 1
        return found


@dataclass(frozen=True, eq=False)
class Files:
    """Bytes of a checkpoint's files, in small parts, and the chunks of its buckets in order."""

    directory: Path
    _maps: dict[str, memoryview] = field(default_factory=dict)
    _chunks: dict[str, tuple[list[int], list[Chunk]]] = field(default_factory=dict)

    def chunks(self, stored: StoredKey, begin: int, end: int) -> Sequence[Chunk]:
        """Return the chunks of a bucket that hold elements from one to before another."""
        if stored.key not in self._chunks:
            filled = (chunk for chunk in stored.chunks if chunk.box.numel)
            ordered = sorted(filled, key=lambda chunk: chunk.box.offset)
            self._chunks[stored.key] = [chunk.box.offset[0] for chunk in ordered], ordered
        offsets, ordered = self._chunks[stored.key]
        return ordered[max(bisect_right(offsets, begin) - 1, 0) : bisect_left(offsets, end)]

    def read(self, file: str, begin: int, size: int) -> bytes:
        """Return bytes of a file."""
        if file not in self._maps:
            self._maps[file] = map_file(self.directory / file)
        return bytes(self._maps[file][begin : begin + size])


@dataclass(frozen=True, eq=False)
class BucketContent:
    """What lies in the buckets of one dtype of a chunk, and in the parameters' weights."""

    files: Files
    buckets: Sequence[Kinds]
    dtype: str
    chunk_begin: ChunkBegin

    def weights(self, parameter: Parameter) -> bytes:
        """Return the bits of a parameter's first elements: of ``HEAD``, or of all."""
        width, found = ITEM_BYTES[self.dtype], b""
        for part in parameter.parts:
            count = min(part.piece.box.numel, HEAD - len(found) // width)
            found += self.files.read(part.file, part.begin, count * width)
        return found

    def masters(self, bucket: int, start: int, count: int) -> bytes | None:
        """Return the bits to which elements of a bucket round; None: it has not as many."""
        stored, found = self.buckets[bucket]["param"], b""
        if start + count > stored.shape[0]:
            return None
        while count:
            masters, here = self._masters(stored, start, count)
            found += round_bytes(masters, stored.dtype, self.dtype)
            start, count = start + here, count - here
        return found

    def is_equal(self, found: Found) -> bool:
        """Tell whether the masters at both ends of a parameter round to its weights."""
        stored = self.buckets[found.bucket]["param"]
        for part in found.parameter.parts:
            count = min(CHECKED, part.piece.box.numel)
            for first in sorted({0, part.piece.box.numel - count}):
                if not self._is_equal_at(stored, found, part, first, count):
                    return False
        return True

    def _is_equal_at(
        self, stored: StoredKey, found: Found, part: Part, first: int, count: int
    ) -> bool:
        """Compare ``count`` elements from the ``first`` of a part on, or those in one chunk."""
        masters, count = self._masters(stored, found.start + part.piece.start + first, count)
        width = ITEM_BYTES[self.dtype]
        weights = self.files.read(part.file, part.begin + first * width, count * width)
        return rounds_to(masters, stored.dtype, weights, self.dtype)

    def _masters(self, stored: StoredKey, at: int, count: int) -> tuple[bytes, int]:
        """Return elements of a bucket from one on, as many as lie in one chunk."""
        found = self.files.chunks(stored, at, at + 1)
        chunk = found[0] if found else None
        if chunk is None or at >= chunk.box.offset[0] + chunk.box.shape[0]:
            raise RefusedError(
                f"{self.files.directory}: nobody holds element {at} of {stored.key}. It is "
                "damaged: use another checkpoint."
            )
        into = at - chunk.box.offset[0]
        count = min(count, chunk.box.shape[0] - into)
        begin, _, item = self.chunk_begin(stored, chunk)
        return self.files.read(chunk.extent.file, begin + into * item, count * item), count

    def pieces(self, kind: str, stored: StoredKey, found: Found) -> Iterator[Piece]:
        """Yield the boxes of a parameter that lie in the chunks of one bucket."""
        parameter = found.parameter
        tensor = Tensor(f"{kind}/{parameter.name}", parameter.shape, stored.dtype)
        for chunk in self.files.chunks(stored, found.start, found.start + parameter.numel):
            low = max(chunk.box.offset[0], found.start)
            high = min(chunk.box.offset[0] + chunk.box.shape[0], found.start + parameter.numel)
            if low >= high:
                continue
            begin, _, item = self.chunk_begin(stored, chunk)
            begin += (low - chunk.box.offset[0]) * item
            for part in parameter.parts:
                for cut in region.clip(part.piece, low - found.start, high - found.start):
                    yield Piece(
                        tensor, cut.box, chunk.extent.file, begin + cut.start * item, cut.stride
                    )
