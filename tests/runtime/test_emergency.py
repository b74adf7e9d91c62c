"""The worker's side of an emergency: when its memory is the state of a step, what of it is kept
apart because the next forward pass changes it, and collectives that fail. What torch says of its
groups is stood in for: NCCL needs devices (tests/cuda/test_cuda_partners.py)."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scalai.core.job.endings import PEER_GONE, kind_of
from scalai.core.messages.shared import JsonText
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.region import Piece, row_major, whole
from scalai.runtime import emergency_writer as emergency
from scalai.runtime.emergency_writer import (
    WINDOW,
    WINDOWS,
    Between,
    CopyCost,
    EmergencyWriter,
    Gate,
    VolatileCopies,
)
from scalai.runtime.live import Slot
from support.steps import DEADLINE_S, Beside, SeenLock

NONE = JsonText.of(None)


def nothing() -> tuple[JsonText, JsonText]:
    return NONE, NONE


def between(step: int) -> Between:
    return Between(step, 3 * step, "dp0", nothing)


def slot(name: str, values: torch.Tensor, *, is_volatile: bool) -> tuple[Slot, Piece]:
    shape = tuple(values.shape)
    piece = Piece(whole(shape), 0, row_major(shape))
    made = Slot(Tensor(name, shape, "F32"), values.view(-1), (piece,), is_volatile=is_volatile)
    return made, piece


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Give a gate behind one update, whose state is that of step 4; who waits at it is seen."""
    with monkeypatch.context() as patch:
        patch.setattr(threading, "RLock", SeenLock)
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


@pytest.mark.parametrize("begin", [Gate.begin, Gate.ends], ids=["update", "copy"])
def test_an_update_or_a_copy_that_ends_soon_is_waited_for(gate: Gate, begin: Any) -> None:
    begin(gate)
    freezing = Beside(gate.freeze).until_it_stands()
    gate.ended(between(5))
    assert freezing.end().result == [between(5)]


def test_once_frozen_no_update_begins(gate: Gate) -> None:
    gate.freeze()
    assert not Beside(gate.begin).until_it_stands().result


def test_once_frozen_no_step_ends_that_made_no_update(gate: Gate) -> None:
    """As where a gradient is no number: what is copied at its end is of a later step."""
    assert gate.freeze() == between(4)
    assert not Beside(gate.ends).until_it_stands().result


def test_who_shows_no_update_is_not_believed() -> None:
    gate = Gate()
    gate.ended(between(4))
    assert "no update was seen" in str(gate.freeze())


def writer(*rows: tuple[Slot, Piece]) -> EmergencyWriter:
    return EmergencyWriter(0, 1, "nowhere", rows, {})


def test_a_script_whose_state_cannot_be_copied_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    watched = writer()

    def broken() -> Between:
        raise KeyError("the script's own")

    watched.step_ended(lambda: None, broken)
    assert not watched.is_on and "KeyError" in caplog.text


def test_any_optimizer_of_torchs_begins_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(Gate, "begin", lambda self, *_: begun.append(self))
    writer().begin()
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
    watched, update = writer(), Update(ends)
    watched.begin_update()
    watched.step_ended(lambda: None, lambda: between(8))
    watched.copies.events[torch.device("cuda")] = update  # type: ignore[assignment]
    assert watched.freeze() == found and update.asked


def test_too_much_to_copy_means_no_emergency_snapshot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(emergency, "COPIED_BYTES", 8)
    watched = writer(slot("user/x", torch.zeros(4), is_volatile=True))
    assert not watched.is_on and "event=no_emergency" in caplog.text
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("it watches"))
    watched.begin()


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


# ------------------------------------------------------------------ collectives


class Group:
    """A process group; ``error``: of its backend for devices. None: it is no NCCL's; empty: it is
    being taken down."""

    def __init__(self, error: str | None = None, *, has_device: bool = True) -> None:
        self.has_device = has_device
        self.backend: Any = object()
        if error is not None:
            self.backend = SimpleNamespace(get_error=lambda: self._said(error))

    @staticmethod
    def _said(error: str) -> Any:
        if not error:
            raise RuntimeError("it is being taken down")
        return SimpleNamespace(name=error)

    def _get_backend(self, device: torch.device) -> Any:
        if not self.has_device:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[Group, object]:
    """Give the groups that torch has: of gloo, of NCCL and one that is taken down."""
    made = dict.fromkeys([Group(has_device=False), Group(), Group(""), Group("SUCCESS")])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=made))
    monkeypatch.setattr(emergency, "POLL_S", 0.01)
    return made


@pytest.mark.fault
@pytest.mark.parametrize("error", ["COMM_ERROR", "TIMEOUT", "REMOTE_ERROR"])
def test_a_collective_that_fails_is_told_of_once(groups: dict[Group, object], error: str) -> None:
    told, has_told, looks = list[str](), threading.Event(), threading.Semaphore(0)

    def tell(reason: str) -> None:
        told.append(reason)
        has_told.set()

    def is_wanted() -> bool:
        looks.release()
        return True

    assert emergency.collective_failure() == ""
    emergency.watch_collectives(is_wanted, tell)
    for _ in range(2):
        assert looks.acquire(timeout=DEADLINE_S)
    assert not told, "nothing has failed at the first look"
    groups[Group(error)] = None
    assert has_told.wait(DEADLINE_S)
    for thread in [each for each in threading.enumerate() if each.name == "collectives"]:
        thread.join(DEADLINE_S)
    assert told == [f"a collective of NCCL's has failed ({error})"]
    assert kind_of(f"rank 1: {told[0]}") == PEER_GONE


@pytest.mark.fault
def test_who_leaves_its_round_tells_of_nothing_nor_who_has_no_groups_or_thread(
    groups: dict[Group, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups[Group("COMM_ERROR")] = None
    told = list[str]()
    emergency.watch_collectives(lambda: False, told.append)
    for thread in [each for each in threading.enumerate() if each.name == "collectives"]:
        thread.join(DEADLINE_S)
    assert told == []

    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    emergency.watch_collectives(lambda: True, told.append)
    monkeypatch.undo()
    assert emergency.collective_failure() == "" and told == []


@pytest.mark.fault
def test_torch_tells_of_errors_by_this_name() -> None:
    """It is looked for by name."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    assert hasattr(torch._C._distributed_c10d.ProcessGroupNCCL, "get_error")
    assert "SUCCESS" in torch._C._distributed_c10d.ErrorType.__members__
