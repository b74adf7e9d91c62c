"""Imports of large packages, sooner: without collections of garbage, and known to a fork server."""

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalai.core.messages.worker_messages import Imports


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


def imported(local_rank: int) -> "Imports | None":
    """Tell what this script has imported and from where, for the fork server of later rounds. One
    worker a host tells."""
    from scalai.core.messages.worker_messages import (
        Imports,  # numpy, which questions to a job do without
    )

    if local_rank != 0:
        return None
    modules = [
        name
        for name, module in list(sys.modules.items())
        if getattr(module, "__spec__", None) is not None and not name.startswith("__")
    ]
    return Imports(tuple(modules), tuple(map(str, sys.path)))
