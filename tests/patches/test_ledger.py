import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scalai.core.dataset.step_lines import StepEntry
from scalai.core.degrees.batches import combine_hashes, sample_hashes
from scalai.core.errors import UsageError
from scalai.patches.megatron import step_logs
from scalai.patches.megatron.step_logs import StepLedger, samples_of
from support.ledgers import read_ledger


def test_consumed_samples_are_hashed_once_and_written_a_line_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_logs, "_is_counting_rank", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    batches = [{"tokens": torch.arange(4 * n, 4 * n + 8).view(2, 4)} for n in range(4)]
    train = SimpleNamespace(iterable=iter(batches))
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}, {"lr": 0.25}])
    book = StepLedger(tmp_path / "new folder", "r", round_number=2)
    book.count((train, None, None))
    for step in (1, 2):
        next(train.iterable), next(train.iterable)
        book.keep_loss({"lm loss": torch.tensor(3.0 / step)})
        book.write(step, 4 * step, optimizer)
    entries = read_ledger(tmp_path / "new folder")
    assert [entry.loss for entry in entries.values()] == [3.0, 1.5]
    assert entries[2].samples_hash == combine_hashes(
        *(sample_hashes(batch["tokens"].numpy()) for batch in batches[2:])
    )
    assert entries[2].lr == 0.5
    text = (tmp_path / "new folder" / "rank-3.jsonl").read_text().splitlines()[0]
    assert json.loads(text)["round"] == 2


@pytest.mark.parametrize(
    "names", [["tokens"], ["text"], ["text_enc", "text_dec"]], ids=["GPT", "BERT", "T5"]
)
def test_the_samples_of_every_model_are_counted(names: list[str]) -> None:
    parts = {name: torch.arange(8 * n, 8 * n + 8).view(2, 4) for n, name in enumerate(names)}
    assert samples_of({"loss_mask": torch.ones(2, 4), **parts}).shape == (2, 4 * len(names))


def test_a_batch_of_unknown_names_is_refused_by_them() -> None:
    with pytest.raises(UsageError, match="have images, labels; known are tokens"):
        samples_of({"images": torch.ones(1), "labels": torch.ones(1)})


def test_ranks_that_read_no_samples_write_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_logs, "_is_counting_rank", lambda: False)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    train = SimpleNamespace(iterable="untouched")
    book = StepLedger(tmp_path, "r", round_number=0)
    book.count((train, None, None))
    book.count((None, None, None))
    book.keep_loss({})
    book.write(1, 4, SimpleNamespace(param_groups=[]))
    assert train.iterable == "untouched"
    assert read_ledger(tmp_path)[1] == StepEntry(0, 1, 4, samples_hash=0, loss=None, lr=None)
