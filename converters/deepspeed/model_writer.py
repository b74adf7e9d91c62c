"""Lays out DeepSpeed's model_states files: weights, buffers, and an engine's other entries.

Source: ``_common_checkpoint_state`` of deepspeed/runtime/engine.py, 0.19.8.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from scalai.converters.checkpoint import PARAM, FilePiece
from scalai.converters.deepspeed.drafts import Draft, Filled, pieces_of
from scalai.converters.deepspeed.experts import Name, expert_of, model_file
from scalai.converters.deepspeed.flat import Span, part_of
from scalai.converters.deepspeed.optimizer_writer import Buffer
from scalai.converters.deepspeed.tag_files import nest
from scalai.converters.torch_archive import NewTensor
from scalai.core.tensors.region import whole

_DEGREES = "checkpoint_parallel_dimensions"


def add_model(
    draft: Draft,
    rank: int,
    buffers: Sequence[Buffer],
    optimizer: Mapping[str, Any] | None = None,
    filled: Filled | None = None,
) -> None:
    """Lay out a model-parallel rank's model_states file.

    The file is for all its data-parallel ranks, or in stage 3 for one.

    Args:
        buffers: Flat buffers; none in stage 0.
        optimizer, filled: Stage 0's optimizer state, and the content of its tensors.
    """
    filled = Filled() if filled is None else filled
    job = draft.job
    module = None if job.pipeline else _module(draft, filled)
    tp, pp = draft.degrees
    shared = dict(job.aliases) if rank == draft.rank == 0 else {}  # as DeepSpeed does
    entries: dict[str, Any] = {
        **job.model,
        "module": nest(module, job.module_nesting) if module and job.module_nesting else module,
        "buffer_names": [name for name in job.buffers if draft.is_here(name)],
        "optimizer": optimizer,
        "shared_params": shared if draft.stage else None,
        "param_shapes": [draft.sizes(buffer.shapes) for buffer in buffers] or None,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "dp_world_size": draft.dp,
        "mp_world_size": tp * pp,
        "ds_config": draft.config,
    }
    if _DEGREES in entries or tp * pp > 1:
        entries[_DEGREES] = {"pp_degree": pp, "tp_degree": tp}
    has_frozen = not job.lacks_frozen and not draft.spreads_frozen_experts
    if draft.stage > 1 and module is not None and has_frozen:
        frozen = [name for name in job.frozen if draft.is_here(name)]
        entries["frozen_param_shapes"] = draft.sizes(frozen)
        entries["frozen_param_fragments"] = OrderedDict(
            (name, _frozen(draft, name, rank, module, filled)) for name in frozen
        )
    prefix = f"zero_pp_rank_{rank}_" if draft.stage == 3 else ""
    name = f"{prefix}mp_rank_{draft.rank:02d}_model_states.pt"
    draft.archives.add(f"{draft.folder}/{name}", entries, filled)


def add_layers(draft: Draft) -> None:
    """Lay out a pipeline's layer files for the tensor-parallel rank of this draft."""
    pipeline = draft.job.pipeline
    if pipeline is None:
        return
    suffix = f"-model_{draft.rank:02d}" if pipeline.names_tp or draft.degrees[0] > 1 else ""
    for layer in pipeline.files:
        filled = Filled()
        state: OrderedDict[str, Any] = OrderedDict()
        for name in layer.names:
            state[name] = _whole(draft, f"{layer.unit}.{name}", filled)
        if layer.metadata is not None:
            state.__dict__["_metadata"] = layer.metadata
        path = f"{draft.folder}/layer_{layer.place:02d}{suffix}-model_states.pt"
        draft.archives.add(path, state, filled)


def add_experts(draft: Draft) -> None:
    """Lay out the files of experts, if there are any."""
    for place, layer in enumerate(draft.job.experts.layers if draft.job.experts else ()):
        for number in range(layer.count):
            filled = Filled()
            state = {}
            for rest in layer.entries:
                name = str(Name(layer.name, number, rest))
                state[name] = _whole(draft, name, filled)
            draft.archives.add(f"{draft.folder}/{model_file(place, number)}", state, filled)


def _whole(draft: Draft, name: str, filled: Filled) -> NewTensor:
    tensor = draft.parameter(name)
    new = NewTensor(tensor.dtype, tensor.shape)
    filled[new] = [FilePiece(tensor, whole(tensor.shape), "", 0)]
    return new


def _module(draft: Draft, filled: Filled) -> OrderedDict[str, Any]:
    """Return the module's state_dict without experts, shared parameters as one tensor."""
    job = draft.job
    module: OrderedDict[str, Any] = OrderedDict()
    new: dict[str, NewTensor] = {}
    for name in job.module:
        owner = job.aliases.get(name, name)
        if expert_of(name):
            continue
        if name in job.module_values:
            module[name] = job.module_values[name]
        elif draft.stage == 3 and name not in job.buffers:
            module[name] = NewTensor(job.dtypes[name], (0,), b"")
        elif not job.lacks_frozen or f"{PARAM}/{owner}" in draft.tensors:
            # A frozen one that was not saved has a second name here, if it is shared.
            if owner not in new:
                new[owner] = _whole(draft, owner, filled)
            module[name] = new[owner]
    if job.module_metadata is not None:
        module.__dict__["_metadata"] = job.module_metadata
    return module


def _frozen(
    draft: Draft, name: str, rank: int, module: Mapping[str, Any], filled: Filled
) -> NewTensor:
    if draft.stage == 2:
        same: NewTensor = module[name] if name in module else _whole(draft, name, filled)
        return same
    tensor = draft.parameter(name)
    numel, part = prod(tensor.shape), part_of(tensor.shape, draft.dp)
    new = NewTensor(tensor.dtype, (part,))
    span = Span(name, min(rank * part, numel), min((rank + 1) * part, numel), 0)
    filled[new] = list(pieces_of(tensor, span))
    return new
