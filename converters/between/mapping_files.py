"""Finds mapping files by path or bare name, and reads them.

Without a file ``llama``, the name means the shipped ``names_llama.toml``, or ``cuts_llama.toml``
for cuts.
"""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from scalai.converters.between.mapping import NameMapping, Rule
from scalai.converters.megatron.model_limits import FUSED_PARTS, Heads
from scalai.core.errors import UsageError

_KEYS = {"prefix", "ignored", "attention", "tied", "tensor"}
_RULE_KEYS = {"ours", "theirs", "fused", "transposed"}


def find_mapping(text: str, kind: str = "names") -> Path:
    """Return the mapping file of this path or name; ``kind``: prefix of the shipped files.

    Raises:
        UsageError: There is none; lists the shipped ones.
    """
    shipped = Path(str(files("scalai.configs")))
    for path in (Path(text), shipped / f"{kind}_{text}.toml"):
        if path.is_file():
            return path
    known = sorted(path.stem.removeprefix(f"{kind}_") for path in shipped.glob(f"{kind}_*.toml"))
    raise UsageError(f"there is no file {text}, and none of that name among {known} ({kind}).")


def read_mapping(path: Path) -> NameMapping:
    """Read a mapping file.

    Raises:
        UsageError: It cannot be read, or has unknown keys.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no mapping file ({error}).") from error
    unknown = sorted(data.keys() - _KEYS)
    if unknown:
        raise UsageError(f"{path}: {unknown} mean nothing. A mapping file has {sorted(_KEYS)}.")
    attention = data.get("attention", {})
    return NameMapping(
        rules=tuple(_rule(entry, path) for entry in data.get("tensor", ())),
        heads=Heads(attention.get("num_attention_heads"), attention.get("num_query_groups")),
        tied=dict(data.get("tied", {})),
        ignored=tuple(data.get("ignored", ())),
        where=str(path),
        prefix=data.get("prefix", ""),
    )


def _rule(entry: Mapping[str, Any], path: Path) -> Rule:
    theirs, fused = entry.get("theirs"), entry.get("fused", "")
    names = (theirs,) if isinstance(theirs, str) else tuple(theirs or ())
    if (
        entry.keys() - _RULE_KEYS
        or not isinstance(entry.get("ours"), str)
        or fused not in FUSED_PARTS
        or len(names) not in (1, FUSED_PARTS[fused])
    ):
        raise UsageError(
            f"{path}: {dict(entry)} is no rule. Give ours, theirs (one name; or 3 with fused = "
            '"qkv", 2 with "gate_up"), fused and transposed.'
        )
    return Rule(entry["ours"], names, fused, bool(entry.get("transposed", False)))
