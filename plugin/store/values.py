"""Stored bits as numbers that numpy can print."""

from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.core.tensors.dtypes import BITS, ITEM_BYTES, NUMPY_DTYPES, Bits


def decode(bits: Bits, dtype: str) -> npt.NDArray[Any]:
    """Return bits [...] as numbers [...]; 16- and 8-bit floats that numpy lacks become float32."""
    if dtype in NUMPY_DTYPES:
        return bits.view(NUMPY_DTYPES[dtype])
    if dtype == "BF16":
        # The upper half of a float32.
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F8_E5M2":
        # The upper half of a float16.
        return (bits.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    assert dtype == "F8_E4M3", dtype
    return _e4m3()[bits]


def number_of(content: bytes, dtype: str) -> float:
    """Return the first element of a tensor's bytes."""
    item = ITEM_BYTES[dtype]
    return float(decode(np.frombuffer(content[:item], BITS[item]), dtype)[0])


def _e4m3() -> npt.NDArray[np.float32]:
    """Return the values of all 256 patterns of F8_E4M3 (no infinities, one NaN a sign)."""
    pattern = np.arange(256)
    exponent, mantissa = pattern >> 3 & 15, pattern & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    values = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    values[pattern & 127 == 127] = np.nan
    return np.where(pattern & 128, -values, values).astype(np.float32)
