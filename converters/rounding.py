"""Does a master round to its weight?"""

from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.store.files import Bits
from scalai.store.values import NUMPY_DTYPES


def rounds_to(masters: bytes, master_dtype: str, weights: bytes, dtype: str) -> bool:
    """Tell whether each master, rounded to the weights' dtype, is the weight beside it.

    Both are elements in the same order, with dtypes by the names of the safetensors format.
    """
    if master_dtype == dtype:
        return masters == weights
    values: npt.NDArray[Any] = np.frombuffer(masters, dtype=NUMPY_DTYPES[master_dtype])
    if dtype == "BF16":
        return bytes(to_bf16(values.astype(np.float32)).tobytes()) == weights
    with np.errstate(over="ignore"):
        return values.astype(NUMPY_DTYPES[dtype]).tobytes() == weights


def to_bf16(values: npt.NDArray[np.float32]) -> Bits:
    """Return fp32 numbers as bf16 bits, rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.asarray(rounded >> np.uint32(16), dtype=np.uint16)
