"""Which release of Megatron-LM a script belongs to: rules differ between releases."""

import ast
from pathlib import Path

_STATED = Path("megatron", "core", "package_info.py")
_PARENTS = 2
"""Folders above a script's own in which ``megatron`` may lie."""
QUERY_GROUPS_SHARED = (0, 16)
"""From here on several TP ranks may hold copies of one query group."""


def stated_release(file: Path) -> tuple[int, int, int] | None:
    """Return what Megatron-core's ``package_info.py`` says; None: nothing that can be read."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    numbers = {
        line.targets[0].id: line.value.value
        for line in body
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Constant)
    }
    parts = [numbers.get(part) for part in ("MAJOR", "MINOR", "PATCH")]
    found = [part for part in parts if isinstance(part, int)]
    return (found[0], found[1], found[2]) if len(found) == len(parts) else None


def release_beside(script: str | None) -> tuple[int, int, int] | None:
    """Return the release of the checkout in which a script lies; None: it lies in none."""
    if script is None:
        return None
    folder = Path(script).absolute().parent
    folders = [folder, *list(folder.parents)[:_PARENTS]]
    return next((found for one in folders if (found := stated_release(one / _STATED))), None)
