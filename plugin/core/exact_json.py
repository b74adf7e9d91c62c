"""Values of a framework's own through JSON and back, the same as they were.

JSON has no tuples, and no keys but strings: a mapping with others is written as its pairs, and a
value that is like the one to be restored says what is a tuple or a ``Counter``.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from scalai.core.jsonable import Json

PAIRS = "pairs"
"""The one key of a mapping that is written as a list of keys and values."""


def to_json(value: Any) -> Json:
    """Return a value as JSON, from which ``from_json`` makes the same.

    Raises:
        TypeError: JSON has no such values.
    """
    if isinstance(value, Mapping):
        if PAIRS in value or not all(isinstance(key, str) for key in value):
            return {PAIRS: [[to_json(key), to_json(kept)] for key, kept in value.items()]}
        return {key: to_json(kept) for key, kept in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(kept) for kept in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__}")


def from_json(kept: Json, like: Any) -> Any:
    """Return what ``to_json`` was given; ``like`` is of its types, or None where that is unknown.

    Raises:
        TypeError, ValueError: It is not what ``to_json`` writes.
    """
    if isinstance(kept, dict):
        pairs = kept[PAIRS] if PAIRS in kept else kept.items()
        similar = like if isinstance(like, Mapping) else {}
        found = {key: from_json(value, similar.get(key)) for key, value in pairs}
        return Counter(found) if isinstance(like, Counter) else found
    if isinstance(kept, list):
        beside = like if isinstance(like, list | tuple) else ()
        parts = zip_longest(kept, beside[: len(kept)])
        values = [from_json(value, other) for value, other in parts]
        return tuple(values) if isinstance(like, tuple) else values
    return kept
