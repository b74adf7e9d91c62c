"""Accelerate's ``scheduler.bin`` at another number of ranks.

Each step, Accelerate steps a learning-rate schedule once per rank, unless built with
``split_batches`` or ``step_scheduler_with_optimizer=False``. Its position is ranks times steps.

Source: ``AcceleratedScheduler.step`` of accelerate/scheduler.py, 1.15.
"""

from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.files import carried, read_dictionary
from scalai.converters.torch_archive import lay_out_archive

AT, COUNT, FUNCTIONS = "last_epoch", "_step_count", "lr_lambdas"
"""Entries of LambdaLR's state: its position, its count of steps, and its functions, which the job's
script defines anew."""


def counts_ranks(state: dict[str, Any], step: int, world: int) -> bool:
    """Tell whether a schedule was stepped by every rank.

    Args:
        state: The schedule's state.
        step: Steps of the engine, overflows included.
        world: Number of ranks.
    """
    at = state.get(AT)
    return type(at) is int and at > 0 and not at % world and (world == 1 or at != step)


def read_schedule(path: Path) -> dict[str, Any]:
    """Return a schedule's state. ``RefusedError``: its pickle is not allowed."""
    state: dict[str, Any] = carried(read_dictionary(path, trust=False), path)
    return state


def rescaled(state: dict[str, Any], before: int, after: int) -> bytes:
    """Return the file of a LambdaLR's state for ``after`` ranks instead of ``before``."""
    at = state[AT] // before * after
    count = state.get(COUNT, state[AT] + 1) + at - state[AT]
    archive = lay_out_archive({**state, AT: at, COUNT: count}, "scheduler")
    content = bytearray(archive.size_bytes)
    for begin, data in archive.fixed:
        content[begin : begin + len(data)] = data
    return bytes(content)
