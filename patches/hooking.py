"""Tools of hooks. ``wrapt`` calls a hook with the function and its arguments."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def given_to(function: Call, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return the arguments of a call by the names of the function's parameters, without
    defaults."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


@contextmanager
def without(owner: Any, names: Sequence[str]) -> Iterator[None]:
    """Set attributes to None within this context, and put them back behind it."""
    saved = {name: getattr(owner, name, None) for name in names}
    for name in names:
        setattr(owner, name, None)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)
