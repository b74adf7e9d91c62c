"""Lays out DeepSpeed's optim_states files: a rank's parts of the flat buffers of ZeRO 1 to 3.

The entries depend on the engine's optimizer: stages 1 and 2's, stage 3's, or ``BF16_Optimizer``,
with shards as in stage 1 and with the padding of the masters. Under ``elastic_checkpoint`` stages 1
and 2 write states without padding or groups. Their step comes from the parameter groups,
FusedAdam's place for it; with another optimizer DeepSpeed writes files it cannot load.

Source: the ``state_dict`` of deepspeed/runtime/zero/stage_1_and_2.py (also
``_restore_elastic_base_optimizer_state``), zero/stage3.py and bf16_optimizer.py, ``ZeroStageEnum``
of zero/config.py and ``fragment_address`` of utils/tensor_fragment.py, 0.19.8.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalai.converters.deepspeed.drafts import Draft, Filled, pieces_of
from scalai.converters.deepspeed.experts import expert_of
from scalai.converters.deepspeed.flat import (
    Flat,
    Shape,
    Span,
    gaps_of,
    round_robin,
    split_each,
    split_whole,
    sub_groups,
)
from scalai.converters.deepspeed.job import (
    aligns_parameters,
    round_robins,
    sub_group_elements,
    uses_bf16_optimizer,
)
from scalai.converters.deepspeed.loss_scale import static_scale
from scalai.converters.pickles import Foreign, foreign, made
from scalai.converters.source_files import read_steps
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Buffer:
    """A flat buffer of the target.

    Attributes:
        shapes: Shapes of its parameters, in order.
        gaps: Elements between each parameter and the next; empty in stage 3.
        ep: Expert-parallel ranks of an expert buffer: each ``ep``-th data-parallel rank has a part.
    """

    shapes: Mapping[str, Shape]
    flat: Flat
    group: int
    gaps: Sequence[int] = ()
    ep: int = 1

    @property
    def parts(self) -> int:
        """Number of its parts."""
        return len(self.flat.spans)

    def padding(self, rank: int) -> int:
        """Return the elements without a parameter in a data-parallel rank's part."""
        return self.flat.padding[rank // self.ep]

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of a data-parallel rank's part."""
        return self.flat.spans[rank // self.ep]


def buffers_of(draft: Draft) -> Iterator[Buffer]:
    """Yield the target's flat buffers: one per parameter group, or in stage 3 per part of one."""
    for number, names in enumerate(draft.job.groups):
        shapes = {name: draft.parameter(name).shape for name in names}
        if draft.stage == 3:
            for some in sub_groups(shapes, draft.dp, sub_group_elements(draft.config)):
                part = {name: shapes[name] for name in some}
                yield Buffer(part, split_each(part, draft.dp), number)
            continue
        ep = draft.ep if expert_of(names[0]) else 1
        dp = draft.dp // ep
        is_bf16_optimizer = uses_bf16_optimizer(draft.config, draft.stage)
        if round_robins(draft.config) and not is_bf16_optimizer:
            shapes = {name: shapes[name] for name in round_robin(names, dp)}
        # DeepSpeed takes the size of an element from the first parameter.
        item = ITEM_BYTES[draft.parameter(next(iter(shapes))).dtype]
        is_aligned = aligns_parameters(draft.config) and not is_bf16_optimizer
        gaps = gaps_of(shapes, item, is_aligned=is_aligned)
        yield Buffer(shapes, split_whole(shapes, dp, gaps), number, gaps, ep)


def members(draft: Draft, buffers: Sequence[Buffer]) -> list[list[int]]:
    """Return the numbers of each parameter group's buffers."""
    found: list[list[int]] = [[] for _ in draft.job.groups]
    for number, buffer in enumerate(buffers):
        found[buffer.group].append(number)
    return found


def part(
    draft: Draft, kind: str | None, buffer: Buffer, rank: int, elements: int, filled: Filled
) -> NewTensor:
    """Return a rank's part of a buffer, and note its content in ``filled``.

    Args:
        kind: Kind of the parameters' tensors; None: their masters.
        buffer, rank: The buffer, and the data-parallel rank.
        elements: Elements to keep.
        filled: Gets the pieces.

    Raises:
        RefusedError: The tensors have several dtypes.
    """
    tensors = {name: draft.stored(kind, name) for name in buffer.shapes}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise RefusedError(
            f"{kind or 'masters'} of one parameter group have several dtypes "
            f"({', '.join(sorted(dtypes))}); ZeRO keeps them in one buffer."
        )
    new = NewTensor(dtypes.pop(), (elements,))
    filled[new] = [
        piece for span in buffer.spans(rank) for piece in pieces_of(tensors[span.name], span)
    ]
    return new


def inner_state(
    draft: Draft, rank: int, buffers: Sequence[Buffer], filled: Filled
) -> dict[str, Any]:
    """Return a rank's ``state_dict`` of the optimizer within ZeRO's."""
    states = {}
    for number, buffer in enumerate(buffers):
        names, elements = list(buffer.shapes), buffer.flat.rank_elements
        states[number] = {
            **draft.step(names[0], filled),
            **{
                kind: part(draft, kind, buffer, rank, elements, filled)
                for kind in draft.kinds(names)
            },
        }
    return {
        "state": {number: entry for number, entry in states.items() if entry},
        "param_groups": draft.param_groups(members(draft, buffers)),
    }


def add_optimizer(draft: Draft, rank: int, buffers: Sequence[Buffer]) -> None:
    """Lay out the optim_states file of a data-parallel rank."""
    filled = Filled()
    if draft.stage == 3:
        state = _stage_3(draft, rank, buffers, filled)
    elif uses_bf16_optimizer(draft.config, draft.stage):
        state = _bf16_optimizer(draft, rank, buffers, filled)
    else:
        state = _stage_1_and_2(draft, rank, buffers, filled)
    prefix = "bf16_" if draft.job.is_bf16 else ""
    name = f"{draft.folder}/{prefix}zero_pp_rank_{rank}_mp_rank_{draft.rank:02d}_optim_states.pt"
    value = {
        "optimizer_state_dict": state,
        "ds_config": draft.config,
        "ds_version": draft.job.model.get("ds_version"),
    }
    draft.archives.add(name, value, filled)


def global_state(draft: Draft) -> dict[str, Any]:
    """Return the optimizer entries common to all ranks."""
    return {
        **static_scale(),
        **draft.job.optimizer,
        **draft.clip_grad,
        "zero_stage": _zero_stage(draft.stage),
        "ds_version": draft.job.model.get("ds_version"),
    }


def _stage_3(draft: Draft, rank: int, buffers: Sequence[Buffer], filled: Filled) -> dict[str, Any]:
    state = global_state(draft)
    del state["ds_version"]
    state.pop("clip_grad", None)
    return {
        **state,
        "partition_count": draft.dp,
        "optimizer_state_dict": inner_state(draft, rank, buffers, filled),
        "fp32_flat_groups": [_masters(draft, buffer, rank, 0, filled) for buffer in buffers],
    }


def _stage_1_and_2(
    draft: Draft, rank: int, buffers: Sequence[Buffer], filled: Filled
) -> dict[str, Any]:
    padding = [buffer.padding(rank) for buffer in buffers]
    base: Mapping[str, Any] = (
        {"base_optimizer_state": inner_state(draft, rank, buffers, filled)}
        if draft.knows_param_groups
        else _elastic_state(draft, rank, buffers, filled)
    )
    return {
        **global_state(draft),
        **base,
        "single_partition_of_fp32_groups": [
            _masters(draft, buffer, rank, elements, filled)
            for buffer, elements in zip(buffers, padding, strict=True)
        ],
        "group_paddings": padding,
        "partition_count": [buffer.parts for buffer in buffers],
        "param_alignment_paddings": [list(buffer.gaps) for buffer in buffers],
        "param_slice_mappings": _fragments(draft, buffers, rank),
    }


def _bf16_optimizer(
    draft: Draft, rank: int, buffers: Sequence[Buffer], filled: Filled
) -> dict[str, Any]:
    return {
        **draft.clip_grad,
        "base_optimizer_state": inner_state(draft, rank, buffers, filled),
        "single_partition_of_fp32_groups": [
            _masters(draft, buffer, rank, 0, filled) for buffer in buffers
        ],
        "group_paddings": [
            sum(buffer.flat.padding) if rank // buffer.ep == buffer.parts - 1 else 0
            for buffer in buffers
        ],
        "partition_count": [buffer.parts for buffer in buffers],
        "ds_version": draft.job.model.get("ds_version"),
        "param_slice_mappings": _fragments(draft, buffers, rank),
    }


def _masters(draft: Draft, buffer: Buffer, rank: int, padding: int, filled: Filled) -> NewTensor:
    return part(draft, None, buffer, rank, buffer.flat.rank_elements - padding, filled)


def _fragments(draft: Draft, buffers: Sequence[Buffer], rank: int) -> list[OrderedDict[str, Any]]:
    return [
        OrderedDict((draft.local(span.name), _fragment(span)) for span in buffer.spans(rank))
        for buffer in buffers
    ]


def _elastic_state(
    draft: Draft, rank: int, buffers: Sequence[Buffer], filled: Filled
) -> Mapping[str, Any]:
    """Return a rank's base optimizer entries, for a job that keeps its own groups."""
    states = []
    for buffer in buffers:
        names = list(buffer.shapes)
        elements = buffer.flat.rank_elements - buffer.padding(rank)
        kinds = draft.kinds(names)
        moments = {kind: part(draft, kind, buffer, rank, elements, filled) for kind in kinds}
        states.append({**draft.step(names[0], filled), **moments})
    step = int(read_steps(draft.source) or 0)
    return {"base_optimizer_state": states, "base_optimizer_state_step": step}


def _zero_stage(stage: int) -> Foreign:
    return foreign("deepspeed.runtime.zero.config", "ZeroStageEnum")(stage)


def _fragment(span: Span) -> Foreign:
    address = foreign("deepspeed.utils.tensor_fragment", "fragment_address")
    return made(address, {"numel": span.high - span.low, "start": span.at})
