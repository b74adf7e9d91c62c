"""What a job consumed and how it learned, step by step: for comparing a run with another one.

The samples are hashed at consumption, in the order-free way of ``core/degrees/batches.py``: added
over the data-parallel ranks, a step's value is that of its global batch, in any layout. `scalai
ledger` reads the lines.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from scalai.core.dataset.step_lines import StepLine, line_text
from scalai.core.degrees.batches import combine_hashes, sample_hashes
from scalai.core.errors import UsageError

LEDGER_DIR = "SCALAI_LEDGER_DIR"
"""Environment variable: the folder where each rank writes what it consumed; unset: nothing."""

_SAMPLES = ("tokens", "text", "text_enc", "text_dec")
"""Keys of a batch under which its samples stand: GPT's, BERT's, T5's two."""


class Ledger:
    """Writes ``rank-<r>.jsonl`` in ``directory``, from the hooks of Megatron-LM's training loop.

    A line holds the round, the step, the samples consumed so far, the learning rate, and on the
    ranks that have them: the hash of the step's samples (TP rank 0 of the first stage) and the loss
    (last stage). Rates and losses are read from the device once a step: for tests, not for speed.
    """

    def __init__(self, directory: Path, run: str, round_number: int) -> None:
        self._directory = directory
        self._run, self._round = run, round_number
        self._file: TextIO | None = None
        self._hash: int | None = None
        self._loss: float | None = None

    def count(self, iterators: Any) -> None:
        """Count what the training iterator gives from now on, if this rank is one that counts.

        Args:
            iterators: What build_train_valid_test_data_iterators() returned; virtual stages call it
                once a chunk, and the first chunk of the first stage reads the samples.
        """
        train = iterators[0]
        if train is not None and self._hash is None and _is_counting_rank():
            self._hash = 0
            # Inside RerunDataIterator, which may replay a step: replayed samples count once.
            train.iterable = self._counted(train.iterable)

    def keep_loss(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Keep the reduced losses of a step, which the last stage has."""
        loss = losses.get("lm loss")
        self._loss = None if loss is None else float(loss.item())

    def write(self, step: int, consumed_samples: int, optimizer: Any) -> None:
        """Write the line of a step and begin the next one."""
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"rank-{torch.distributed.get_rank()}.jsonl"
            self._file = path.open("a", buffering=1)
        rate = max((float(group["lr"]) for group in optimizer.param_groups), default=None)
        line = StepLine(
            self._run, self._round, step, consumed_samples, self._hash, self._loss, rate
        )
        self._file.write(line_text(line))
        self._hash = None if self._hash is None else 0

    def _counted(self, batches: Iterator[Mapping[str, torch.Tensor]]) -> Iterator[Any]:
        for batch in batches:
            self._hash = combine_hashes(self._hash or 0, sample_hashes(samples_of(batch)))
            yield batch


def samples_of(batch: Mapping[str, torch.Tensor]) -> NDArray[Any]:
    """Return the samples of a batch, [samples, tokens]: what GPT, BERT and T5 read, side by side.

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


def _is_counting_rank() -> bool:
    from megatron.core import parallel_state

    return bool(
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    )
