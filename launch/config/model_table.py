"""The shape of a model as a table states it, by the names of ``ModelShape``."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from scalai.core.errors import RefusedError
from scalai.core.planner.model import ModelShape

_NEEDED = ("heads", "hidden", "layers", "seq", "vocab")


def read_table_shape(table: Mapping[str, Any], where: str) -> ModelShape:
    """Return the shape that a table states; what it leaves out is a GPT's.

    Args:
        where: What errors call the table.

    Raises:
        RefusedError: A size is missing, unknown or no whole number.
        UsageError: Sizes contradict each other.
    """
    known = {f.name for f in fields(ModelShape)}
    unknown = sorted(set(table) - known)
    if unknown:
        names = ", ".join(sorted(known))
        raise RefusedError(f"{where}: {unknown[0]!r} is no size of a model; known: {names}.")
    missing = sorted(set(_NEEDED) - set(table))
    if missing:
        raise RefusedError(f"{where} lacks {', '.join(missing)}.")
    wrong = sorted(name for name, size in table.items() if not isinstance(size, int))
    if wrong:
        raise RefusedError(f"{where}: {wrong[0]}={table[wrong[0]]!r} is no whole number.")
    hidden, heads = table["hidden"], table["heads"]
    usual = {"ffn": 4 * hidden, "kv_groups": heads, "head_dim": hidden // max(heads, 1)}
    return ModelShape(**{**usual, **table})
