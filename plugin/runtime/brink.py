"""The brink of a standby worker: the place in its script where its model begins to take memory."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from scalai.core.messages.worker_messages import AtBrink
from scalai.runtime.processes import private_bytes

WAIT = timedelta(minutes=30)
"""For the other ranks; the job gives up a build that takes longer than ``resize.build_timeout_s``
before."""


def memory_here() -> AtBrink:
    """Return this process's memory."""
    device = 0
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
    return AtBrink(private_bytes(os.getpid()), device)


def has_any_to_stop(world_size: int, *, has_this: bool) -> bool:
    """Return whether a worker of this round has to stop at the brink. Blocks until all ranks have
    asked, once a process; through torch's store, as devices and groups may be unset.

    Raises:
        RuntimeError: The store is gone, or a rank has not asked.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(address, port, timeout=WAIT, wait_for_workers=False)
    store = dist.PrefixStore("scalai/brink", server)
    if has_this:
        store.set("stops", "")
    if store.add("asked", 1) == world_size:
        store.set("all", "")
    store.wait(["all"], WAIT)
    return store.check(["stops"])
