"""The dtypes of tensors, and their names elsewhere.

Collections, manifests and plans use the names of the safetensors format, such as ``BF16``. Torch's
objects are in ``runtime/live.py``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

# Name, bytes of one element, type in numpy if any, name in the module torch, name of torch's class
# of storages if any.
_TABLE: tuple[tuple[str, int, Any, str, str | None], ...] = (
    ("BOOL", 1, np.bool_, "bool", "BoolStorage"),
    ("U8", 1, np.uint8, "uint8", "ByteStorage"),
    ("I8", 1, np.int8, "int8", "CharStorage"),
    ("F8_E4M3", 1, None, "float8_e4m3fn", None),
    ("F8_E5M2", 1, None, "float8_e5m2", None),
    ("I16", 2, np.int16, "int16", "ShortStorage"),
    ("U16", 2, np.uint16, "uint16", None),
    ("F16", 2, np.float16, "float16", "HalfStorage"),
    ("BF16", 2, None, "bfloat16", "BFloat16Storage"),
    ("I32", 4, np.int32, "int32", "IntStorage"),
    ("U32", 4, np.uint32, "uint32", None),
    ("F32", 4, np.float32, "float32", "FloatStorage"),
    ("I64", 8, np.int64, "int64", "LongStorage"),
    ("U64", 8, np.uint64, "uint64", None),
    ("F64", 8, np.float64, "float64", "DoubleStorage"),
)

ITEM_BYTES: Mapping[str, int] = {name: size for name, size, *_ in _TABLE}
"""Bytes of one element."""
HALF = ("BF16", "F16")
"""Dtypes of weights with fp32 masters."""

NUMPY_DTYPES: Mapping[str, Any] = {
    name: numpy_type for name, _, numpy_type, _, _ in _TABLE if numpy_type is not None
}
"""Dtypes known to numpy."""
TORCH_NAMES: Mapping[str, str] = {name: torch_name for name, _, _, torch_name, _ in _TABLE}
"""Names in the module torch, and in a torch distributed checkpoint."""
FROM_TORCH: Mapping[str, str] = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
"""The other way round."""
STORAGES: Mapping[str, str] = {
    name: storage for name, _, _, _, storage in _TABLE if storage is not None
}
"""Torch's classes of storages, as in an archive of ``torch.save``."""
FROM_STORAGE: Mapping[str, str] = {storage: name for name, storage in STORAGES.items()}
"""The other way round."""

Bits = npt.NDArray[np.unsignedinteger[Any]]
BITS: Mapping[int, type[np.unsignedinteger[Any]]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}
"""Unsigned integer type by bytes of an element."""


def bits_dtype(dtype: str) -> type[np.unsignedinteger[Any]]:
    """Return the unsigned integer type as wide as one element of a dtype."""
    return BITS[ITEM_BYTES[dtype]]
