"""Stored bits as numbers that numpy can print."""

from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.store.files import Bits

NUMPY_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8,
    "I16": np.int16, "U16": np.uint16, "F16": np.float16,
    "I32": np.int32, "U32": np.uint32, "F32": np.float32,
    "I64": np.int64, "U64": np.uint64, "F64": np.float64,
}  # fmt: skip
"""Dtypes that numpy has itself, by the names of the safetensors format."""


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


def _e4m3() -> npt.NDArray[np.float32]:
    """Return the values of all 256 patterns of F8_E4M3 (no infinities, one NaN a sign)."""
    pattern = np.arange(256)
    exponent, mantissa = pattern >> 3 & 15, pattern & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    values = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    values[pattern & 127 == 127] = np.nan
    return np.where(pattern & 128, -values, values).astype(np.float32)
