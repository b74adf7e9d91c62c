"""Snapshots of a CUDA device that is busy: beside the training, and in an emergency, while its
stream waits for a partner that died."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from scalai.core.messages.shared import JsonText
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Piece, row_major, whole
from scalai.runtime import emergency_writer as emergency
from scalai.runtime.emergency_writer import Between, EmergencyWriter, VolatileCopies
from scalai.runtime.live import Slot
from scalai.runtime.live_files import MappedFile, file_fingerprints, place_rows
from scalai.runtime.live_fingerprints import live_fingerprints
from scalai.runtime.rank_snapshots import AsyncSnapshots
from scalai.runtime.staging import rings_for
from support.answering_agent import FIRST_BYTE, AnsweringAgent

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NONE = JsonText.of(None)
WEIGHTS = 40_000_003
"""160 MB: more than all buffers of the ring."""
ACROSS = 64
"""So many bytes lie between the rows in the file at most."""


def between(step: int) -> Between:
    return Between(step, 3 * step, "dp0", lambda: (NONE, NONE))


def row(name: str, buffer: torch.Tensor, *, is_volatile: bool) -> tuple[Slot, Piece]:
    shape = tuple(buffer.shape)
    piece = Piece(whole(shape), 0, row_major(shape))
    return Slot(Tensor(name, shape, "F32"), buffer, (piece,), is_volatile=is_volatile), piece


def first_weights() -> torch.Tensor:
    """Return whole numbers that float32 has, and their successors."""
    return (torch.arange(WEIGHTS) % (1 << 20)).float()


def hang(seconds: float) -> None:
    """Have the current stream wait, as for a collective of which a partner is late or dead."""
    sleep: Callable[[int], None] = torch.cuda._sleep
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    sleep(10_000_000)
    end.record()
    end.synchronize()
    sleep(int(seconds * 1e3 / begin.elapsed_time(end) * 10_000_000))


class Training:
    """A rank that trains on the device: ``weights`` and ``turned`` are what an update changes,
    ``mean`` what a forward pass does. ``turned`` lies column by column: a kernel copies it."""

    def __init__(self, folder: Path) -> None:
        self.weights = first_weights().cuda()
        self.mean = torch.zeros(5, device="cuda")
        self.turned = torch.arange(6.0, device="cuda")
        by_columns = Piece(whole((2, 3)), 0, (1, 2))
        self.rows = [
            row("param/w", self.weights, is_volatile=False),
            row("buffer/mean", self.mean, is_volatile=True),
            (Slot(Tensor("param/t", (2, 3), "F32"), self.turned, (by_columns,)), by_columns),
        ]
        hang(0.001)  # its length is measured while nothing is queued
        self.rings = rings_for({self.weights.device})
        self.agent = AnsweringAgent(folder, self.rows)
        self.snapshots = AsyncSnapshots(
            self.agent.channel, 0, 1, str(self.agent.directory), self.rows, self.rings,
            threading.Lock(),
        )  # fmt: skip
        self.snapshots.begin_update()  # the update of the first step

    def file(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the file holds of both tensors."""
        content = torch.frombuffer(bytearray(self.agent.path.read_bytes()), dtype=torch.uint8)
        end = FIRST_BYTE + 4 * WEIGHTS
        begin = -(-end // ACROSS) * ACROSS
        return (
            content[FIRST_BYTE:end].view(torch.float32),
            content[begin : begin + 20].view(torch.float32),
        )


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path)
    yield made
    torch.cuda.synchronize()
    made.agent.close()


def test_what_is_written_is_the_state_of_its_step_though_device_and_training_go_on(
    training: Training,
) -> None:
    """The update of the step is still queued when the snapshot begins, and the next passes are
    queued behind it at once."""
    hang(0.3)
    training.weights += 1.0
    training.mean += 1.0
    assert training.snapshots.begin(between(7), None, time.monotonic())
    training.mean += 5.0
    training.snapshots.begin_update()
    training.weights += 100.0
    training.snapshots.settle()
    weights, mean = training.file()
    assert torch.equal(weights, first_weights() + 1.0)
    assert mean.tolist() == [1.0] * 5
    (told,) = training.agent.told()
    expected = [
        row("param/w", weights, is_volatile=False), row("buffer/mean", mean, is_volatile=True)
    ]  # fmt: skip
    assert list(told.fingerprints[:2]) == [int(each) for each in live_fingerprints(expected)]


def test_one_snapshot_after_another_is_of_its_own_step(training: Training) -> None:
    for step in range(1, 6):
        assert training.snapshots.begin(between(step), None, time.monotonic())
        training.mean += 1.0
        training.snapshots.begin_update()
        training.weights += 1.0
        training.snapshots.settle()
        weights, mean = training.file()
        assert weights[:3].tolist() == [step - 1.0, step, step + 1.0]
        assert mean.tolist() == [step - 1.0] * 5
    assert len(training.agent.told()) == 5


@pytest.mark.fault
def test_an_emergency_is_written_while_the_device_waits_for_a_partner(training: Training) -> None:
    """What hangs is queued on the stream of the training, and other work behind it; nothing of it
    is waited for, and nothing of it reaches what is written."""
    copies = VolatileCopies(training.rows)
    training.weights += 1.0
    copies.take()
    assert copies.are_taken(5.0)
    hung_s = 4.0
    hang(hung_s)
    training.mean += 5.0
    began = time.monotonic()
    order = training.agent._order
    mapped = MappedFile(order)

    def write() -> None:
        with copies.beside(training.rings):
            place_rows(copies.rows, order, training.rings, mapped)
        found.extend(file_fingerprints(copies.rows, order, mapped))

    found: list[int] = []
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(hung_s / 2)
    assert not thread.is_alive() and time.monotonic() - began < hung_s / 2
    assert not torch.cuda.current_stream().query(), "the stream of the training still hangs"
    weights, mean = training.file()
    assert torch.equal(weights, first_weights() + 1.0) and mean.tolist() == [0.0] * 5
    torch.cuda.synchronize()
    training.mean -= 5.0
    assert found == [int(each) for each in live_fingerprints(training.rows)]


@pytest.mark.fault
def test_an_update_that_the_device_has_not_made_is_not_believed(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the training has gone through the update; its device waits in the collective
    before it."""
    monkeypatch.setattr(emergency, "FREEZE_S", 0.3)
    watched = EmergencyWriter(0, 1, "nowhere", training.rows, training.rings)
    hang(2.0)
    watched.begin_update()
    training.weights += 1.0
    watched.step_ended(lambda: None, lambda: between(8))
    assert watched.freeze() == "its device is in the middle of an update"
    torch.cuda.synchronize()
    assert watched.freeze() == between(8)
