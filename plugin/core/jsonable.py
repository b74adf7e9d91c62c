"""JSON of messages, manifests, reports and headers; a framework's own values through it, exactly.

JSON has no tuples and no keys but strings. ``exact_json`` writes a mapping with other keys as its
pairs; ``from_exact_json`` restores tuples and ``Counter`` after a value of the same types.
"""

import json
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

Json = Any
"""Values of ``json.dumps``: dicts with string keys, lists, strings, numbers, booleans, None."""

MAX_JSON_BYTES = 100_000_000
"""Limit of a file's header or an index; as in the safetensors library."""

PAIRS = "pairs"
"""The only key of a mapping written as a list of keys and values."""


def parse_json(data: bytes | str) -> Any:
    """Return the values of a JSON text.

    Raises:
        ValueError: It is no JSON, or nested too deep, or a key comes twice.
    """
    try:
        return json.loads(
            data.decode() if isinstance(data, bytes) else data, object_pairs_hook=_distinct
        )
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return found


def exact_json(value: Any) -> Json:
    """Return a value as JSON for ``from_exact_json``.

    Raises:
        TypeError: JSON has no such values.
    """
    if isinstance(value, Mapping):
        if PAIRS in value or not all(isinstance(key, str) for key in value):
            return {PAIRS: [[exact_json(key), exact_json(kept)] for key, kept in value.items()]}
        return {key: exact_json(kept) for key, kept in value.items()}
    if isinstance(value, list | tuple):
        return [exact_json(kept) for kept in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__}")


def from_exact_json(kept: Json, like: Any) -> Any:
    """Return the value given to ``exact_json``; ``like`` is a value of its types, or None if
    unknown.

    Raises:
        TypeError, ValueError: It is no result of ``exact_json``.
    """
    if isinstance(kept, dict):
        pairs = kept[PAIRS] if PAIRS in kept else kept.items()
        similar = like if isinstance(like, Mapping) else {}
        found = {key: from_exact_json(value, similar.get(key)) for key, value in pairs}
        return Counter(found) if isinstance(like, Counter) else found
    if isinstance(kept, list):
        beside = like if isinstance(like, list | tuple) else ()
        parts = zip_longest(kept, beside[: len(kept)])
        values = [from_exact_json(value, other) for value, other in parts]
        return tuple(values) if isinstance(like, tuple) else values
    return kept
