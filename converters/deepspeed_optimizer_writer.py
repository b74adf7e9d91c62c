"""Lays out DeepSpeed's optim_states files: a rank's parts of the flat buffers of ZeRO 1 to 3.

Source: the ``state_dict`` of deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, 0.19.8.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from scalai.converters.deepspeed_archives import Filled
from scalai.converters.deepspeed_buffers import Buffer, members, part
from scalai.converters.deepspeed_classes import fragment, static_scaler, zero_stage
from scalai.converters.deepspeed_draft import Draft


def add_optimizer(draft: Draft, rank: int, buffers: Sequence[Buffer]) -> None:
    """Lay out the optim_states file of a data-parallel rank."""
    filled = Filled()
    inner = _inner(draft, rank, buffers, filled)
    masters = [_masters(draft, buffer, rank, filled) for buffer in buffers]
    state = global_state(draft)
    if draft.stage == 3:
        state.pop("clip_grad", None)
        state |= {
            "partition_count": draft.dp,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": masters,
        }
    else:
        state |= {
            "base_optimizer_state": inner,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": [buffer.flat.padding[rank] for buffer in buffers],
            "partition_count": [draft.dp] * len(buffers),
            "param_alignment_paddings": [list(buffer.gaps) for buffer in buffers],
            "param_slice_mappings": [
                OrderedDict((span.name, fragment(span)) for span in buffer.flat.spans[rank])
                for buffer in buffers
            ],
        }
    prefix = "bf16_" if draft.job.is_bf16 else ""
    name = f"{draft.folder}/{prefix}zero_pp_rank_{rank}_mp_rank_{draft.rank:02d}_optim_states.pt"
    value = {
        "optimizer_state_dict": state,
        "ds_config": draft.config,
        "ds_version": state["ds_version"],
    }
    draft.archives.add(name, value, filled)


def global_state(draft: Draft) -> dict[str, Any]:
    """Return what all ranks' optimizers keep alike."""
    return {
        "loss_scaler": static_scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": float(draft.config.get("gradient_clipping", 0.0)),
        **draft.job.optimizer,
        "zero_stage": zero_stage(draft.stage),
        "ds_version": draft.job.model.get("ds_version"),
    }


def _inner(draft: Draft, rank: int, buffers: Sequence[Buffer], filled: Filled) -> dict[str, Any]:
    """Return the state of the framework's optimizer in ZeRO's."""
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


def _masters(draft: Draft, buffer: Buffer, rank: int, filled: Filled) -> Any:
    """Return a rank's masters: in stages 1 and 2 without the padding."""
    padding = 0 if draft.stage == 3 else buffer.flat.padding[rank]
    return part(draft, None, buffer, rank, buffer.flat.rank_elements - padding, filled)
