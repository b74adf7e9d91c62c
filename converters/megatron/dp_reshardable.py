"""The rescue of ``dp_reshardable``: buckets without names, given back to their parameters.

Megatron's default form of the distributed optimizer's state stores, for each (PP, TP) position, the
flat buckets of its buffers. Nothing says which parameter lies where; Megatron itself can load it
only into the same buffers again. But the buffers follow from the model: parameters in reverse
order, each at a multiple of 64 elements, a new bucket where the stored size of one is used up. The
order of a layer's parameters is that of the keys in ``.metadata``; how many layers a stage has is
found by what fits. And it is checked by content: the masters that are found must round to the
weights beside them, else the checkpoint is refused.

Source: ``_ParamAndGradBuffer`` in megatron/core/distributed/param_and_grad_buffer.py and
``sharded_param_state_dp_reshardable`` in megatron/core/optimizer/distrib_optimizer.py (0.16.1).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalai.converters.checkpoint import MAIN, PARAM, Piece
from scalai.converters.megatron.rank_parameters import ChunkBegin, Model, Parameter, Part
from scalai.converters.megatron.torch_dist_metadata import StoredKey
from scalai.converters.rounding import rounds_to
from scalai.core import region
from scalai.core.collection import ITEM_BYTES, Tensor
from scalai.core.errors import RefusedError

ALIGNMENT = 64
"""Elements at whose multiples a parameter begins."""
CHECKED = 256
"""Elements at each end of a parameter that are compared with the weights."""

_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(torch\.(\w+), [\w.]+\)\.bucket_idx_(\d+)\.(\w+)"
)
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Rescued:
    """Pieces of masters and moments; and second copies of what else is there."""

    pieces: list[Piece]
    twins: list[Piece]


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a parameter begins: in which bucket, at which element."""

    parameter: Parameter
    bucket: int
    start: int


Kinds = Mapping[str, StoredKey]
"""The tensors of one bucket by kind: param, exp_avg, exp_avg_sq."""

Buffers = Mapping[tuple[int, int, int], Mapping[str, list[Kinds]]]
"""(chain, group, buffer) -> dtype of the parameters -> buckets in order."""


def is_bucket(key: str) -> bool:
    """Tell whether a key is that of a bucket."""
    return _BUCKET.fullmatch(key) is not None


def read_buckets(
    directory: Path,
    buckets: Sequence[StoredKey],
    model: Sequence[StoredKey],
    chunk_begin: ChunkBegin,
) -> Rescued:
    """Find out which parameters lie in which buckets.

    Args:
        directory: The checkpoint's, for reading weights and for errors.
        buckets: All keys for which ``is_bucket`` holds.
        model: The parameters' keys, in the order of ``.metadata``.
        chunk_begin: Tells where a chunk's elements lie in its file, their strides and size.

    Raises:
        RefusedError: They fit no split of the model's layers over stages, or the content differs.
    """
    return _Rescue(directory, _buffers(buckets), model, chunk_begin).run()


def _buffers(buckets: Iterable[StoredKey]) -> Buffers:
    found: dict[tuple[int, int, int], dict[str, dict[int, dict[str, StoredKey]]]] = {}
    for stored in buckets:
        match = _BUCKET.fullmatch(stored.key)
        assert match
        chain, group, buffer = int(match[1] or 0), int(match[2]), int(match[3])
        if match[4] not in _DTYPES:
            raise RefusedError(
                f"{stored.key}: buckets of torch.{match[4]} parameters are not known. Load the "
                "checkpoint in Megatron and save it with --dist-ckpt-optim-fully-reshardable."
            )
        by_bucket = found.setdefault((chain, group, buffer), {}).setdefault(_DTYPES[match[4]], {})
        by_bucket.setdefault(int(match[5]), {})[match[6]] = stored
    return {
        place: {
            dtype: [by_bucket[number] for number in sorted(by_bucket)]
            for dtype, by_bucket in by_dtype.items()
        }
        for place, by_dtype in sorted(found.items())
    }


