"""Lays out DeepSpeed's model_states files: weights, buffers, and what an engine asks beside them.

Source: ``_common_checkpoint_state`` of deepspeed/runtime/engine.py, 0.19.8.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from scalai.converters.checkpoint import Piece
from scalai.converters.deepspeed_archives import Filled, pieces_of
from scalai.converters.deepspeed_buffers import Buffer
from scalai.converters.deepspeed_draft import Draft
from scalai.converters.deepspeed_flat import Span, part_of
from scalai.converters.torch_archive import NewTensor
from scalai.core.region import whole


def add_model(
    draft: Draft,
    rank: int,
    buffers: Sequence[Buffer],
    optimizer: Mapping[str, Any] | None = None,
    filled: Filled | None = None,
) -> None:
    """Lay out a model_states file: of all ranks, or of one in stage 3.

    Args:
        draft: The target.
        rank: The data-parallel rank.
        buffers: The flat buffers; none in stage 0.
        optimizer, filled: What stage 0 keeps of the optimizer, and what its tensors are filled
            with.
    """
    filled = Filled() if filled is None else filled
    job, module = draft.job, _module(draft, filled)
    shared = dict(job.aliases) if rank == 0 else {}  # as DeepSpeed does
    entries: dict[str, Any] = {
        **job.model,
        "module": module,
        "buffer_names": list(job.buffers),
        "optimizer": optimizer,
        "shared_params": shared if draft.stage else None,
        "param_shapes": [draft.sizes(buffer.shapes) for buffer in buffers] or None,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "dp_world_size": draft.dp,
        "ds_config": draft.config,
    }
    if draft.stage > 1:
        entries["frozen_param_shapes"] = draft.sizes(job.frozen)
        entries["frozen_param_fragments"] = OrderedDict(
            (name, _frozen(draft, name, rank, module, filled)) for name in job.frozen
        )
    prefix = f"zero_pp_rank_{rank}_" if draft.stage == 3 else ""
    draft.archives.add(f"{draft.folder}/{prefix}mp_rank_00_model_states.pt", entries, filled)


def _module(draft: Draft, filled: Filled) -> OrderedDict[str, Any]:
    """Return the module's state_dict, shared parameters as one tensor."""
    job = draft.job
    module: OrderedDict[str, Any] = OrderedDict()
    new: dict[str, NewTensor] = {}
    for name in job.module:
        owner = job.aliases.get(name, name)
        if name in job.module_values:
            module[name] = job.module_values[name]
        elif draft.stage == 3 and name not in job.buffers:
            module[name] = NewTensor(job.dtypes[name], (0,), b"")
        else:
            tensor = draft.parameter(owner)
            if owner not in new:
                new[owner] = NewTensor(tensor.dtype, tensor.shape)
                filled[new[owner]] = [Piece(tensor, whole(tensor.shape), "", 0)]
            module[name] = new[owner]
    if job.module_metadata is not None:
        module.__dict__["_metadata"] = job.module_metadata
    return module


def _frozen(
    draft: Draft, name: str, rank: int, module: Mapping[str, Any], filled: Filled
) -> NewTensor:
    """Return what a rank keeps of a parameter that is not trained."""
    if draft.stage == 2:
        same: NewTensor = module[name]
        return same
    tensor = draft.parameter(name)
    numel, part = prod(tensor.shape), part_of(tensor.shape, draft.dp)
    new = NewTensor(tensor.dtype, (part,))
    span = Span(name, min(rank * part, numel), min((rank + 1) * part, numel), 0)
    filled[new] = list(pieces_of(tensor, span))
    return new
