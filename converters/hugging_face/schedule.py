"""Accelerate's ``scheduler.bin`` at another number of ranks.

Accelerate steps a learning-rate schedule as many times a step as there are ranks, unless it was
built with ``split_batches`` or ``step_scheduler_with_optimizer=False``. So where the schedule
stands is a number of ranks times steps.

Source: ``AcceleratedScheduler.step`` of accelerate/scheduler.py, 1.15.
"""

from pathlib import Path
from typing import Any

from scalai.converters.deepspeed.files import carried, read_dictionary
from scalai.converters.torch_archive import lay_out_archive

AT, COUNT, FUNCTIONS = "last_epoch", "_step_count", "lr_lambdas"
"""Entries of the state of torch's LambdaLR: where it stands, how often it was stepped, and what
computes the rates, which the job's script says anew."""


def counts_ranks(state: dict[str, Any], step: int, world: int) -> bool:
    """Tell whether a schedule was stepped by every rank.

    Args:
        state: The schedule's.
        step: Of the engine, overflows included.
        world: The number of ranks.
    """
    at = state.get(AT)
    return type(at) is int and at > 0 and not at % world and (world == 1 or at != step)


def read_schedule(path: Path) -> dict[str, Any]:
    """Return a schedule's state. Raises ``RefusedError`` where its pickle is not to be read."""
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
