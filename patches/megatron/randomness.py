"""Random number generators of one rank, as JSON."""

from collections.abc import Mapping
from typing import Any

import torch

from scalai.core.jsonable import Json
from scalai.patches.megatron import grid
from scalai.patches.streams import (
    begin_host_streams,
    continue_host_streams,
    host_streams,
    restore_streams,
    seed_of_step,
    stream_text,
    text_stream,
)


def state() -> Json:
    """Return the state of all generators of this rank, and the degrees under which it is valid."""
    return {
        "degrees": dict(grid.degrees()),
        **host_streams(),
        "cuda": stream_text(torch.cuda.get_rng_state()),
        "tracker": {
            name: stream_text(_tensor_state(value))
            for name, value in _tracker().get_states().items()
        },
    }


def restore(saved: Json | None, seed: int, step: int) -> str:
    """Continue the streams of this coordinate, or begin new ones where the degrees changed.

    Never a mix: some of megatron's streams are equal on all tensor-parallel ranks, so with other
    degrees all ranks begin new ones, which ``seed`` and ``step`` determine.

    Returns:
        One line for the log that says which.
    """
    return restore_streams(
        saved, dict(grid.degrees()), seed, step,
        go_on=_continue, begin=lambda: _begin(seed, step),
    )  # fmt: skip


def _continue(saved: Mapping[str, Any]) -> None:
    continue_host_streams(saved)
    torch.cuda.set_rng_state(text_stream(saved["cuda"]))
    tracker = _tracker()
    states = tracker.get_states()
    for name, text in saved["tracker"].items():
        current = states.get(name)
        if isinstance(current, torch.Generator):  # a tracker for CUDA graphs
            current.set_state(text_stream(text))
        else:
            states[name] = text_stream(text)
    tracker.set_states(states)


def _begin(seed: int, step: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    seed = seed_of_step(seed, step, parallel_state.get_pipeline_model_parallel_rank())
    begin_host_streams(seed)
    model_parallel_cuda_manual_seed(seed)


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _tensor_state(value: torch.Tensor | torch.Generator) -> torch.Tensor:
    return value.get_state() if isinstance(value, torch.Generator) else value
