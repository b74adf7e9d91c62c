"""A snapshot that is written while the training goes on: what is in the file is the state of its
step, whatever the training does meanwhile, and a snapshot that fails ends no training.

The agent's end of the wire is the real one; what stands behind it says where to write, and keeps
what it hears.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import RankUnwritten, RankWritten
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Piece, whole
from scalai.runtime import async_snapshots
from scalai.runtime.async_snapshots import AsyncSnapshots, Writing
from scalai.runtime.emergency import Between
from scalai.runtime.live import Slot
from scalai.runtime.live_fingerprints import live_fingerprints
from support.answering_agent import FIRST_BYTE, AnsweringAgent

DEADLINE_S = 60.0
NONE = JsonText.of(None)


def between(step: int) -> Between:
    return Between(step, 3 * step, "dp0", NONE, NONE)


def row(
    name: str, buffer: torch.Tensor, shape: Any, stride: Any, *, is_volatile: bool
) -> tuple[Slot, Piece]:
    piece = Piece(whole(shape), 0, stride)
    return Slot(Tensor(name, shape, "F32"), buffer, (piece,), is_volatile=is_volatile), piece


class Training:
    """A rank that trains: ``weights`` are what an update changes, ``mean`` what a forward pass
    does."""

    def __init__(self, folder: Path) -> None:
        self.weights, self.mean = torch.arange(24.0).view(4, 6), torch.zeros(5)
        self.rows = [
            # Column by column: no run of it is contiguous.
            row("param/w", self.weights.view(-1), (6, 4), (1, 6), is_volatile=False),
            row("buffer/mean", self.mean, (5,), (1,), is_volatile=True),
        ]
        self.agent, self.turn = AnsweringAgent(folder, self.rows), threading.Lock()
        self.pauses = 0
        directory = str(self.agent.directory)
        self.snapshots = AsyncSnapshots(
            self.agent.channel, 0, 1, directory, self.rows, {}, self.turn, self.pause
        )
        self.snapshots.begin_update()  # the update of the first step

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.pauses += 1
        yield
        self.pauses -= 1

    def begin(self, step: int) -> bool:
        return self.snapshots.begin(between(step), None, time.monotonic())

    def under_way(self) -> Writing:
        assert self.snapshots._present is not None
        return self.snapshots._present

    def forward(self) -> None:
        self.mean += 1.0

    def update(self) -> None:
        self.snapshots.begin_update()
        self.weights += 100.0

    def told(self) -> list[RankWritten]:
        return self.agent.told()

    def unwritten(self) -> list[RankUnwritten]:
        return [each for each in self.agent.heard if isinstance(each, RankUnwritten)]

    def file(self) -> tuple[list[float], list[float]]:
        """Return what the file holds of both tensors."""
        content = bytearray(self.agent.path.read_bytes()[FIRST_BYTE:])
        found = torch.frombuffer(content, dtype=torch.float)
        return found[:24].tolist(), found[32:37].tolist()

    def state(self) -> tuple[list[float], list[float]]:
        return self.weights.t().contiguous().view(-1).tolist(), self.mean.tolist()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    if made.snapshots._channel is not None:
        made.snapshots._channel.close()
    made.agent.close()


def begun(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


def ends(thread: threading.Thread) -> bool:
    thread.join(DEADLINE_S)
    return not thread.is_alive()


@pytest.mark.fault
def test_what_is_written_is_the_state_of_its_step_though_the_training_goes_on(
    training: Training,
) -> None:
    before, prints = training.state(), live_fingerprints(training.rows)
    with training.turn:  # the copy takes its time
        assert training.begin(7)
        under_way = training.under_way()
        stall_s = under_way.stall_s
        training.forward()
        update = begun(training.update)
        wait_until(lambda: under_way.waits_since is not None)
        update.join(0.3)
        assert update.is_alive() and training.state()[0] == before[0], "the update waits"
        assert training.pauses == 1, "that is no part of its step"
    assert ends(update) and not training.pauses
    training.snapshots.settle()
    assert training.file() == before
    (told,) = training.told()
    assert told.step == 7 and told.consumed_samples == 21
    assert list(told.fingerprints) == [int(each) for each in prints]
    assert training.state() != before
    assert told.seconds["stall"] > stall_s, "how long the update has waited is told"


def test_an_update_that_comes_later_does_not_wait(training: Training) -> None:
    assert training.begin(7)
    training.snapshots.settle()
    training.update()
    (told,) = training.told()
    assert told.seconds.keys() == {"snapshot", "snapshot_proof", "stall"}


def test_one_snapshot_after_another_is_of_its_own_step(training: Training) -> None:
    for step in range(1, 9):
        before = training.state()
        assert training.begin(step)
        training.forward()
        training.update()
        training.snapshots.settle()
        assert training.file() == before, step
    assert [told.step for told in training.told()] == list(range(1, 9))


def test_any_optimizer_of_torchs_waits(training: Training) -> None:
    training.snapshots.watch()
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with training.turn:
        training.begin(7)
        update = begun(lambda: optimizer.step())
        update.join(0.3)
        assert parameter.tolist() == [1.0, 1.0]
    assert ends(update) and parameter.tolist() != [1.0, 1.0]
    training.snapshots.settle()


@pytest.mark.fault
def test_what_the_thread_cannot_write_the_training_writes_before_it_updates(
    training: Training,
) -> None:
    before = training.state()
    training.agent.path.unlink()
    assert training.begin(7)
    assert training.under_way().ended.wait(DEADLINE_S)
    training.agent.make_file()
    training.update()
    training.snapshots.settle()
    assert training.file() == before
    assert [told.step for told in training.told()] == [7]


@pytest.mark.fault
def test_what_nobody_can_write_is_told_and_the_training_goes_on(training: Training) -> None:
    training.agent.path.unlink()
    assert training.begin(7)
    training.forward()
    training.update()
    training.snapshots.settle()
    (told,) = training.unwritten()
    assert told.step == 7 and "No such file" in told.reason and not training.told()
    training.agent.make_file()
    assert training.begin(8)
    training.snapshots.settle()
    assert training.file() == training.state(), "the next one is written"


@pytest.mark.fault
def test_memory_that_ends_in_the_proof_is_told_and_the_training_goes_on(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(async_snapshots, "file_fingerprints", full)
    assert training.begin(7)
    training.update()
    training.snapshots.settle()
    (told,) = training.unwritten()
    assert told.step == 7 and "MemoryError" in told.reason


def test_what_the_agent_has_not_heard_of_the_thread_it_hears_of_the_training(
    training: Training,
) -> None:
    before, training.agent.refused = training.state(), 1
    assert training.begin(7)
    training.update()
    training.snapshots.settle()
    assert len(training.told()) == 2 and training.file() == before
    assert training.told()[0].fingerprints == training.told()[1].fingerprints


def test_a_host_without_files_holds_up_no_update(training: Training) -> None:
    training.agent.has_files = False
    assert training.begin(7)
    training.update()
    training.snapshots.settle()
    assert not training.told()


@pytest.mark.fault
def test_where_no_thread_can_begin_the_snapshot_is_not_begun(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    assert not training.begin(7)
    training.update()


@pytest.mark.fault
def test_where_there_is_no_room_for_copies_the_snapshot_is_not_begun(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", full)
        assert not training.begin(7)
    training.update()
    assert training.begin(8)
    training.snapshots.settle()
    assert [told.step for told in training.told()] == [8]


@pytest.mark.fault
def test_a_snapshot_is_given_up_when_workers_fail(training: Training) -> None:
    """What this worker holds may be written at once, into the same files."""
    with training.turn:
        assert training.begin(7)
        update = begun(training.update)
        training.snapshots.give_up()
    assert ends(update), "nobody waits for what is not written"
    training.snapshots.settle()
    assert not training.told() and not any(training.file()[0])


def test_who_shows_no_update_stands_still_for_its_snapshots(tmp_path: Path) -> None:
    nobody: Any = None
    snapshots = AsyncSnapshots(nobody, 0, 1, str(tmp_path), [], {}, threading.Lock())
    assert "no update was seen" in snapshots.obstacle()
    snapshots.begin_update()
    assert not snapshots.obstacle()


def test_too_much_to_copy_at_once_means_that_the_training_stands_still(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not training.snapshots.obstacle()
    monkeypatch.setattr(async_snapshots, "COPIED_BYTES", 8)
    assert "too large to be copied at once" in training.snapshots.obstacle()


def test_pieces_that_are_larger_than_a_block_are_copied_whole(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_snapshots, "BLOCK_BYTES", 8)
    before = training.state()
    assert training.begin(7)
    training.update()
    training.snapshots.settle()
    assert training.file() == before
