"""The worker's side of an emergency: when its memory is the state of a step, and what of it is kept
apart because the next forward pass changes it."""

import threading
from typing import Any

import pytest
import torch

from scalai.core.messages.shared import JsonText
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Piece, row_major, whole
from scalai.runtime import emergency
from scalai.runtime.emergency import (
    WINDOW,
    WINDOWS,
    Between,
    CopyCost,
    EmergencyWriter,
    Gate,
    VolatileCopies,
)
from scalai.runtime.live import Slot

NONE = JsonText.of(None)


def between(step: int) -> Between:
    return Between(step, 3 * step, "dp0", NONE, NONE)


def slot(name: str, values: torch.Tensor, *, is_volatile: bool) -> tuple[Slot, Piece]:
    shape = tuple(values.shape)
    piece = Piece(whole(shape), 0, row_major(shape))
    made = Slot(Tensor(name, shape, "F32"), values.view(-1), (piece,), is_volatile=is_volatile)
    return made, piece


@pytest.fixture
def gate() -> Gate:
    """Give a gate behind one update, whose state is that of step 4."""
    made = Gate()
    made.begin()
    made.ended(between(4))
    return made


def test_between_two_updates_the_memory_is_the_state_of_the_last_one(gate: Gate) -> None:
    assert gate.freeze() == between(4)


def test_in_the_middle_of_an_update_it_is_of_no_step(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emergency, "FREEZE_S", 0.1)
    gate.begin()
    assert gate.freeze() == "it is in the middle of an update"


def test_an_update_that_ends_soon_is_waited_for(gate: Gate) -> None:
    gate.begin()
    ends = threading.Timer(0.05, lambda: gate.ended(between(5)))
    ends.start()
    assert gate.freeze() == between(5)


def test_once_frozen_no_update_begins(gate: Gate) -> None:
    gate.freeze()
    thread = threading.Thread(target=gate.begin, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()


def test_once_frozen_no_step_ends_that_made_no_update(gate: Gate) -> None:
    """As where a gradient is no number: what is copied at its end is of a later step."""
    assert gate.freeze() == between(4)
    thread = threading.Thread(target=gate.ends, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()


def test_what_is_being_copied_is_waited_for(gate: Gate) -> None:
    gate.ends()
    threading.Timer(0.05, lambda: gate.ended(between(5))).start()
    assert gate.freeze() == between(5)


def test_a_script_whose_state_cannot_be_copied_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    watched = EmergencyWriter(0, 1, "nowhere", [], {})

    def broken() -> Between:
        raise KeyError("the script's own")

    watched.step_ended(lambda: None, broken)
    assert not watched.is_on and "KeyError" in caplog.text


def test_who_shows_no_update_is_not_believed() -> None:
    gate = Gate()
    gate.ended(between(4))
    assert "no update was seen" in str(gate.freeze())


def test_any_optimizer_of_torchs_begins_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(Gate, "begin", lambda self, *_: begun.append(self))
    EmergencyWriter(0, 1, "nowhere", [], {}).begin()
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=0.1).step()
    assert begun, "the update was not noticed"


def test_what_a_forward_pass_changes_is_kept_as_it_was() -> None:
    weights, running = torch.ones(2, 3), torch.zeros(4)
    rows = [
        slot("param/w", weights, is_volatile=False), slot("param/mean", running, is_volatile=True),
    ]  # fmt: skip
    copies = VolatileCopies(rows)
    assert copies.size_bytes == running.nbytes
    copies.take()
    running.fill_(7.0)
    kept = [found.buffer.tolist() for found, _ in copies.rows]
    assert kept == [[1.0] * 6, [0.0] * 4]
    assert copies.rows[0][0].buffer.data_ptr() == weights.data_ptr(), "weights are not copied"


class Update:
    """What a device says of the end of an update: that it has come at the third question, never, or
    that the device has failed."""

    def __init__(self, ends: bool | None) -> None:
        self.ends, self.asked = ends, 0

    def query(self) -> bool:
        self.asked += 1
        if self.ends is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.ends and self.asked > 2


@pytest.mark.fault
@pytest.mark.parametrize(
    ("ends", "found"),
    [
        (True, between(8)),
        (False, "its device is in the middle of an update"),
        (None, "its device fails: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_the_memory_of_a_device_is_believed_once_it_has_made_the_update(
    ends: bool | None, found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the training is ahead of it."""
    monkeypatch.setattr(emergency, "FREEZE_S", 0.2)
    watched, update = EmergencyWriter(0, 1, "nowhere", [], {}), Update(ends)
    watched.begin_update()
    watched.step_ended(lambda: None, lambda: between(8))
    monkeypatch.setattr(watched._copies, "_events", {torch.device("cuda"): update})
    assert watched.freeze() == found and update.asked


def test_too_much_to_copy_means_no_emergency_snapshot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(emergency, "COPIED_BYTES", 8)
    watched = EmergencyWriter(
        0, 1, "nowhere", [slot("user/x", torch.zeros(4), is_volatile=True)], {}
    )
    assert not watched.is_on and "event=no_emergency" in caplog.text
    threads = threading.active_count()
    watched.begin()
    assert threading.active_count() == threads


def test_copies_that_slow_the_training_down_are_given_up() -> None:
    cost, now, found = CopyCost(), 0.0, []
    for _ in range(1 + 4 * WINDOW):
        now += 0.5
        found.append(cost.is_too_high(0.03, now))
    first = next(number for number, text in enumerate(found) if text)
    assert first == WINDOWS * WINDOW and "30 ms, 6% of its time" in found[first]


@pytest.mark.parametrize(("copied_s", "step_s"), [(0.005, 0.02), (0.03, 3.0)])
def test_copies_that_are_short_beside_a_step_go_on(copied_s: float, step_s: float) -> None:
    cost = CopyCost()
    assert not any(cost.is_too_high(copied_s, step_s * number) for number in range(9 * WINDOW))
