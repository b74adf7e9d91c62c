"""Scalai: change the parallel layout of a running Megatron-LM or DeepSpeed job.

``import scalai`` needs neither torch nor a framework; ``elastic`` and ``current`` import torch when
they are called.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalai.runtime.session import Session

__version__ = "0.1.0"
__all__ = ["current", "elastic"]


def elastic(**defaults: int) -> "Session":
    """Return this worker's session, a context that hands out the degrees
    (``scalai.runtime.session.elastic``)."""
    from scalai.runtime import session

    return session.elastic(**defaults)


def current() -> "Session | None":
    """Return this process's session, None before ``elastic``."""
    from scalai.runtime import session

    return session.current()
