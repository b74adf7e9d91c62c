"""How the shims replace what a module offers."""

from collections.abc import Callable
from typing import Any

import wrapt


def replace(*owners: Any, **values: Any) -> None:
    """Set attributes of modules or classes; the same values on every owner."""
    for owner in owners:
        for name, value in values.items():
            setattr(owner, name, value)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a call that has no meaning on a CPU."""


def returning(value: Any) -> Callable[..., Any]:
    """Return a function that takes anything and returns ``value``."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def when_imported(module: str, patch: Callable[[Any], None]) -> None:
    """Call ``patch(module)`` right after its import, or now where it was imported before.

    The importer sees the patched module: names that it takes by ``from module import name`` are
    patched ones.
    """
    wrapt.register_post_import_hook(patch, module)
