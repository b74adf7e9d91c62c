"""The rescue of ``dp_reshardable``: buckets without names, given back to their parameters.

Megatron's default form of the distributed optimizer's state stores, for each (PP, TP) position, the
flat buckets of its buffers, without the parameters' places in them; Megatron itself loads it only
into the same buffers again. But the buffers follow from the model: parameters in reverse order,
each at a multiple of 64 elements, a new bucket at the stored end of the one before. The order is
that of the modules (``rank_parameters``); the number of layers of a stage is found by fitting. The
content is the check: the masters found must round to the weights beside them, else the checkpoint
is refused. Parameters without training have no place in the buckets: where not all fit, parameters
are looked up by content.

Source: ``sharded_param_state_dp_reshardable`` and ``_compute_per_buffer_param_layout`` of
megatron/core/optimizer/distrib_optimizer.py (0.16.1; main, August 2026) and ``_ParamAndGradBuffer``
of megatron/core/distributed/param_and_grad_buffer.py (0.16.1). A bucket that ends before a tied
embedding has the size up to the embedding's multiple.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from scalai.converters.checkpoint import MAIN, PARAM, FilePiece
from scalai.converters.dcp_metadata import Chunk, StoredKey
from scalai.converters.megatron.beside_tensors import argument_degrees
from scalai.converters.megatron.grad_buffers import aligned
from scalai.converters.megatron.modules import Naming, stage_layers
from scalai.converters.megatron.rank_parameters import (
    ChunkBegin,
    OrderedModel,
    OrderRule,
    RankParameter,
    ShardBox,
)
from scalai.converters.source_files import round_bytes, rounds_to
from scalai.core.errors import RefusedError
from scalai.core.tensors import region
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import FROM_TORCH, HALF, ITEM_BYTES
from scalai.store.files import map_file

HEAD = 16
"""Elements for looking parameters up, before they are compared."""


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """A parameter's begin: bucket and element."""

    parameter: RankParameter
    bucket: int
    start: int


class SeveralFitsError(Exception):
    """The content allows more than one choice of trained parameters."""


def lay(sizes: Sequence[int], parameters: Sequence[RankParameter]) -> list[BucketPlace] | None:
    """Lay parameters into buckets; None if they do not fill them exactly.

    Args:
        sizes: Elements of each bucket, without the padding at its end.
        parameters: Parameters in the order of the buckets.
    """
    found: list[BucketPlace] = []
    bucket = end = 0
    for parameter in parameters:
        bucket, end = _after(sizes, bucket, end)
        start = aligned(end)
        end = start + parameter.numel
        if bucket >= len(sizes) or end > sizes[bucket]:
            return None
        found.append(BucketPlace(parameter, bucket, start))
    return found if _after(sizes, bucket, end) == (len(sizes), 0) else None


class ParameterFinder(Protocol):
    """Tells a parameter's place: its weights, and the buckets' masters."""

    def weights(self, parameter: RankParameter) -> bytes:
        """Bits of a parameter's first elements: ``HEAD`` of them, or all of fewer."""
        ...

    def masters(self, bucket: int, start: int, count: int) -> bytes | None:
        """Bits to which ``count`` elements round; None: outside of the bucket."""
        ...

    def is_equal(self, found: BucketPlace) -> bool: ...


