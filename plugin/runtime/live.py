"""Live state of one rank, from a framework's adapter: slots over the framework's own memory.

The rows of a rank are its slots' pieces in order: (slot, piece) of the held or of the wanted slots.
``Registered`` are values beside model and optimizer: a tensor that exists at ``attach`` is a slot;
a later one, or one of another shape by then, goes with the scalars.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from scalai.core.errors import LayoutError, RefusedError
from scalai.core.jsonable import Json
from scalai.core.messages.shared import JsonText
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.dtypes import BITS, ITEM_BYTES, TORCH_NAMES, Bits
from scalai.core.tensors.region import Piece, row_major, whole

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    # Older releases of torch lack some unsigned integers.
    name: getattr(torch, torch_name)
    for name, torch_name in TORCH_NAMES.items()
    if hasattr(torch, torch_name)
}
"""Torch's dtypes by the names of the safetensors format."""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

INTEGERS: Mapping[int, torch.dtype] = {
    1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64,
}  # fmt: skip
"""Integer type by bytes of an element."""

_LATE = "scalai_tensor"
"""Key in JSON of a tensor without a slot."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype. ``RefusedError`` if the format has none."""
    if dtype not in _NAMES:
        raise RefusedError(f"tensors of {dtype} cannot be kept; known are {list(_NAMES)}.")
    return _NAMES[dtype]


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """Live memory of this rank, part of a global tensor.

    ``buffer`` [elements] is a flat, detached view of the framework's own memory, of the tensor's
    dtype; ``pieces`` are the boxes of ``tensor`` in it. ``is_held``: this rank vouches for these
    elements, they may be written. ``is_wanted``: a restore must fill them. Stale copies are wanted,
    not held; a range of a parameter wanted whole elsewhere is held, not wanted. ``is_volatile``: it
    may change between two updates, as a buffer does in a forward pass.
    """

    tensor: Tensor
    buffer: torch.Tensor
    pieces: tuple[Piece, ...]
    is_held: bool = True
    is_wanted: bool = True
    is_volatile: bool = False


def whole_slot(name: str, value: torch.Tensor, *, is_volatile: bool) -> Slot:
    """Return the slot of a contiguous tensor held whole by this rank."""
    shape = tuple(value.shape)
    tensor = Tensor(name, shape, dtype_name(value.dtype))
    piece = Piece(whole(shape), 0, row_major(shape))
    return Slot(tensor, value.detach().view(-1), (piece,), is_volatile=is_volatile)


class LiveState(Protocol):
    """The training state of one rank of a live job. Nothing here communicates with other ranks."""

    @property
    def coordinate(self) -> str:
        """Position of this rank on the parallel axes, such as ``tp0-pp1-dp0``: the key of its
        ``rank_state``.
        """

    def slots(self) -> Sequence[Slot]:
        """List all tensors of this rank.

        Called once, after the model and the optimizer are built; the buffers stay valid and in
        place until the process ends.
        """

    def scalars(self) -> Mapping[str, Json]:
        """Return values other than tensors, equal on all ranks with them (schedule, loss scale,
        parameter groups).

        Nested mappings of all ranks are united; of differing values the lowest rank's stays.
        """

    def load_scalars(self, scalars: Mapping[str, Json]) -> None:
        """Put back the union of all ranks' ``scalars()``."""

    def rank_state(self) -> Json:
        """Return this rank's own values (random number generators)."""

    # Optional, ``announces_updates``: True if nothing changes tensors that are not volatile but a
    # step of torch's optimizers, or what follows ``Session.begin_update``. A restore is then proven
    # beside the first passes.

    # Optional, ``keep()``: returns a function that writes down ``scalars`` and ``rank_state`` as
    # they are now. It is called after each step, the function only where they are needed, by any
    # thread.

    def load_rank_state(self, state: Json | None, step: int) -> str:
        """Put back this coordinate's state; None (the degrees changed): derive a new one from
        ``step``.

        Returns a log line about the choice.
        """


Later = Callable[[], tuple[Mapping[str, Json], Json]]


