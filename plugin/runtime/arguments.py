"""Arguments of calls that come over a wire, checked by the annotations of what they are for."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin

from scalai.core.errors import UsageError


def check_arguments(call: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> None:
    """Raise ``UsageError`` unless ``call(**arguments)`` has the arguments that it takes, each of
    the type that it is annotated with. What is inside of lists and mappings is not looked at."""
    signature = inspect.signature(call)
    try:
        bound = signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(f"{name!r} was called wrongly: {error}. Do the versions differ?") from None
    for key, value in bound.arguments.items():
        parameter = signature.parameters[key]
        is_open = parameter.kind is inspect.Parameter.VAR_KEYWORD
        if not is_open and not _fits(value, parameter.annotation):
            raise UsageError(
                f"{name!r} was called with {key} = {str(value)[:100]!r}, not with "
                f"{parameter.annotation}. Do the versions differ?"
            )


def _fits(value: object, annotation: Any) -> bool:
    if annotation is Any or annotation is inspect.Parameter.empty:
        return True
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(annotation))
    kind = origin or annotation
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind) if isinstance(kind, type) else True
