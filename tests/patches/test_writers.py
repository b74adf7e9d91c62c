import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.patches.megatron import step_logs


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


def test_identities_of_runs_differ() -> None:
    assert step_logs.new_run_id() != step_logs.new_run_id()


def test_an_empty_folder_holds_no_steps(tmp_path: Path) -> None:
    assert step_logs.written_steps(tmp_path) == {}


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
