"""Columns and what describes them as bytes: numpy's format, without pickles."""

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.jsonable import Json
from scalai.core.tensors.collection import Collection, Tensor

Column = npt.NDArray[Any]

_BOXES = ("tensor", "offset", "shape")


def packed(collection: Collection, head: Json, columns: Mapping[str, Column]) -> bytes:
    """Return what ``unpacked`` reads."""
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
