"""Columns and what describes them as bytes: numpy's format, without pickles."""

import io
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.collection import Collection, Tensor
from scalai.runtime.live import Json

Column = npt.NDArray[Any]


def packed(collection: Collection, head: Json, **columns: Column) -> bytes:
    """Return what ``unpacked`` reads."""
    stream = io.BytesIO()
    tensors = [[tensor.name, list(tensor.shape), tensor.dtype] for tensor in collection.tensors]
    np.savez(
        stream,
        head=np.frombuffer(json.dumps([tensors, head]).encode(), dtype=np.uint8),
        tensor=collection.tensor,
        offset=collection.offset,
        shape=collection.shape,
        **columns,
    )
    return stream.getvalue()


def unpacked(data: bytes) -> tuple[Collection, Json, dict[str, Column]]:
    """Return the collection, the head and the further columns."""
    columns = dict(np.load(io.BytesIO(data), allow_pickle=False))
    tensors, head = json.loads(columns.pop("head").tobytes())
    collection = Collection(
        tuple(Tensor(name, tuple(shape), dtype) for name, shape, dtype in tensors),
        *(columns.pop(name) for name in ("tensor", "offset", "shape")),
    )
    return collection, head, columns
