"""The flat buffers of a target with ZeRO: the parameters and content of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalai.converters.deepspeed.job import (
    aligns_parameters,
    round_robins,
    sub_group_elements,
    uses_bf16_optimizer,
)
from scalai.converters.deepspeed.shards.expert_names import expert_of
from scalai.converters.deepspeed.shards.flat import (
    Flat,
    Shape,
    Span,
    gaps_of,
    round_robin,
    split_each,
    split_whole,
    sub_groups,
)
from scalai.converters.deepspeed.writing.archives import Filled, pieces_of
from scalai.converters.deepspeed.writing.draft import Draft
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
