"""This rank's place on megatron's parallel axes, and its random number generators as JSON."""

from collections.abc import Callable, Mapping
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state

from scalai.core.jsonable import Json
from scalai.core.release import numbers_of
from scalai.patches.continuation import (
    begin_host_rng,
    continue_host_rng,
    host_rng_state,
    restore_rng_state,
    rng_state_of_text,
    seed_of_step,
    text_of_rng_state,
)


def release() -> tuple[int, ...]:
    """Return the numbers of Megatron-core's release."""
    return numbers_of(megatron.core.__version__)


def degrees() -> Mapping[str, int]:
    """Return the sizes of the parallel axes; ``vpp`` is the number of model chunks a stage."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }


def coordinate() -> str:
    """Return this rank's position, ``tp0-pp1-dp0``, with ``-cp1`` under context parallelism.

    Expert ranks are no axis of their own: megatron lays them over the data-parallel ranks.
    """
    position = (
        f"tp{parallel_state.get_tensor_model_parallel_rank()}"
        f"-pp{parallel_state.get_pipeline_model_parallel_rank()}"
        f"-dp{parallel_state.get_data_parallel_rank()}"
    )
    if parallel_state.get_context_parallel_world_size() > 1:
        position += f"-cp{parallel_state.get_context_parallel_rank()}"
    return position


def rng_state(degrees: Mapping[str, int]) -> Callable[[], Json]:
    """Return a function that writes down the present state of all generators of this rank, with its
    ``degrees``."""
    host, cuda = host_rng_state(), torch.cuda.get_rng_state()
    # The tracker replaces its tensors and changes none.
    tracked = {name: _tensor_state(value) for name, value in _tracker().get_states().items()}
    return lambda: {
        "degrees": dict(degrees),
        **host(),
        "cuda": text_of_rng_state(cuda),
        "tracker": {name: text_of_rng_state(value) for name, value in tracked.items()},
    }


def restore_rng(saved: Json | None, seed: int, step: int) -> str:
    """Continue the RNG states of this coordinate, or begin new ones at other degrees.

    Never a mix: some of megatron's RNG states are equal on all tensor-parallel ranks, so at other
    degrees all ranks begin new ones, from ``seed`` and ``step``.

    Returns:
        One line for the log.
    """
    return restore_rng_state(
        saved, dict(degrees()), seed, step,
        go_on=continue_rng, begin=lambda: _begin(seed, step),
    )  # fmt: skip


def continue_rng(saved: Mapping[str, Any]) -> None:
    """Continue with the result of ``rng_state``."""
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
