"""What ZeRO 1 and 2 write under ``elastic_checkpoint``: states without padding, and no groups.

Source: ``state_dict`` and ``_restore_elastic_base_optimizer_state`` of
deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8. They take the step from the parameter groups, where
FusedAdam keeps it; with another optimizer DeepSpeed writes what it cannot load.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scalai.converters.deepspeed.archives import Filled
from scalai.converters.deepspeed.buffers import Buffer, part
from scalai.converters.deepspeed.draft import Draft
from scalai.converters.scalars import read_steps


def as_rigid(state: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's optimizer state in the form that it has otherwise; groups remain unknown."""
    base = state.get("base_optimizer_state")
    if not isinstance(base, list):
        return state
    inner = {"state": dict(enumerate(base)), "param_groups": []}
    return {**state, "base_optimizer_state": inner}


def elastic_state(
    draft: Draft, rank: int, buffers: Sequence[Buffer], filled: Filled
) -> Mapping[str, Any]:
    """Return the entries of a rank's base optimizer for a job that keeps its own groups."""
    states = []
    for buffer in buffers:
        names = list(buffer.shapes)
        elements = buffer.flat.rank_elements - buffer.padding(rank)
        kinds = draft.kinds(names)
        moments = {kind: part(draft, kind, buffer, rank, elements, filled) for kind in kinds}
        states.append({**draft.step(names[0], filled), **moments})
    step = int(read_steps(draft.source) or 0)
    return {"base_optimizer_state": states, "base_optimizer_state_step": step}
