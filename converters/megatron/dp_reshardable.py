"""The rescue of ``dp_reshardable``: buckets without names, given back to their parameters.

Megatron's default form of the distributed optimizer's state stores, for each (PP, TP) position, the
flat buckets of its buffers. Nothing says which parameter lies where; Megatron itself can load it
only into the same buffers again. But the buffers follow from the model: parameters in reverse
order, each at a multiple of 64 elements, a new bucket where the stored size of one is used up
(``bucket_fit``). The order is that of the modules (``rank_parameters``); how many layers a stage
has is found by what fits. And it is checked by content: the masters that are found must round to
the weights beside them, else the checkpoint is refused. Parameters that are not trained have no
place in the buckets: where all do not fit, those are looked for whose content lies there.

Source: ``sharded_param_state_dp_reshardable`` in megatron/core/optimizer/distrib_optimizer.py
(0.16.1).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import MAIN, PARAM, Piece
from scalai.converters.megatron.bucket_fit import Found, SeveralFitsError, lay, lay_trained
from scalai.converters.megatron.buckets import BucketContent, Buffers, Files
from scalai.converters.megatron.modules import Naming, stage_layers
from scalai.converters.megatron.rank_parameters import ChunkBegin, Model, Parameter, Rule
from scalai.converters.megatron.torch_dist_metadata import StoredKey
from scalai.converters.megatron.values import argument_degrees
from scalai.core.errors import RefusedError

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
class Rescued:
    """Pieces of masters and moments; and second copies of what else is there."""

    pieces: list[Piece]
    duplicates: list[Piece]


class _MisfitError(Exception):
    """What does not fit, in words."""


def read_buckets(
    directory: Path,
    buckets: Sequence[StoredKey],
    model: Sequence[StoredKey],
    chunk_begin: ChunkBegin,
    arguments: Mapping[str, Any],
) -> Rescued:
    """Find out which parameters lie in which buckets.

    Args:
        directory: The checkpoint's, for reading weights and for errors.
        buckets: All keys for which ``is_bucket`` holds.
        model: The model's keys, in the order of ``.metadata``.
        chunk_begin: Tells where a chunk's elements lie in its file, their strides and size.
        arguments: Megatron's, as far as they are known: they say what is tried first.

    Raises:
        RefusedError: They fit no split of the model's layers over stages, or the content differs.
    """
    buffers, files = Buffers.of(buckets), Files(directory)
    misfits: list[str] = []
    unknown: RefusedError | None = None
    for is_partial in (False, True):
        for rule in _rules(arguments):
            try:
                ordered = Model.of(model, rule, chunk_begin)
            except RefusedError as error:  # modules whose order is not known
                unknown = error
                continue
            try:
                return _Rescue(buffers, ordered, files, arguments, is_partial=is_partial).run()
            except _MisfitError as error:
                misfits.append(str(error))
    # The first one is of what a job most likely is; one that names a parameter says most.
    what = next((text for text in misfits if "masters of" in text), misfits[0])
    way = _OTHER_FORM + (_SEVERAL_BUCKETS if buffers.are_several else "")
    if unknown is not None:
        what = f"{what}; {str(unknown).partition(', so ')[0]}"
        way = _UNKNOWN_ORDER
    raise RefusedError(
        f"{directory}: the dp_reshardable optimizer state cannot be given back to its parameters: "
        f"{what}. {way}."
    )


def _rules(arguments: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the orders in which parameters may stand, the likeliest first."""
    is_local = arguments.get("transformer_impl", "local") == "local"
    is_grouped = bool(arguments.get("moe_grouped_gemm"))
    for is_stored in (False, True):
        for local in (is_local, not is_local) if not is_stored else (is_local,):
            for grouped in (is_grouped, not is_grouped):
                yield Rule(Naming(local, grouped), is_stored)


class _Rescue:
    """One try: by one order, with all parameters trained or with some."""

    def __init__(
        self,
        buffers: Buffers,
        model: Model,
        files: Files,
        arguments: Mapping[str, Any],
        *,
        is_partial: bool,
    ) -> None:
        self._buffers, self._model, self._files = buffers, model, files
        self._arguments, self._degrees = arguments, argument_degrees(arguments)
        self._is_partial = is_partial
        self._rescued = Rescued([], [])
        self._unequal: str | None = None
        """A parameter that would fit, but whose masters do not round to its weights."""

    def run(self) -> Rescued:
        """Raises ``_MisfitError``."""
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
        """Return how many groups of data-parallel ranks there are, (PP, TP) positions."""
        found = self._buffers.groups(chain)
        if self._is_partial:  # a stage that is not trained at all has no buckets
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
        """Return how many layers a virtual stage may have, the likeliest first."""
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
        """Give the buckets of expert parameters to their parameters."""
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
        self, chain: int, group: int, chunk: int, parameters: Sequence[Parameter]
    ) -> Mapping[str, list[Found]] | None:
        """Lay the parameters into the buckets of a chunk; None where they do not fit exactly."""
        placed: dict[str, list[Found]] = {}
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
        self, sizes: Sequence[int], parameters: Sequence[Parameter], content: BucketContent
    ) -> list[Found] | None:
        found = lay(sizes, parameters)
        unequal = (entry.parameter.name for entry in found or () if not content.is_equal(entry))
        name = next(unequal, None)
        if name is not None:
            self._unequal = name
            return None
        return found

    def _trained(
        self, sizes: Sequence[int], parameters: Sequence[Parameter], content: BucketContent
    ) -> list[Found] | None:
        try:
            return lay_trained(sizes, parameters, content)
        except SeveralFitsError as error:
            raise _MisfitError(
                "not all parameters are trained, and by content it may be these or others"
            ) from error

    def _give(self, chain: int, group: int, chunk: int, placed: Mapping[str, list[Found]]) -> None:
        """Add the pieces of all parameters that were found in a chunk's buckets."""
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
