"""Random number generators of one rank, as JSON."""

from collections.abc import Mapping
from typing import Any

import torch

from scalai.core.jsonable import Json
from scalai.patches.megatron import grid
from scalai.patches.rng_state import (
    begin_host_rng,
    continue_host_rng,
    host_rng_state,
    restore_rng_state,
    rng_state_of_text,
    seed_of_step,
    text_of_rng_state,
)


def state() -> Json:
    """Return the state of all generators of this rank, and the degrees under which it is valid."""
    return {
        "degrees": dict(grid.degrees()),
        **host_rng_state(),
        "cuda": text_of_rng_state(torch.cuda.get_rng_state()),
        "tracker": {
            name: text_of_rng_state(_tensor_state(value))
            for name, value in _tracker().get_states().items()
        },
    }


def restore(saved: Json | None, seed: int, step: int) -> str:
    """Continue the RNG states of this coordinate, or begin new ones where the degrees changed.

    Never a mix: some of megatron's RNG states are equal on all tensor-parallel ranks, so with other
    degrees all ranks begin new ones, which ``seed`` and ``step`` determine.

    Returns:
        One line for the log that says which.
    """
    return restore_rng_state(
        saved, dict(grid.degrees()), seed, step,
        go_on=go_on, begin=lambda: _begin(seed, step),
    )  # fmt: skip


def go_on(saved: Mapping[str, Any]) -> None:
    """Go on with what ``state`` returned."""
    continue_host_rng(saved)
    torch.cuda.set_rng_state(rng_state_of_text(saved["cuda"]))
    tracker = _tracker()
    states = tracker.get_states()
    for name, text in saved["tracker"].items():
        current = states.get(name)
        if isinstance(current, torch.Generator):  # a tracker for CUDA graphs
            current.set_state(rng_state_of_text(text))
        else:
            states[name] = rng_state_of_text(text)
    tracker.set_states(states)


def _begin(seed: int, step: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed = seed_of_step(seed, step, parallel_state.get_pipeline_model_parallel_rank())
    begin_host_rng(seed)
    model_parallel_cuda_manual_seed(seed)


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _tensor_state(value: torch.Tensor | torch.Generator) -> torch.Tensor:
    return value.get_state() if isinstance(value, torch.Generator) else value