class _Rescue:
    def __init__(
        self,
        directory: Path,
        buffers: Buffers,
        model: Sequence[StoredKey],
        chunk_begin: ChunkBegin,
    ) -> None:
        self._directory, self._buffers = directory, buffers
        self._model, self._chunk_begin = Model.of(model, chunk_begin), chunk_begin
        self._rescued = Rescued([], [])
        self._unequal: str | None = None
        """A parameter that would fit, but whose masters do not round to its weights."""

    def run(self) -> Rescued:
        chains = sorted({chain for chain, _, _ in self._buffers})
        experts = chains[-1] if len(chains) > 1 and self._model.has_experts else None
        dense = [chain for chain in chains if chain != experts]
        if len(dense) != 1:
            raise self._misfit(f"{len(dense)} chained optimizers of dense parameters")
        tp = self._model.tp
        groups = self._groups(dense[0])
        if groups % tp:
            raise self._misfit(f"{groups} groups of data-parallel ranks at tp={tp}")
        pp = groups // tp
        if self._model.predicts and (pp > 1 or self._model.has_experts):
            raise self._misfit(
                "it has layers that predict further tokens (MTP) beside pipeline stages or experts"
            )
        chunks = len({buffer for chain, _, buffer in self._buffers if chain == dense[0]})
        # Parameters of another dtype have a buffer of their own in every chunk.
        chunks //= max(len(self._dtypes(dense[0])), 1)
        stages = self._stages(dense[0], pp, tp, chunks, with_experts=experts is None)
        if experts is not None:
            self._experts(experts, pp, chunks, stages)
        return self._rescued

    def _groups(self, chain: int) -> int:
        """Return how many groups of data-parallel ranks a chained optimizer has buckets of."""
        found = {group for of, group, _ in self._buffers if of == chain}
        if max(found) >= len(found):
            raise self._misfit(
                f"there are buckets of group {max(found)}, and of {len(found)} in all"
            )
        return len(found)

    def _dtypes(self, chain: int) -> set[str]:
        return {
            dtype
            for (of, _, _), by_dtype in self._buffers.items()
            if of == chain
            for dtype in by_dtype
        }

    def _stages(
        self, chain: int, pp: int, tp: int, chunks: int, *, with_experts: bool
    ) -> list[range]:
        """Find the layers of every virtual stage, and give its buckets to their parameters."""
        layer, stages = 0, pp * chunks
        found: list[range] = []
        for stage in range(stages):
            even = self._model.layers // stages
            rest = self._model.layers - layer
            is_last = stage == stages - 1
            tried = [rest] if is_last else sorted(range(rest + 1), key=lambda n: (n != even, n))
            for count in tried:
                layers = range(layer, layer + count)
                parameters = [
                    [
                        *(self._model.head(rank) if stage == 0 else ()),
                        *self._model.body(layers, rank, with_experts=with_experts),
                        *(self._model.tail(rank, is_copied=pp > 1) if is_last else ()),
                    ]
                    for rank in range(tp)
                ]
                chunk, pp_rank = divmod(stage, pp)
                places = [
                    self._fit(chain, pp_rank * tp + rank, chunk, parameters[rank])
                    for rank in range(tp)
                ]
                if all(place is not None for place in places):
                    break
            else:
                raise self._misfit(
                    f"the buckets of pipeline stage {stage % pp}, chunk {stage // pp}, fit no "
                    f"number of layers from layer {layer} on{self._stale_text()}"
                )
            for rank, place in enumerate(places):
                self._give(chain, pp_rank * tp + rank, chunk, place or {})
            found.append(layers)
            layer += count
        if layer != self._model.layers:
            raise self._misfit(f"{layer} of {self._model.layers} layers were found")
        return found

    def _experts(self, chain: int, pp: int, chunks: int, stages: Sequence[range]) -> None:
        """Give the buckets of expert parameters to their parameters."""
        groups = self._groups(chain)
        etp = self._model.expert_tp
        ep = groups // (pp * etp)
        if ep * pp * etp != groups or self._model.experts % ep:
            raise self._misfit(f"{groups} groups of expert ranks at pp={pp}, etp={etp}")
        share = self._model.experts // ep
        for group in range(groups):
            rank, stage = group % etp, group // (etp * ep)
            first = group // etp % ep * share
            for chunk in range(chunks):
                layers = stages[chunk * pp + stage]
                for is_grouped in (False, True):
                    parameters = self._model.expert_body(
                        layers, rank, range(first, first + share), is_grouped=is_grouped
                    )
                    place = self._fit(chain, group, chunk, list(parameters))
                    if place is not None:
                        break
                else:
                    raise self._misfit(f"the buckets of expert group {group} fit no order")
                self._give(chain, group, chunk, place)

    def _buckets(self, chain: int, group: int, chunk: int) -> Mapping[str, list[Kinds]]:
        """Return the buckets of a model chunk by dtype."""
        numbers = sorted(b for of, g, b in self._buffers if (of, g) == (chain, group))
        found: dict[str, list[Kinds]] = {}
        seen: dict[str, int] = {}
        for number in numbers:
            for dtype, buckets in self._buffers[chain, group, number].items():
                if seen.setdefault(dtype, 0) == chunk:
                    found[dtype] = buckets
                seen[dtype] += 1
        return found

    def _fit(
        self, chain: int, group: int, chunk: int, parameters: Sequence[Parameter]
    ) -> Mapping[str, list[_Found]] | None:
        """Lay the parameters into the buckets of a chunk; None where they do not fit exactly."""
        placed: dict[str, list[_Found]] = {}
        buckets = self._buckets(chain, group, chunk)
        if {parameter.dtype for parameter in parameters} != set(buckets):
            return None
        for dtype, of_dtype in buckets.items():
            mine = [parameter for parameter in reversed(parameters) if parameter.dtype == dtype]
            found = _lay([kinds["param"].shape[0] for kinds in of_dtype], mine)
            if found is None:
                return None
            unequal = (f.parameter.name for f in found if not self._is_equal(of_dtype, f))
            name = next(unequal, None)
            if name is not None:
                self._unequal = name
                return None
            placed[dtype] = found
        return placed

    def _is_equal(self, buckets: Sequence[Kinds], found: _Found) -> bool:
        """Tell whether the masters at both ends of a parameter round to its weights."""
        stored = buckets[found.bucket]["param"]
        for part in found.parameter.parts:
            count = min(CHECKED, part.piece.box.numel)
            for first in {0, part.piece.box.numel - count}:
                if not self._is_equal_at(stored, found, part, first, count):
                    return False
        return True

    def _is_equal_at(
        self, stored: StoredKey, found: _Found, part: Part, first: int, count: int
    ) -> bool:
        """Compare ``count`` elements from the ``first`` of a part on, or those in one chunk."""
        at = found.start + part.piece.start + first
        chunk = next(
            chunk
            for chunk in stored.chunks
            if chunk.box.offset[0] <= at < chunk.box.offset[0] + chunk.box.shape[0]
        )
        into = at - chunk.box.offset[0]
        count = min(count, chunk.box.shape[0] - into)
        begin, _, item = self._chunk_begin(stored, chunk)
        masters = self._bytes(chunk.extent.file, begin + into * item, count * item)
        width = ITEM_BYTES[found.parameter.dtype]
        weights = self._bytes(part.file, part.begin + first * width, count * width)
        return rounds_to(masters, stored.dtype, weights, found.parameter.dtype)

    def _bytes(self, file: str, begin: int, size: int) -> bytes:
        with open(self._directory / file, "rb") as opened:
            opened.seek(begin)
            return opened.read(size)

    def _give(self, chain: int, group: int, chunk: int, placed: Mapping[str, list[_Found]]) -> None:
        """Add the pieces of all parameters that were found in a chunk's buckets."""
        buckets = self._buckets(chain, group, chunk)
        for dtype, found in placed.items():
            for entry in found:
                for kind, stored in buckets[dtype][entry.bucket].items():
                    is_twin = kind == "param" and stored.dtype == dtype
                    named = {"param": PARAM if is_twin else MAIN}.get(kind, kind)
                    is_second = is_twin or entry.parameter.is_copy
                    into = self._rescued.twins if is_second else self._rescued.pieces
                    into.extend(self._pieces(named, stored, entry))

    def _pieces(self, kind: str, stored: StoredKey, found: _Found) -> Iterator[Piece]:
        """Yield the boxes of a parameter that lie in the chunks of one bucket."""
        parameter = found.parameter
        tensor = Tensor(f"{kind}/{parameter.name}", parameter.shape, stored.dtype)
        for chunk in stored.chunks:
            low = max(chunk.box.offset[0], found.start)
            high = min(chunk.box.offset[0] + chunk.box.shape[0], found.start + parameter.numel)
            if low >= high:
                continue
            begin, _, item = self._chunk_begin(stored, chunk)
            begin += (low - chunk.box.offset[0]) * item
            for part in parameter.parts:
                for cut in region.clip(part.piece, low - found.start, high - found.start):
                    yield Piece(
                        tensor, cut.box, chunk.extent.file, begin + cut.start * item, cut.stride
                    )

    def _stale_text(self) -> str:
        if self._unequal is None:
            return ""
        return (
            f". By size some do, but then the masters of {self._unequal} are not its weights: the "
            "parameters may have been saved before the ranks had exchanged them"
        )

    def _misfit(self, what: str) -> RefusedError:
        return RefusedError(
            f"{self._directory}: the dp_reshardable optimizer state cannot be given back to its "
            f"parameters: {what}. Load the checkpoint in Megatron at its own TP and PP and save it "
            "with --dist-ckpt-optim-fully-reshardable."
        )


def _lay(sizes: Sequence[int], parameters: Sequence[Parameter]) -> list[_Found] | None:
    """Lay parameters into buckets of these sizes; None where they do not fill them exactly."""
    found: list[_Found] = []
    bucket = end = 0
    for parameter in parameters:
        if bucket < len(sizes) and end == sizes[bucket]:
            bucket, end = bucket + 1, 0
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + parameter.numel
        if bucket >= len(sizes) or end > sizes[bucket]:
            return None
        found.append(_Found(parameter, bucket, start))
    return found if bucket == len(sizes) - 1 and end == sizes[-1] else None
