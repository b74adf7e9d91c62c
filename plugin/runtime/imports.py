"""Imports of large packages, sooner."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import without looking for garbage on the way, nor ever among what was imported.

    An import brings tens of thousands of objects that stay: to look through them takes a fourth of
    the time of importing torch, and again when the process ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
