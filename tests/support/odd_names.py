"""Names that are hardly any, and what those of slices have to show."""

import io
import re
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import load

from support.store_states import WEIGHT, values_of

STEP = 3
"""The state whose tensors are shown."""
HUGE = "9" * 5000
"""More digits than Python reads as a number."""
_WHOLE = ("w", "h", "generations", "1", "source", "dp-0-of-2", "pass-0", "..", "", "ledger.json")


_ENDS = st.sampled_from([".npy", ".safetensors"])
_NUMBERS = st.integers(-2, 9).map(str) | st.sampled_from(["", "00", HUGE, "٣", "²", "1e0"])
_RANGES = st.lists(_NUMBERS, min_size=1, max_size=3).map(":".join)
_PLAIN = st.builds("{}:{}".format, st.integers(0, 6), st.sampled_from(["", *range(7)]))
_SLICES = st.builds(
    "{}[{}]{}".format, st.sampled_from(["w", "w", "w.npy", "step", ""]),
    st.lists(_RANGES, min_size=1, max_size=3).map(",".join)
    | st.text(st.sampled_from("0123:,[]-+ .?*\0\n"), max_size=9),
    _ENDS | st.sampled_from([".npz", ""]),
)  # fmt: skip
_NUMBERED = st.builds(
    "{}{}{}".format,
    st.sampled_from(["dp-", "dp-0-of-", "pass-", "generations/", "dp-1-of-2/pass-"]), _NUMBERS,
    st.sampled_from(["", ".jsonl", ".bin", "-of-2", "/model", "/pass-0.jsonl"]),
)  # fmt: skip


def names() -> st.SearchStrategy[str]:
    """Return names of slices, well and badly written, and any others."""
    good = st.builds("w[{}]{}".format, st.lists(_PLAIN, max_size=2).map(",".join), _ENDS)
    any_text = st.text(st.characters(), max_size=20) | st.sampled_from(_WHOLE)
    return st.one_of(good, good, _SLICES, _SLICES, _NUMBERED, any_text)


def check_slice(name: str, data: bytes) -> None:
    """Check a file of the model: that of a slice of ``w`` has what numpy says it is."""
    found = re.fullmatch(r"w\[(.*)\](\.\w+)", name)
    if found is None:
        return
    texts = found[1].split(",") if found[1] else []
    index = tuple(slice(*(int(n) if n else None for n in text.split(":"))) for text in texts)
    array: Any = (
        np.load(io.BytesIO(data)) if found[2] == ".npy" else next(iter(load(data).values()))
    )
    assert np.array_equal(array.view(np.uint32), values_of(WEIGHT, STEP)[index])
