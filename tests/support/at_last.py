"""A call that is to work in the end."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def at_last(call: Callable[[], T], *errors: type[Exception]) -> T:
    """Return what comes of a call once it raises none of these errors: on a busy machine a short
    deadline passes although the other side is well. Gives up after a minute."""
    end = time.monotonic() + 60
    while True:
        try:
            return call()
        except errors:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