def lay_trained(
    sizes: Sequence[int], parameters: Sequence[RankParameter], content: ParameterFinder
) -> list[BucketPlace] | None:
    """Lay the parameters found by content into buckets, in order.

    Raises:
        SeveralFitsError: More than one choice fills the buckets.
    """
    heads: dict[int, dict[bytes, list[int]]] = {}
    for at, parameter in enumerate(parameters):
        count = min(parameter.numel, HEAD)
        heads.setdefault(count, {}).setdefault(content.weights(parameter), []).append(at)
    # Ways to reach a state (how many parameters are behind it, bucket, element), and the last step.
    reached: list[dict[tuple[int, int], _Way]] = [{} for _ in range(len(parameters) + 1)]
    reached[0][_after(sizes, 0, 0)] = _Way(1, None, None)
    ends: list[_Way] = []
    for at, states in enumerate(reached):
        for (bucket, end), way in states.items():
            if bucket == len(sizes):
                ends.append(way)
                continue
            start = aligned(end)
            for count, by_head in heads.items():
                head = content.masters(bucket, start, count)
                for next_ in by_head.get(head, ()) if head is not None else ():
                    found = BucketPlace(parameters[next_], bucket, start)
                    stop = start + found.parameter.numel
                    if next_ < at or stop > sizes[bucket] or not content.is_equal(found):
                        continue
                    here = _after(sizes, bucket, stop)
                    known = reached[next_ + 1].get(here)
                    total = way.count + (known.count if known else 0)
                    reached[next_ + 1][here] = _Way(min(2, total), way, found)
    if sum(way.count for way in ends) > 1:
        raise SeveralFitsError
    return [*reversed(list(_steps(ends[0])))] if ends else None


@dataclass(frozen=True, slots=True)
class _Way:
    """Number of ways to here, 2 at most, and the last step of one."""

    count: int
    before: "_Way | None"
    found: BucketPlace | None


def _steps(way: _Way) -> Iterator[BucketPlace]:
    at: _Way | None = way
    while at is not None and at.found is not None:
        yield at.found
        at = at.before


def _after(sizes: Sequence[int], bucket: int, end: int) -> tuple[int, int]:
    """Return the next parameter's earliest begin: in the next bucket if this one is full."""
    if bucket < len(sizes) and end and sizes[bucket] in (end, aligned(end)):
        return bucket + 1, 0
    return bucket, end


CHECKED = 256
"""Elements at each end of a parameter, compared with the weights."""

_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), [\w.]+\)\.bucket_idx_(\d+)\.(\w+)"
)
_DTYPES = ("F32", *HALF)
"""Dtypes of parameters with buckets."""

Kinds = Mapping[str, StoredKey]
"""The tensors of one bucket by kind: param, exp_avg, exp_avg_sq."""


def is_bucket(key: str) -> bool:
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
        return sorted({chain for chain, _, _ in self.by_place})

    @property
    def are_several(self) -> bool:
        """A buffer has more than one bucket."""
        return any(len(of) > 1 for by_dtype in self.by_place.values() for of in by_dtype.values())

    def groups(self, chain: int) -> set[int]:
        return {group for of, group, _ in self.by_place if of == chain}

    def chunks(self, chain: int) -> int:
        """Return the number of model chunks of a rank. Parameters of another dtype have a buffer of
        their own in every chunk."""
        numbers = {buffer for of, _, buffer in self.by_place if of == chain}
        dtypes = {d for place, by in self.by_place.items() if place[0] == chain for d in by}
        return len(numbers) // max(len(dtypes), 1)

    def of_chunk(self, chain: int, group: int, chunk: int) -> Mapping[str, list[Kinds]]:
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
        """Return the chunks of a bucket with elements from ``begin`` to before ``end``."""
        if stored.key not in self._chunks:
            filled = (chunk for chunk in stored.chunks if chunk.box.numel)
            ordered = sorted(filled, key=lambda chunk: chunk.box.offset)
            self._chunks[stored.key] = [chunk.box.offset[0] for chunk in ordered], ordered
        offsets, ordered = self._chunks[stored.key]
        return ordered[max(bisect_right(offsets, begin) - 1, 0) : bisect_left(offsets, end)]

    def read(self, file: str, begin: int, size: int) -> bytes:
        if file not in self._maps:
            self._maps[file] = map_file(self.directory / file)
        return bytes(self._maps[file][begin : begin + size])


