"""Agreement between the ranks of a job on one outcome: a refusal of one is a refusal of all.

Bytes and JSON go between ranks, columns in numpy's format, no pickles. Every method is a collective
of all ranks.
"""

import io
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from scalai.core.errors import (
    LayoutError,
    PeerError,
    ProofError,
    RefusedError,
    ScalaiError,
    StoreError,
    UsageError,
)
from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Collection, Tensor

Column = npt.NDArray[Any]

_BOXES = ("tensor", "offset", "shape")


def packed(collection: Collection, head: Json, columns: Mapping[str, Column]) -> bytes:
    stream = io.BytesIO()
    tensors = [[tensor.name, list(tensor.shape), tensor.dtype] for tensor in collection.tensors]
    arrays: dict[str, Any] = {
        **{f"row_{name}": column for name, column in columns.items()},
        "head": np.frombuffer(json.dumps([tensors, head]).encode(), dtype=np.uint8),
        **{name: getattr(collection, name) for name in _BOXES},
    }
    np.savez(stream, **arrays)
    return stream.getvalue()


def unpacked(data: bytes) -> tuple[Collection, Json, dict[str, Column]]:
    """Return the collection, the head and the further columns."""
    arrays = np.load(io.BytesIO(data), allow_pickle=False)
    tensors, head = json.loads(arrays["head"].tobytes())
    collection = Collection(
        tuple(Tensor(name, tuple(shape), dtype) for name, shape, dtype in tensors),
        *(arrays[name] for name in _BOXES),
    )
    rows = (name for name in arrays.files if name.startswith("row_"))
    return collection, head, {name.removeprefix("row_"): arrays[name] for name in rows}


Result = TypeVar("Result")

_KINDS = {
    kind.__name__: kind for kind in (LayoutError, ProofError, RefusedError, StoreError, UsageError)
}
"""Errors with the same class on the other ranks."""


class EngineRanks:
    """All ranks of a job.

    Args:
        device: Device of the default group's tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def together(self, step: Callable[[], Result]) -> Result:
        """Return ``step()`` of this rank, once it has ended on all.

        Raises:
            ScalaiError: Some rank failed: its own error there, the same kind with the rank's number
                on the others.
        """
        result: Result | None = None
        own: Exception | None = None
        try:
            result = step()
        except Exception as error:  # of whatever kind: the others would wait forever
            own = error
        texts = self._gather(b"" if own is None else _described(own), everywhere=True)
        failed = [(rank, json.loads(text)) for rank, text in enumerate(texts) if text]
        if own is not None:
            raise own
        if failed:
            rank, (kind, text) = failed[0]
            raise _KINDS.get(kind, PeerError)(f"rank {rank}: {text}")
        return result  # type: ignore[return-value]

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """Return rank 0's ``make()`` on all ranks. Raises as ``together``."""
        made = self.together(lambda: make() if self.rank == 0 else b"")
        size = torch.tensor([len(made)], device=self._device)
        dist.broadcast(size, src=0)
        data = self._tensor(made, int(size.item()))
        dist.broadcast(data, src=0)
        return data.cpu().numpy().tobytes()

    def to_first(self, payload: bytes) -> list[bytes]:
        """Return each rank's payload, by rank, on rank 0; nothing on others."""
        return self._gather(payload, everywhere=False)

    def any_of(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return the union of all ranks' masks of one length."""
        found = torch.from_numpy(mask.astype(np.uint8)).to(self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return np.asarray(found.cpu().numpy() != 0)

    def _gather(self, payload: bytes, *, everywhere: bool) -> list[bytes]:
        own = torch.tensor([len(payload)], device=self._device)
        sizes = [torch.zeros_like(own) for _ in range(self.world_size)]
        dist.all_gather(sizes, own)
        most = max(int(size.item()) for size in sizes)
        if not most:
            return [b""] * self.world_size
        data = self._tensor(payload, most)
        is_told = everywhere or self.rank == 0
        parts = [torch.empty_like(data) for _ in range(self.world_size)] if is_told else None
        if everywhere:
            dist.all_gather(parts, data)
        else:
            dist.gather(data, parts)
        pairs = zip(parts or (), sizes, strict=False)
        return [part[: int(size.item())].cpu().numpy().tobytes() for part, size in pairs]

    def _tensor(self, payload: bytes, size: int) -> torch.Tensor:
        padded = np.zeros(size, dtype=np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        return torch.from_numpy(padded).to(self._device)


def ranks_of(engine: Any) -> EngineRanks:
    is_host = dist.get_backend() == "gloo"
    return EngineRanks(torch.device("cpu") if is_host else torch.device(engine.device))


def _described(error: Exception) -> bytes:
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS), "")
    text = str(error) if isinstance(error, ScalaiError) else f"{type(error).__name__}: {error}"
    return json.dumps([kind, text]).encode()
