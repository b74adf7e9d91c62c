"""What a script keeps beside model and optimizer and registers: JSON, or tensors.

A tensor that is there when the job is attached is part of the state, as a slot. One that comes
later, as a best value that is None at first, or has another shape by then, goes with the scalars.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from scalai.core.jsonable import Json
from scalai.runtime.live import Slot, whole_slot

Get = Callable[[], Json | torch.Tensor]
Set = Callable[[Any], None]

_LATE = "scalai_tensor"
"""The key under which JSON holds a tensor that has no slot."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    get: Get
    set: Set


class Registered:
    """What one process has registered. Tensors are whole, and equal on all ranks."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._slots: Mapping[str, Slot] = {}
        self._is_listed = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self._entries)

    def add(self, name: str, get: Get, set: Set) -> None:
        self._entries.append(_Entry(name, get, set))

    def slots(self) -> Sequence[Slot]:
        """List the tensors that are there now. Later calls return the same list."""
        if not self._is_listed:
            self._is_listed = True
            values = {entry.name: entry.get() for entry in self._entries}
            self._slots = {
                name: whole_slot(f"user/{name}", value.contiguous(), is_volatile=True)
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            }
        return list(self._slots.values())

    def refresh(self) -> None:
        """Have the slots hold the present values: a getter may return a new tensor each time."""
        for entry in self._entries:
            value = entry.get()
            if isinstance(value, torch.Tensor) and self._has_room(entry.name, value):
                self._slots[entry.name].buffer.copy_(value.detach().reshape(-1))

    def values(self) -> Mapping[str, Json]:
        """Return as JSON what the slots do not hold."""
        values = [(entry.name, entry.get()) for entry in self._entries]
        return {
            name: _plain(value) if isinstance(value, torch.Tensor) else value
            for name, value in values
            if not (isinstance(value, torch.Tensor) and self._has_room(name, value))
        }

    def put(self, values: Mapping[str, Any]) -> None:
        """Give back what ``values`` returned, and what was restored into the slots."""
        for entry in self._entries:
            if entry.name in values:
                entry.set(_live(values[entry.name]))
            elif entry.name in self._slots:
                slot = self._slots[entry.name]
                entry.set(slot.buffer.view(slot.tensor.shape))

    def _has_room(self, name: str, value: torch.Tensor) -> bool:
        slot = self._slots.get(name)
        return (
            slot is not None
            and tuple(value.shape) == slot.tensor.shape
            and value.dtype == slot.buffer.dtype
        )


def _plain(value: torch.Tensor) -> Json:
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {_LATE: base64.b64encode(data).decode(), "shape": list(value.shape), "dtype": dtype}


def _live(value: Any) -> Any:
    if not isinstance(value, Mapping) or _LATE not in value:
        return value
    dtype = getattr(torch, value["dtype"])
    data = bytearray(base64.b64decode(value[_LATE]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(value["shape"])
