"""TensorBoard and Weights & Biases go on in the same run when the workers start anew.

The writers are built before the state is restored, on the last rank, which may be another host than
before. Steps that a lost worker had written already are not written again: TensorBoard's own
``purge_step`` would also delete every scalar that Megatron plots over samples instead of steps.
"""

import importlib
import mmap
import secrets
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_RECORD_HEADER = struct.Struct("<Q")
_HEADER_BYTES, _TRAILER_BYTES = 12, 4
"""A record of an event file: length (8 bytes), checksum (4), the event, checksum (4)."""


def new_run_id() -> str:
    """Return an identity for a new run at Weights & Biases."""
    return secrets.token_hex(4)


@contextmanager
def resumed_run(wandb: Any, run_id: str) -> Iterator[None]:
    """Let ``wandb.init`` continue the run of this identity, or begin it."""
    original = wandb.init

    def init(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"id": run_id, "resume": "allow", **kwargs})

    wandb.init = init
    try:
        yield
    finally:
        wandb.init = original


def skip_written_steps(writer: Any, written: dict[str, int]) -> None:
    """Make ``writer.add_scalar`` leave out what the log holds already.

    Args:
        writer: A ``SummaryWriter``.
        written: Newest step of each tag in the log. Megatron counts some tags in samples.
    """
    add_scalar: Callable[..., None] = writer.add_scalar

    def add_new_scalar(
        tag: str, scalar_value: Any, global_step: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if global_step is None or global_step > written.get(tag, -1):
            add_scalar(tag, scalar_value, global_step, *args, **kwargs)

    writer.add_scalar = add_new_scalar


def written_steps(directory: Path, records: int = 10_000) -> dict[str, int]:
    """Return the newest step of each tag at the end of the newest TensorBoard log of ``directory``.

    Args:
        directory: ``--tensorboard-dir``.
        records: How many events are looked at, from the end: more than a job writes between two
            states that it may have to go back to.
    """
    logs = [path for path in directory.glob("events.out.tfevents.*") if path.stat().st_size]
    for path in sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True):
        steps: dict[str, int] = {}
        for tag, step in _scalars(path, records):
            steps[tag] = max(step, steps.get(tag, step))
        if steps:
            return steps
    return {}


def _scalars(path: Path, records: int) -> Iterator[tuple[str, int]]:
    # The package that writes these logs is installed where there are any.
    event_type = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for start, stop in _records(content)[-records:]:
            event = event_type.FromString(content[start:stop])
            for value in event.summary.value:
                yield value.tag, event.step


def _records(content: mmap.mmap) -> list[tuple[int, int]]:
    """List where the events lie; what a killed writer left unfinished at the end is left out."""
    places, at = [], 0
    while at + _HEADER_BYTES <= len(content):
        start = at + _HEADER_BYTES
        stop = start + _RECORD_HEADER.unpack_from(content, at)[0]
        at = stop + _TRAILER_BYTES
        if at > len(content):
            break
        places.append((start, stop))
    return places
