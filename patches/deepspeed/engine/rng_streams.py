"""Random number generators of one rank, as JSON."""

from collections.abc import Mapping
from typing import Any

from scalai.core.jsonable import Json
from scalai.patches.continuation import (
    begin_host_rng,
    continue_host_rng,
    host_rng_state,
    restore_rng_state,
    rng_state_of_text,
    seed_of_step,
    text_of_rng_state,
)
from scalai.patches.deepspeed.engine import parallel_ranks


def state(engine: Any) -> Json:
    """Return the state of all generators of this rank, with its layout."""
    return {
        "degrees": _layout(engine),
        **host_rng_state(),
        "device": text_of_rng_state(_accelerator().get_rng_state()),
        "tracker": {
            name: text_of_rng_state(value) for name, value in _tracker().get_states().items()
        },
    }


def restore(engine: Any, saved: Json | None, seed: int, step: int) -> str:
    """Continue the RNG states of this coordinate, or begin new ones in another layout.

    New ones are equal on all ranks except for a pipeline's stages, as DeepSpeed's users seed them;
    ``seed`` and ``step`` determine them.

    Returns:
        One line for the log.
    """
    return restore_rng_state(
        saved, _layout(engine), seed, step,
        go_on=go_on, begin=lambda: _begin(seed_of_step(seed, step, parallel_ranks.stage(engine))),
    )  # fmt: skip


def _layout(engine: Any) -> dict[str, int]:
    """Return all degrees and the ZeRO stage, which orders the runs of modules."""
    return {**parallel_ranks.degrees(engine), "zero": engine.zero_optimization_stage()}


def go_on(saved: Mapping[str, Any]) -> None:
    continue_host_rng(saved)
    _accelerator().set_rng_state(rng_state_of_text(saved["device"]))
    if saved["tracker"]:
        _tracker().set_states({k: rng_state_of_text(text) for k, text in saved["tracker"].items()})


def _begin(seed: int) -> None:
    begin_host_rng(seed)
    _accelerator().manual_seed_all(seed)
    if _tracker().get_states():
        _checkpointing().model_parallel_cuda_manual_seed(seed)


def _tracker() -> Any:
    """Return the RNG states of model-parallel regions, of activation checkpointing."""
    return _checkpointing().get_cuda_rng_tracker()


def _checkpointing() -> Any:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return checkpointing


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
