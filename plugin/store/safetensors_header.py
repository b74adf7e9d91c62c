"""What the header of a safetensors file says, checked: no gaps, no overlaps, exact sizes.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from scalai.core.jsonable import MAX_JSON_BYTES, parse_json
from scalai.core.tensors.collection import MAX_NDIM
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.store.files import LENGTH_BYTES

_ITEM_BYTES = {**ITEM_BYTES, "C64": 8}
"""Also of a dtype that no training has."""


class HeaderEntry(NamedTuple):
    """A tensor of a file: its name, dtype, shape, and the byte of the file at which it begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int


def header_bytes(start: bytes, size: int) -> int:
    """Return how long the header is, from the first ``LENGTH_BYTES`` of a file of ``size`` bytes.

    Raises:
        ValueError: The file has no room for it.
    """
    length = int.from_bytes(start, "little")
    if not 2 <= length <= min(MAX_JSON_BYTES, size - LENGTH_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    return length


def entries_of(text: bytes, size: int) -> Iterator[HeaderEntry]:
    """Yield the tensors of a file of ``size`` bytes with this header, in the order of their bytes.

    Of a dtype that is not known here the bytes need only lie between those of its neighbours.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: The header is damaged, or the file is not
            as long as it says.
    """
    header = parse_json(text)
    first = LENGTH_BYTES + len(text)
    at = 0
    items = ((name, of) for name, of in header.items() if name != "__metadata__")
    for name, of in sorted(items, key=lambda item: item[1]["data_offsets"]):
        shape, (low, high) = tuple(of["shape"]), of["data_offsets"]
        is_whole = all(type(number) is int for number in (*shape, low, high))
        if not is_whole or len(shape) > MAX_NDIM or min(shape, default=0) < 0:
            raise ValueError(f"{name} has shape {list(shape)}")
        if not isinstance(of["dtype"], str):
            raise ValueError(f"{name} is of dtype {of['dtype']!r}")
        item = _ITEM_BYTES.get(of["dtype"])
        if low != at or high < low or (item is not None and high - low != prod(shape) * item):
            raise ValueError(f"{name} lies at {low}:{high}")
        yield HeaderEntry(name, of["dtype"], shape, first + low)
        at = high
    if first + at != size:
        raise ValueError(f"{size} bytes, {first + at} by its header")