def keep(state: LiveState) -> Later:
    """Return a function that writes down ``scalars`` and ``rank_state`` as they are now."""
    own: Callable[[], Later] | None = getattr(state, "keep", None)
    if own is not None:
        return own()
    # They may lead to what the next step changes.
    scalars, rank_state = JsonText.of(dict(state.scalars())), JsonText.of(state.rank_state())
    return lambda: (scalars.value(), rank_state.value())


def held_rows(slots: Sequence[Slot]) -> list[tuple[Slot, Piece]]:
    """List this rank's held pieces."""
    return [(slot, piece) for slot in slots if slot.is_held for piece in slot.pieces]


def wanted_rows(slots: Sequence[Slot]) -> list[tuple[Slot, Piece]]:
    """List the pieces to be filled by a restore."""
    return [(slot, piece) for slot in slots if slot.is_wanted for piece in slot.pieces]


def collection_of(rows: Sequence[tuple[Slot, Piece]]) -> Collection:
    """Return rows as a collection, for another process."""
    return Collection.of((slot.tensor, piece.box) for slot, piece in rows)


def piece_view(slot: Slot, piece: Piece) -> torch.Tensor:
    """Return the bits of a piece in the live memory, as signed integers [box.shape], no copy.

    Raises:
        LayoutError: The piece does not lie inside the slot's buffer, or the dtypes differ in width.
    """
    item, buffer = ITEM_BYTES[slot.tensor.dtype], slot.buffer
    if buffer.dim() != 1 or buffer.element_size() != item or not buffer.is_contiguous():
        raise LayoutError(
            f"the buffer of {slot.tensor.name!r} is {buffer.dtype}{list(buffer.shape)} with "
            f"strides {buffer.stride()}; expected a flat contiguous one of {item}-byte elements. "
            "This is a slip of the framework's adapter."
        )
    shape = piece.box.shape
    last = piece.start + sum(
        (size - 1) * stride for size, stride in zip(shape, piece.stride, strict=True)
    )
    if piece.box.numel and not 0 <= piece.start <= last < buffer.numel():
        raise LayoutError(
            f"a piece of {slot.tensor.name!r} ends at element {last} of a buffer of "
            f"{buffer.numel()}. This is a slip of the framework's adapter."
        )
    flat = buffer.view(INTEGERS[item])
    return flat.as_strided(shape, piece.stride, flat.storage_offset() + piece.start)


def host_bits(view: torch.Tensor) -> Bits:
    """Return a view of host memory as unsigned integers for numpy, no copy."""
    bits: Bits = view.numpy().view(np.dtype(BITS[view.element_size()]))
    return bits


Get = Callable[[], Json | torch.Tensor]
Set = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class _RegisteredValue:
    name: str
    get: Get
    set: Set


class Registered:
    """Registered values of one process. Tensors are whole, and equal on all ranks."""

    def __init__(self) -> None:
        self._entries: list[_RegisteredValue] = []
        self._slots: Mapping[str, Slot] = {}
        self._is_listed = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self._entries)

    def add(self, name: str, get: Get, set: Set) -> None:
        self._entries.append(_RegisteredValue(name, get, set))

    def slots(self) -> Sequence[Slot]:
        """List the present tensors. Later calls return the same list."""
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
        """Copy the present values into the slots: a getter may return a new tensor each time."""
        for entry in self._entries:
            value = entry.get() if entry.name in self._slots else None
            if isinstance(value, torch.Tensor) and self._has_room(entry.name, value):
                self._slots[entry.name].buffer.copy_(value.detach().reshape(-1))

    def values(self) -> Mapping[str, Json]:
        """Return the values outside of slots as JSON."""
        values = [(entry.name, entry.get()) for entry in self._entries]
        return {
            name: _plain(value) if isinstance(value, torch.Tensor) else value
            for name, value in values
            if not (isinstance(value, torch.Tensor) and self._has_room(name, value))
        }

    def put(self, values: Mapping[str, Any]) -> None:
        """Give back ``values``, and tensors restored into the slots."""
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
