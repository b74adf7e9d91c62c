"""Where the memory of the state lies: a snapshot reads it there, so it has to stay."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from scalai.core.errors import RefusedError
from scalai.patches.deepspeed.engine.masters import masters_of
from scalai.patches.deepspeed.engine.shards import persistent_buffers


def places_of(engine: Any) -> dict[str, int]:
    """Return the address of every piece of memory that the slots of an engine refer to."""
    return {name: tensor.data_ptr() for name, tensor in _tensors(engine)}


def refuse_moved(engine: Any, before: Mapping[str, int]) -> None:
    """Compare with what ``places_of`` returned when the slots were listed.

    Raises:
        RefusedError: Something lies elsewhere now.
    """
    here = places_of(engine)
    moved = sorted(name for name, place in before.items() if here.get(name) != place)
    if moved:
        raise RefusedError(
            f"the memory of {', '.join(moved[:3])}{' and others' * (len(moved) > 3)} was replaced "
            "since the job was attached, so what was written is old. Change buffers in place "
            "and load checkpoints before attach()."
        )


def _tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in engine.module.named_parameters():
        yield f"param/{name}", getattr(parameter, "ds_tensor", parameter)
    for name, buffer in persistent_buffers(engine.module):
        yield f"param/{name}", buffer
    for number, master in enumerate(masters_of(engine)):
        yield f"master {number}", master.values
        for kind, state in master.state.items():
            if isinstance(state, torch.Tensor) and state.ndim:
                yield f"{kind} of master {number}", state
