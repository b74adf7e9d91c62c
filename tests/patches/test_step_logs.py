import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


class FakeWriter:
    def __init__(self) -> None:
        self.written: list[tuple[str, int | None]] = []

    def add_scalar(self, tag: str, value: float, step: int | None = None) -> None:
        self.written.append((tag, step))


def test_steps_that_the_log_holds_are_not_written_twice() -> None:
    writer = FakeWriter()
    step_logs.skip_written_steps(writer, {"lm loss": 7, "lm loss vs samples": 56})
    for step in (7, 8):
        writer.add_scalar("lm loss", 1.0, step)
        writer.add_scalar("lm loss vs samples", 1.0, 8 * step)
        writer.add_scalar("new", 1.0, step)
    writer.add_scalar("without a step", 1.0)
    assert writer.written == [
        ("new", 7),
        ("lm loss", 8),
        ("lm loss vs samples", 64),
        ("new", 8),
        ("without a step", None),
    ]


def test_a_run_is_continued_under_its_identity_and_wandb_is_left_as_it_was() -> None:
    calls: list[dict[str, Any]] = []
    wandb = SimpleNamespace(init=lambda **kwargs: calls.append(kwargs))
    original = wandb.init
    with step_logs.resumed_run(wandb, "abcd1234"):
        wandb.init(project="p")
    assert calls == [{"id": "abcd1234", "resume": "allow", "project": "p"}]
    assert wandb.init is original


def test_the_newest_log_tells_the_newest_steps_also_where_its_end_is_torn(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 6):
            writer.add_scalar("lm loss", 1.0, step)
            writer.add_scalar("lm loss vs samples", 1.0, 8 * step)
    (log,) = tmp_path.iterdir()
    with log.open("ab") as file:
        file.write(struct.pack("<Q", 1000) + b"killed here")
    assert step_logs.written_steps(tmp_path) == {"lm loss": 5, "lm loss vs samples": 40}
    assert step_logs.written_steps(tmp_path, records=2) == {"lm loss": 5, "lm loss vs samples": 40}
