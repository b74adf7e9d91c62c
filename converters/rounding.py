"""How a master rounds to its weight."""

from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.tensors.dtypes import BITS, ITEM_BYTES, NUMPY_DTYPES, Bits


def rounds_to(masters: bytes, master_dtype: str, weights: bytes, dtype: str) -> bool:
    """Tell whether each master, rounded to the weights' dtype, is the weight beside it.

    Both are elements in the same order, with dtypes by the names of the safetensors format.
    """
    return round_bytes(masters, master_dtype, dtype) == weights


def round_bytes(masters: bytes, master_dtype: str, dtype: str) -> bytes:
    """Return masters rounded to another dtype, as bytes."""
    if master_dtype == dtype:
        return masters
    values: npt.NDArray[Any] = np.frombuffer(masters, dtype=NUMPY_DTYPES[master_dtype])
    return rounded(values.astype(np.float32), dtype).tobytes()


def rounded(values: npt.NDArray[np.float32], dtype: str) -> Bits:
    """Return fp32 numbers [...] as bits [...] of a 16-bit dtype, by its safetensors name."""
    if dtype == "BF16":
        return to_bf16(values)
    with np.errstate(over="ignore"):
        halves: Bits = values.astype(NUMPY_DTYPES[dtype]).view(BITS[ITEM_BYTES[dtype]])
    return halves


def to_bf16(values: npt.NDArray[np.float32]) -> Bits:
    """Return fp32 numbers as bf16 bits, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.asarray(rounded >> np.uint32(16), dtype=np.uint16)