@dataclass(frozen=True, eq=False)
class BucketContent:
    """The buckets of one dtype of a chunk, and the parameters' weights."""

    files: Files
    buckets: Sequence[Kinds]
    dtype: str
    chunk_begin: ChunkBegin

    def weights(self, parameter: RankParameter) -> bytes:
        width, found = ITEM_BYTES[self.dtype], b""
        for part in parameter.parts:
            count = min(part.piece.box.numel, HEAD - len(found) // width)
            found += self.files.read(part.file, part.begin, count * width)
        return found

    def masters(self, bucket: int, start: int, count: int) -> bytes | None:
        stored, found = self.buckets[bucket]["param"], b""
        if start + count > stored.shape[0]:
            return None
        while count:
            masters, here = self._masters(stored, start, count)
            found += round_bytes(masters, stored.dtype, self.dtype)
            start, count = start + here, count - here
        return found

    def is_equal(self, found: BucketPlace) -> bool:
        """Whether the masters at both ends of a parameter round to its weights."""
        stored = self.buckets[found.bucket]["param"]
        for part in found.parameter.parts:
            count = min(CHECKED, part.piece.box.numel)
            for first in sorted({0, part.piece.box.numel - count}):
                if not self._is_equal_at(stored, found, part, first, count):
                    return False
        return True

    def _is_equal_at(
        self, stored: StoredKey, found: BucketPlace, part: ShardBox, first: int, count: int
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

    def pieces(self, kind: str, stored: StoredKey, found: BucketPlace) -> Iterator[FilePiece]:
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
                    yield FilePiece(
                        tensor, cut.box, chunk.extent.file, begin + cut.start * item, cut.stride
                    )


_UNKNOWN_ORDER = (
    "Save it in Megatron with --no-ckpt-fully-parallel-save: then the keys of .metadata stand in "
    "the order of the modules, which is read"
)
_OTHER_FORM = (
    "Load the checkpoint in Megatron at its own TP and PP and save it with "
    "--dist-ckpt-optim-fully-reshardable"
)
_SEVERAL_BUCKETS = (
    ", by a release after 0.19: 0.15.3 to 0.19 write wrong masters in that form where there are "
    "several buckets (--overlap-grad-reduce), as here, which are then refused too"
)


@dataclass(frozen=True, slots=True)
class RescuedState:
    """Pieces of masters and moments; and second copies of the rest."""

    pieces: list[FilePiece]
    duplicates: list[FilePiece]


class _MisfitError(Exception):
    """A try without a fit, in words."""


def read_buckets(
    directory: Path,
    buckets: Sequence[StoredKey],
    model: Sequence[StoredKey],
    chunk_begin: ChunkBegin,
    arguments: Mapping[str, Any],
) -> RescuedState:
    """Find the parameters in the buckets.

    Args:
        directory: The checkpoint's, for reading weights and for errors.
        buckets: All keys of buckets (``is_bucket``).
        model: The model's keys, in the order of ``.metadata``.
        chunk_begin: Place of a chunk's elements in its file, their strides and size.
        arguments: Megatron's arguments, as far as known; they decide the first tries.

    Raises:
        RefusedError: They fit no split of the model's layers over stages, or the content differs.
    """
    buffers, files = Buffers.of(buckets), Files(directory)
    misfits: list[str] = []
    unknown: RefusedError | None = None
    for is_partial in (False, True):
        for rule in _rules(arguments):
            try:
                ordered = OrderedModel.of(model, rule, chunk_begin)
            except RefusedError as error:  # modules of unknown order
                unknown = error
                continue
            try:
                return _Rescue(buffers, ordered, files, arguments, is_partial=is_partial).run()
            except _MisfitError as error:
                misfits.append(str(error))
    # The first try is the likeliest; a text with a parameter's name says most.
    what = next((text for text in misfits if "masters of" in text), misfits[0])
    way = _OTHER_FORM + (_SEVERAL_BUCKETS if buffers.are_several else "")
    if unknown is not None:
        what = f"{what}; {str(unknown).partition(', so ')[0]}"
        way = _UNKNOWN_ORDER
    raise RefusedError(
        f"{directory}: the dp_reshardable optimizer state cannot be given back to its parameters: "
        f"{what}. {way}."
    )


def _rules(arguments: Mapping[str, Any]) -> Iterator[OrderRule]:
    """Yield the possible orders of parameters, the likeliest first."""
    is_local = arguments.get("transformer_impl", "local") == "local"
    is_grouped = bool(arguments.get("moe_grouped_gemm"))
    for is_stored in (False, True):
        for local in (is_local, not is_local) if not is_stored else (is_local,):
            for grouped in (is_grouped, not is_grouped):
                yield OrderRule(Naming(local, grouped), is_stored)


class _Rescue:
    """One try: by one order, with all parameters trained or with some."""

    def __init__(
        self,
        buffers: Buffers,
        model: OrderedModel,
        files: Files,
        arguments: Mapping[str, Any],
        *,
        is_partial: bool,
    ) -> None:
        self._buffers, self._model, self._files = buffers, model, files
        self._arguments, self._degrees = arguments, argument_degrees(arguments)
        self._is_partial = is_partial
        self._rescued = RescuedState([], [])
        self._unequal: str | None = None
        """A parameter of fitting size, but with masters that do not round to its weights."""

    def run(self) -> RescuedState:
        chains = self._buffers.chains
        experts = chains[-1] if len(chains) > 1 and self._model.has_experts else None
        dense = [chain for chain in chains if chain != experts]
        if len(dense) != 1:
            raise _MisfitError(f"{len(dense)} chained optimizers of dense parameters")
        tp = self._model.tp
        groups = self._groups(dense[0])
        if groups % tp:
            raise _MisfitError(f"{groups} groups of data-parallel ranks at tp={tp}")
        pp, chunks = groups // tp, self._buffers.chunks(dense[0])
        stages = self._stages(dense[0], pp, tp, chunks, with_experts=experts is None)
        if experts is not None:
            self._experts(experts, pp, chunks, stages)
        return self._rescued

    def _groups(self, chain: int) -> int:
        """Return the number of groups of data-parallel ranks, (PP, TP) positions."""
        found = self._buffers.groups(chain)
        if self._is_partial:  # a wholly untrained stage has no buckets
            stated = self._degrees.get("tp", 1) * self._degrees.get("pp", 1)
            return max(stated, max(found) + 1)
        if max(found) >= len(found):
            raise _MisfitError(
                f"there are buckets of group {max(found)}, and of {len(found)} in all"
            )
        return len(found)

    def _stages(
        self, chain: int, pp: int, tp: int, chunks: int, *, with_experts: bool
    ) -> list[range]:
        """Find the layers of every virtual stage, and give its buckets to their parameters."""
        layer, last = 0, pp * chunks - 1
        found: list[range] = []
        for stage in range(last + 1):
            chunk, pp_rank = divmod(stage, pp)
            for count in self._tried(stage, layer, pp, chunks):
                layers = range(layer, layer + count)
                places = []
                for rank in range(tp):
                    parameters = self._model.stage(
                        layers, rank,
                        is_first=stage == 0, is_last=stage == last, with_experts=with_experts,
                    )  # fmt: skip
                    place = self._fit(chain, pp_rank * tp + rank, chunk, parameters)
                    if place is None:
                        break
                    places.append(place)
                else:
                    break
            else:
                raise _MisfitError(
                    f"the buckets of pipeline stage {pp_rank}, chunk {chunk}, fit no "
                    f"number of layers from layer {layer} on{self._stale_text()}"
                )
            for rank, place in enumerate(places):
                self._give(chain, pp_rank * tp + rank, chunk, place)
            found.append(layers)
            layer += count
        if layer != self._model.layers:
            raise _MisfitError(f"{layer} of {self._model.layers} layers were found")
        return found

    def _tried(self, stage: int, layer: int, pp: int, chunks: int) -> Sequence[int]:
        """Return the possible numbers of layers of a virtual stage, the likeliest first."""
        rest = self._model.layers - layer
        if stage == pp * chunks - 1:
            return [rest]
        if self._is_partial:
            try:
                split = stage_layers(self._model.layers, pp, chunks, self._arguments)
            except RefusedError as error:
                raise _MisfitError(str(error)) from error
            return [len(split[stage % pp][stage // pp])]
        even = self._model.layers // (pp * chunks)
        return sorted(range(rest + 1), key=lambda n: (n != even, n))

    def _experts(self, chain: int, pp: int, chunks: int, stages: Sequence[range]) -> None:
        found, etp = max(self._buffers.groups(chain)) + 1, self._model.expert_tp
        # The last stages may have no experts, and then no buckets of them.
        ep = self._degrees.get("ep", found // (pp * etp))
        if ep < 1 or found > pp * etp * ep or self._model.experts % ep:
            raise _MisfitError(f"{found} groups of expert ranks at pp={pp}, etp={etp}, ep={ep}")
        share = self._model.experts // ep
        for group in range(pp * etp * ep):
            rank, stage = group % etp, group // (etp * ep)
            first = group // etp % ep * share
            filled = 0
            for chunk in range(chunks):
                at = chunk * pp + stage
                parameters = self._model.expert_stage(
                    stages[at], rank, range(first, first + share), is_last=at == len(stages) - 1
                )
                if not parameters:
                    continue
                place = self._fit(chain, group, filled, parameters)
                if place is None:
                    raise _MisfitError(
                        f"the buckets of expert group {group} fit no order{self._stale_text()}"
                    )
                self._give(chain, group, filled, place)
                filled += 1

    def _fit(
        self, chain: int, group: int, chunk: int, parameters: Sequence[RankParameter]
    ) -> Mapping[str, list[BucketPlace]] | None:
        """Lay the parameters into the buckets of a chunk; None if they do not fit exactly."""
        placed: dict[str, list[BucketPlace]] = {}
        buckets = self._buffers.of_chunk(chain, group, chunk)
        dtypes = {parameter.dtype for parameter in parameters}
        if dtypes != set(buckets) and not (self._is_partial and dtypes >= set(buckets)):
            return None
        for dtype, of_dtype in buckets.items():
            mine = [parameter for parameter in reversed(parameters) if parameter.dtype == dtype]
            sizes = [kinds["param"].shape[0] for kinds in of_dtype]
            content = BucketContent(self._files, of_dtype, dtype, self._model.chunk_begin)
            if self._is_partial:
                found = self._trained(sizes, mine, content)
            else:
                found = self._whole(sizes, mine, content)
            if found is None:
                return None
            placed[dtype] = found
        return placed

    def _whole(
        self, sizes: Sequence[int], parameters: Sequence[RankParameter], content: BucketContent
    ) -> list[BucketPlace] | None:
        found = lay(sizes, parameters)
        unequal = (entry.parameter.name for entry in found or () if not content.is_equal(entry))
        name = next(unequal, None)
        if name is not None:
            self._unequal = name
            return None
        return found

    def _trained(
        self, sizes: Sequence[int], parameters: Sequence[RankParameter], content: BucketContent
    ) -> list[BucketPlace] | None:
        try:
            return lay_trained(sizes, parameters, content)
        except SeveralFitsError as error:
            raise _MisfitError(
                "not all parameters are trained, and by content it may be these or others"
            ) from error

    def _give(
        self, chain: int, group: int, chunk: int, placed: Mapping[str, list[BucketPlace]]
    ) -> None:
        """Add the pieces of all parameters found in a chunk's buckets."""
        buckets = self._buffers.of_chunk(chain, group, chunk)
        for dtype, found in placed.items():
            content = BucketContent(self._files, buckets[dtype], dtype, self._model.chunk_begin)
            for entry in found:
                for kind, stored in buckets[dtype][entry.bucket].items():
                    is_duplicate = kind == "param" and stored.dtype == dtype
                    named = {"param": PARAM if is_duplicate else MAIN}.get(kind, kind)
                    is_second = is_duplicate or entry.parameter.is_copy
                    into = self._rescued.duplicates if is_second else self._rescued.pieces
                    into.extend(content.pieces(named, stored, entry))

    def _stale_text(self) -> str:
        if self._unequal is None:
            return ""
        return (
            f". By size some do, but then the masters of {self._unequal} are not its weights: the "
            "parameters may have been saved before the ranks had exchanged them"
        )
