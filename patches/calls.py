"""What ``wrapt`` gives to a wrapper: the function that is wrapped, and what it is called with."""

from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
