"""Live memory: one name and width of each dtype everywhere, registered values that come back as
they were, and copies by several threads."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from scalai.core.errors import RefusedError
from scalai.core.tensors.dtypes import FROM_STORAGE, ITEM_BYTES, NUMPY_DTYPES
from scalai.runtime import staging
from scalai.runtime.live import TORCH_DTYPES, Registered, dtype_name, keep
from scalai.runtime.staging import MOST_COPIERS, copiers, move
from scalai.store.files import number_of


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_a_dtype_is_as_wide_in_torch_and_numpy_and_named_as_safetensors_names_it(name: str) -> None:
    dtype = TORCH_DTYPES[name]
    assert dtype.itemsize == ITEM_BYTES[name] and dtype_name(dtype) == name
    assert f'"dtype":"{name}"'.encode() in save({"w": torch.zeros(2, dtype=dtype)})
    if name in NUMPY_DTYPES:
        assert np.dtype(NUMPY_DTYPES[name]).itemsize == ITEM_BYTES[name]
    content = torch.tensor([1, 0]).to(dtype).view(torch.uint8).numpy().tobytes()
    assert number_of(content, name) == 1, "the first element of bytes"


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_storages_are_named_as_torch_names_them() -> None:
    for storage, name in FROM_STORAGE.items():
        assert getattr(torch, storage)().dtype == TORCH_DTYPES[name]


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"torch\.complex64 cannot be kept; known are"):
        dtype_name(torch.complex64)


# ------------------------------------------------------------------ what scripts register


class Script:
    """Keeps one value, as a script of one round does."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.registered = Registered()
        self.registered.add("kept", lambda: self.value, self.set)
        self.has_slot = bool(self.registered.slots())

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
    """A best value that was None, a queue that has grown, sums that became wider. A large one lies
    in its slot and not among the scalars."""
    begins: dict[str, Any] = {
        "none": None, "other shape": torch.zeros(9, dtype=value.dtype),
        "other dtype": torch.zeros(value.shape, dtype=torch.int16),
        "same": torch.zeros(value.shape, dtype=value.dtype),
    }  # fmt: skip
    before, then = (Script(None if first == "none" else begins[first].clone()) for _ in range(2))
    assert before.has_slot == then.has_slot == (first != "none")
    before.value = value
    assert (before.registered.values() == {}) == (first == "same")
    carry(before, then)
    assert then.value.dtype == value.dtype and then.value.shape == value.shape
    assert torch.equal(then.value.nan_to_num(5), value.nan_to_num(5))


def test_a_tensor_that_is_given_up_is_given_up_in_the_next_round() -> None:
    before, then = Script(torch.ones(2)), Script(torch.ones(2))
    before.value = None
    carry(before, then)
    assert then.value is None


# ------------------------------------------------------------------ copies by several threads

SHAPES = [(), (1,), (3,), (1000,), (7, 1000), (1, 5000), (5000, 1), (3, 40, 50)]


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_memory_of_any_shape_and_stride_is_copied_whole(
    shape: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SHARED_BYTES", 64)
    source = torch.randint(-1000, 1000, tuple(2 * n for n in shape), dtype=torch.int16)
    source = source[tuple(slice(None, None, 2) for _ in shape)]
    target = torch.zeros(shape, dtype=torch.int16)
    move(target, source, threads)
    assert torch.equal(target, source)


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    found = []
    for ranks in (1, 4, 8, 32):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        found.append(copiers())
    assert found == [MOST_COPIERS, 4, 2, 1]


def test_values_kept_for_an_emergency_do_not_change_with_the_next_step() -> None:
    values = {"lr": [0.1]}
    state: Any = SimpleNamespace(scalars=lambda: values, rank_state=lambda: values["lr"])
    kept = keep(state)
    values["lr"][0] = 0.2
    assert kept() == ({"lr": [0.1]}, [0.1])
