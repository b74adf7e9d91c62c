"""Values of a framework's small state as JSON, and back."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json


def all_plain(values: Mapping[str, Any], owner: str) -> dict[str, Json]:
    """Return ``values`` as JSON. ``all_live`` is the inverse, with lists for tuples.

    Raises:
        RefusedError: A value has no JSON form.
    """
    return {key: plain(value, f"{owner}'s {key}") for key, value in values.items()}


def only_plain(values: Mapping[str, Any]) -> dict[str, Json]:
    """Return the ``values`` with a JSON form, as ``all_plain`` does."""
    found = {}
    for key, value in values.items():
        with suppress(RefusedError):
            found[key] = plain(value, key)
    return found


def all_live(values: Mapping[str, Json]) -> dict[str, Any]:
    """Return the values from JSON of ``all_plain``."""
    return {key: live(value) for key, value in values.items()}


def plain(value: Any, what: str) -> Json:
    """Return one value as JSON; a mapping as pairs, because its keys need not be strings."""
    if isinstance(value, torch.Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufUO":
        items = plain(value.ravel().tolist(), what)
        return {"array": items, "dtype": value.dtype.str, "shape": [*value.shape]}
    if isinstance(value, list | tuple):
        return [plain(entry, what) for entry in value]
    if isinstance(value, Mapping):
        pairs = [[plain(key, what), plain(entry, what)] for key, entry in value.items()]
        return {"pairs": pairs, "is_counter": isinstance(value, Counter)}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return plain(value.item(), what)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RefusedError(
        f"{what} is a {type(value).__name__}, which cannot be kept as JSON. Give its class a "
        "state_dict() that leaves it out, and a load_state_dict() that goes without it; or run "
        "without --elastic."
    )


def live(value: Json) -> Any:
    """Return the value from JSON of ``plain``."""
    if isinstance(value, Mapping):
        if "pairs" in value:
            pairs = {live(key): live(entry) for key, entry in value["pairs"]}
            return Counter(pairs) if value["is_counter"] else pairs
        if "array" in value:
            items = map(live, value["array"])
            return np.fromiter(items, np.dtype(value["dtype"])).reshape(value["shape"])
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if isinstance(value, list):
        return [live(entry) for entry in value]
    return value
