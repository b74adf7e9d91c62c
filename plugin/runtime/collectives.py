"""Whether a collective of this process has failed. NCCL's fail beside the thread that waits for
them: it hangs for good, and torch's watchdog alone knows (``ProcessGroupNCCL.get_error``, torch
2.10 and newer)."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

POLL_S = 1.0

log = logging.getLogger(__name__)


def failure() -> str:
    """Return what torch knows of a collective of NCCL's that has failed; empty: nothing."""
    for backend in _backends():
        with suppress(RuntimeError):  # it is being taken down
            error = backend.get_error()
            if error.name != "SUCCESS":
                return f"a collective of NCCL's has failed ({error.name})"
    return ""


def _backends() -> Iterator[Any]:
    """Yield what talks between devices, of each process group that can tell of errors."""
    if not dist.is_initialized():
        return
    # torch has no public list of the groups that there are.
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # it has none for devices
            backend = group._get_backend(torch.device("cuda"))
            if hasattr(backend, "get_error"):
                yield backend


def watch(is_wanted: Callable[[], bool], tell: Callable[[str], None]) -> None:
    """Look for a failed collective from now on, in a thread, and tell of it once.

    Args:
        is_wanted: Whether one still matters: not any more, once this process leaves its round.
        tell: Is called in the thread with what has failed.
    """

    def work() -> None:
        while is_wanted():
            if reason := failure():
                log.error("event=collective_failed %s", reason)
                tell(reason)
                return
            time.sleep(POLL_S)

    with suppress(RuntimeError):  # no room for a thread: the hang is seen later
        threading.Thread(target=work, name="collectives", daemon=True).start()
