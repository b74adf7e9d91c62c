"""What goes through JSON: messages between processes, manifests, reports, headers of files."""

import json
from typing import Any

Json = Any
"""Whatever ``json.dumps`` writes: dicts with string keys, lists, strings, numbers, booleans,
None."""

MAX_JSON_BYTES = 100_000_000
"""Of a file's header or an index; as in the safetensors library."""


def parse_json(data: bytes) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: It is no JSON, or nested too deep, or a key comes twice.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_distinct)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return found
