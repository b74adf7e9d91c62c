"""Waits for what has no event to wait for: what other processes do. Scripts of tests use them, too:
they import nothing but the standard library."""

import time
from collections.abc import Callable

DEADLINE_S = 60.0


def wait_until(
    is_so: Callable[[], object],
    what: str | Callable[[], str],
    deadline_s: float = DEADLINE_S,
    every_s: float = 0.02,
) -> None:
    """Return once ``is_so()``. Raises an AssertionError that says what never came, or what a
    function tells at that moment."""
    end = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end, f"never: {what if isinstance(what, str) else what()}"
        time.sleep(every_s)


def stay() -> None:
    """Do nothing until somebody ends this process; without anybody, it goes on ten minutes later.
    A signal just before a sleep begins is handled at its end: each is short."""
    end = time.monotonic() + 600.0
    while time.monotonic() < end:
        time.sleep(0.1)
