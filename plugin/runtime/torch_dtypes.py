"""Torch's half of the dtypes in ``core/tensors/dtypes.py``."""

from collections.abc import Mapping

import torch

from scalai.core.errors import RefusedError
from scalai.core.tensors.dtypes import TORCH_NAMES

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
"""The integer type that holds the bits of an element of so many bytes."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype. ``RefusedError`` where the format has none."""
    if dtype not in _NAMES:
        raise RefusedError(f"tensors of {dtype} cannot be kept; known are {list(_NAMES)}.")
    return _NAMES[dtype]
