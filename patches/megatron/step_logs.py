"""Logs of a job's steps: Scalai's ledger for comparisons of runs, TensorBoard, Weights & Biases.

The ledger hashes samples at consumption, in the order-free way of ``core/degrees/batches.py``:
added over the data-parallel ranks, a step's value is its global batch's, in any layout. `scalai
ledger` reads the lines.

TensorBoard and Weights & Biases go on in the same run when the workers start anew. The writers are
built before the state is restored, on the last rank, perhaps on another host than before. Steps
written by a lost worker are not written again: TensorBoard's own ``purge_step`` would also delete
every scalar plotted by Megatron over samples instead of steps.
"""

import importlib
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from scalai.core.dataset.step_lines import StepLine, line_text
from scalai.core.degrees.batches import combine_hashes, sample_hashes
from scalai.core.errors import UsageError

LEDGER_DIR = "SCALAI_LEDGER_DIR"
"""Environment variable: folder of each rank's ledger; unset: none."""

_SAMPLES = ("tokens", "text", "text_enc", "text_dec")
"""Keys of a batch's samples: GPT's, BERT's, T5's two."""


class StepLedger:
    """Writes ``rank-<r>.jsonl`` in ``directory``, from the hooks of Megatron-LM's training loop.

    A line holds the round, the step, the samples consumed so far, the learning rate, and on the
    ranks with them: the hash of the step's samples (TP rank 0 of the first stage) and the loss
    (last stage). Rates and losses are read from the device once a step: for tests, not for speed.
    """

    def __init__(self, directory: Path, run: str, round_number: int) -> None:
        self._directory = directory
        self._run, self._round = run, round_number
        self._hash: int | None = None
        self._loss: float | None = None

    def count(self, iterators: Any, is_filler: Callable[[], bool]) -> None:
        """Count the training iterator's samples from now on, on a counting rank.

        Args:
            iterators: Result of build_train_valid_test_data_iterators(); virtual stages call it
                once a chunk, and the first chunk of the first stage reads the samples.
            is_filler: Says whether the newest draw belongs to a filler.
        """
        train = iterators[0]
        if train is not None and self._hash is None and is_counting_rank():
            self._hash = 0
            # Inside RerunDataIterator, which may replay a step: replayed samples count once.
            train.iterable = self._counted(train.iterable, is_filler)

    def keep_loss(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Keep the reduced losses of a step, on the last stage."""
        loss = losses.get("lm loss")
        self._loss = None if loss is None else float(loss.item())

    def write(self, step: int, consumed_samples: int, optimizer: Any) -> None:
        """Write the line of a step and begin the next one."""
        rate = max((float(group["lr"]) for group in optimizer.param_groups), default=None)
        line = StepLine(
            self._run, self._round, step, consumed_samples, self._hash, self._loss, rate
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"rank-{torch.distributed.get_rank()}.jsonl"
        with path.open("a") as file:
            file.write(line_text(line))
        self._hash = None if self._hash is None else 0

    def _counted(
        self, batches: Iterator[Mapping[str, torch.Tensor]], is_filler: Callable[[], bool]
    ) -> Iterator[Any]:
        for batch in batches:
            if not is_filler():
                self._hash = combine_hashes(self._hash or 0, sample_hashes(samples_of(batch)))
            yield batch


def samples_of(batch: Mapping[str, torch.Tensor]) -> NDArray[Any]:
    """Return the samples of a batch, [samples, tokens]: those of GPT, BERT and T5, side by side.

    Raises:
        UsageError: The batch has none of their names.
    """
    found = [batch[name].cpu().numpy() for name in _SAMPLES if name in batch]
    if not found:
        raise UsageError(
            f"{LEDGER_DIR}: the batches of this script have {', '.join(sorted(batch))}; known are "
            f"{', '.join(_SAMPLES)}. Leave the variable out."
        )
    return np.concatenate(found, axis=1)


def is_counting_rank() -> bool:
    from megatron.core import parallel_state

    return bool(
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    )


_RECORD_HEADER = struct.Struct("<Q")
_HEADER_BYTES, _TRAILER_BYTES = 12, 4
"""A record of an event file: length (8 bytes), checksum (4), the event, checksum (4)."""


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
    """Make ``writer.add_scalar`` leave out steps in the log.

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
        records: Number of events to read, from the end: more than a job writes between two states.
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
    """List the places of events, without an unfinished one of a killed writer at the end."""
    places, at = [], 0
    while at + _HEADER_BYTES <= len(content):
        start = at + _HEADER_BYTES
        stop = start + _RECORD_HEADER.unpack_from(content, at)[0]
        at = stop + _TRAILER_BYTES
        if at > len(content):
            break
        places.append((start, stop))
    return places
