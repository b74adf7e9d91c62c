"""How the shims replace what a module offers."""

from collections.abc import Callable
from typing import Any

import wrapt


def replace(*owners: Any, **values: Any) -> None:
    """Set attributes of modules or classes; the same values on every owner."""
    for owner in owners:
        for name, value in values.items():
            setattr(owner, name, value)


def returning(value: Any) -> Callable[..., Any]:
    """Return a new function that takes anything and returns ``value``.

    One for each name that is replaced: torch's compiler keeps a table by function and refuses to
    find one under two names.
    """

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def nothing() -> Callable[..., None]:
    """Return a new function that stands in for a call without meaning on a CPU."""
    return returning(None)


def when_imported(module: str, patch: Callable[[Any], None]) -> None:
    """Call ``patch(module)`` right after its import, or now where it was imported before.

    The importer sees the patched module: names that it takes by ``from module import name`` are
    patched ones.
    """
    wrapt.register_post_import_hook(patch, module)
