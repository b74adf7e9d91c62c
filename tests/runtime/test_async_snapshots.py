"""A snapshot that is written while the training goes on: what is in the file is the state of its
step, whatever the training does meanwhile, and a snapshot that fails ends no training.

The agent's end of the wire is the real one; what stands behind it says where to write, and keeps
what it hears.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import RankUnwritten
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Piece, whole
from scalai.runtime import rank_snapshots
from scalai.runtime.emergency_writer import Between
from scalai.runtime.live import Slot
from scalai.runtime.live_fingerprints import live_fingerprints
from scalai.runtime.rank_snapshots import AsyncSnapshots, Writing
from support.answering_agent import FIRST_BYTE, AnsweringAgent
from support.steps import DEADLINE_S, Beside

NONE = JsonText.of(None)
State = tuple[list[float], list[float]]


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
        self.waits, self.waited_for = threading.Event(), list[bool]()
        directory = str(self.agent.directory)
        self.snapshots = AsyncSnapshots(
            self.agent.channel, 0, 1, directory, self.rows, {}, self.turn, self.pause
        )
        self.snapshots.begin_update()  # the update of the first step

    @contextmanager
    def pause(self) -> Iterator[None]:
        """An update waits, which is no part of its step."""
        self.waits.set()
        yield
        self.waited_for.append(self.writing.is_copied)

    def begin(self, step: int) -> bool:
        between = Between(step, 3 * step, "dp0", lambda: (NONE, NONE))
        found = self.snapshots.begin(between, None, time.monotonic())
        if found is not None:
            self.writing: Writing = found
        return found is not None

    def forward(self) -> None:
        self.mean += 1.0

    def update(self) -> None:
        self.snapshots.begin_update()
        self.weights += 100.0

    def go_through(self, step: int) -> None:
        """Begin a snapshot, train on, and wait for its end."""
        assert self.begin(step)
        self.forward()
        self.update()
        self.snapshots.settle()

    def steps_told(self) -> list[int]:
        return [told.step for told in self.agent.told()]

    def unwritten(self) -> RankUnwritten:
        (found,) = [each for each in self.agent.heard if isinstance(each, RankUnwritten)]
        return found

    def file(self) -> State:
        """Return what the file holds of both tensors."""
        content = bytearray(self.agent.path.read_bytes()[FIRST_BYTE:])
        found = torch.frombuffer(content, dtype=torch.float)
        return found[:24].tolist(), found[32:37].tolist()

    def state(self) -> State:
        return self.weights.t().contiguous().view(-1).tolist(), self.mean.tolist()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    made.agent.close()


def full(*_: Any, **__: Any) -> Any:
    raise RuntimeError("can't start new thread, out of memory")


@pytest.mark.fault
def test_what_is_written_is_the_state_of_its_step_though_the_training_goes_on(
    training: Training,
) -> None:
    before, prints = training.state(), live_fingerprints(training.rows)
    with training.turn:  # the copy takes its time
        assert training.begin(7)
        stall_s = training.writing.stall_s
        training.forward()
        update = Beside(training.update)
        assert training.waits.wait(DEADLINE_S)
        assert training.state()[0] == before[0], "the update waits"
    assert not update.end().errors and training.waited_for == [True]
    training.snapshots.settle()
    assert training.file() == before != training.state()
    (told,) = training.agent.told()
    assert told.step == 7 and told.consumed_samples == 21
    assert list(told.fingerprints) == [int(each) for each in prints]
    assert told.seconds["stall"] > stall_s, "how long the update has waited is told"


def test_an_update_that_comes_later_does_not_wait(training: Training) -> None:
    assert training.begin(7)
    training.snapshots.settle()
    training.update()
    (told,) = training.agent.told()
    assert told.seconds.keys() == {"snapshot", "snapshot_proof", "stall"}
    assert not training.waits.is_set()


@pytest.mark.parametrize("block_bytes", [8, rank_snapshots.BLOCK_BYTES])
def test_one_snapshot_after_another_is_of_its_own_step(
    training: Training, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of pieces that are larger than a block."""
    monkeypatch.setattr(rank_snapshots, "BLOCK_BYTES", block_bytes)
    for step in range(1, 6):
        before = training.state()
        training.go_through(step)
        assert training.file() == before, step
    assert training.steps_told() == list(range(1, 6))


def test_any_optimizer_of_torchs_waits(training: Training) -> None:
    training.snapshots.watch()
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with training.turn:
        assert training.begin(7)
        update = Beside(optimizer.step)
        assert training.waits.wait(DEADLINE_S)
        assert parameter.tolist() == [1.0, 1.0]
    assert not update.end().errors and parameter.tolist() != [1.0, 1.0]
    training.snapshots.settle()
    assert training.waited_for == [True]


@pytest.mark.fault
def test_what_the_thread_cannot_write_the_training_writes_before_it_updates(
    training: Training,
) -> None:
    before = training.state()
    training.agent.path.unlink()
    assert training.begin(7)
    assert training.writing.ended.wait(DEADLINE_S)
    training.agent.make_file()
    training.update()
    training.snapshots.settle()
    assert training.file() == before and training.steps_told() == [7]


@pytest.mark.fault
def test_what_nobody_can_write_is_told_and_the_training_goes_on(training: Training) -> None:
    training.agent.path.unlink()
    training.go_through(7)
    told = training.unwritten()
    assert told.step == 7 and "No such file" in told.reason and not training.agent.told()
    training.agent.make_file()
    assert training.begin(8)
    training.snapshots.settle()
    assert training.file() == training.state(), "the next one is written"


@pytest.mark.fault
def test_memory_that_ends_in_the_proof_is_told_and_the_training_goes_on(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(rank_snapshots, "file_fingerprints", short)
    training.go_through(7)
    told = training.unwritten()
    assert told.step == 7 and "MemoryError" in told.reason


def test_what_the_agent_has_not_heard_of_the_thread_it_hears_of_the_training(
    training: Training,
) -> None:
    before, training.agent.refused = training.state(), 1
    training.go_through(7)
    first, second = training.agent.told()
    assert training.file() == before and first.fingerprints == second.fingerprints


def test_a_host_without_files_holds_up_no_update(training: Training) -> None:
    training.agent.has_files = False
    training.go_through(7)
    assert not training.agent.told()


@pytest.mark.fault
@pytest.mark.parametrize(("owner", "name"), [(threading.Thread, "start"), (torch, "empty_like")])
def test_where_there_is_no_room_for_a_thread_or_copies_the_snapshot_is_not_begun(
    training: Training, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        assert not training.begin(7)
    training.update()
    training.go_through(8)
    assert training.steps_told() == [8]


@pytest.mark.fault
def test_a_snapshot_is_given_up_when_workers_fail(training: Training) -> None:
    """What this worker holds may be written at once, into the same files."""
    with training.turn:
        assert training.begin(7)
        update = Beside(training.update)
        training.snapshots.give_up()
    assert not update.end().errors, "nobody waits for what is not written"
    training.snapshots.settle()
    assert not training.agent.told() and not any(training.file()[0])


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
    monkeypatch.setattr(rank_snapshots, "COPIED_BYTES", 8)
    assert "too large to be copied at once" in training.snapshots.obstacle()
