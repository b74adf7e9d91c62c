"""What scripts register comes back as it was, also where it was no tensor when the job began."""

import json
from typing import Any

import pytest
import torch

from scalai.runtime.live import Registered


class Script:
    """Keeps one value, as a script of one round does."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.registered = Registered()
        self.registered.add("kept", lambda: self.value, self.set)

    def set(self, value: Any) -> None:
        self.value = value


def carry(before: Script, then: Script) -> None:
    """Snapshot and restore: buffers of slots as they lie, the rest as JSON."""
    before.registered.refresh()
    slots, buffers = before.registered.slots(), then.registered.slots()
    values = json.loads(json.dumps(before.registered.values()))
    for slot, buffer in zip(slots, buffers, strict=True):
        buffer.buffer.copy_(slot.buffer)
    then.registered.put(values)


TENSORS = {
    "float": torch.tensor([[1.5, -0.0, float("nan")]]),
    "bfloat16": torch.ones(3, 2, dtype=torch.bfloat16),
    "number": torch.tensor(7),
    "bool": torch.tensor([True, False]),
    "empty": torch.empty(0, 4),
    "strided": torch.arange(6.0).view(2, 3).t(),
}


@pytest.mark.parametrize("first", ["none", "other shape", "other dtype", "same"])
@pytest.mark.parametrize("value", list(TENSORS.values()), ids=list(TENSORS))
def test_a_tensor_goes_on_whatever_was_there_at_the_start(first: str, value: torch.Tensor) -> None:
    """A best value that was None, a queue that has grown, sums that became wider."""
    begins: dict[str, Any] = {
        "none": None, "other shape": torch.zeros(9, dtype=value.dtype),
        "other dtype": torch.zeros(value.shape, dtype=torch.int16),
        "same": torch.zeros(value.shape, dtype=value.dtype),
    }  # fmt: skip
    before, then = (Script(None if first == "none" else begins[first].clone()) for _ in range(2))
    for script in (before, then):
        assert bool(script.registered.slots()) == (first != "none")
    before.value = value
    carry(before, then)
    assert then.value.dtype == value.dtype and then.value.shape == value.shape
    assert torch.equal(then.value.nan_to_num(5), value.nan_to_num(5))


def test_a_tensor_that_is_given_up_is_given_up_in_the_next_round() -> None:
    before, then = Script(torch.ones(2)), Script(torch.ones(2))
    assert len(before.registered.slots()) == len(then.registered.slots()) == 1
    before.value = None
    carry(before, then)
    assert then.value is None


def test_a_large_tensor_lies_in_its_slot_and_not_in_the_scalars() -> None:
    before, then = Script(torch.zeros(4)), Script(torch.zeros(4))
    assert before.registered.slots() and then.registered.slots()
    before.value = torch.arange(4.0)  # another one than at the start
    assert before.registered.values() == {}
    carry(before, then)
    assert then.value.tolist() == [0.0, 1.0, 2.0, 3.0]
