"""A call for each of several items, in threads: for waits for a disk or another host.

``ThreadPoolExecutor`` waits for ever at the end of memory: for a thread unable to begin, or for the
result of one unable to go on. Here the calling thread does the work with helpers, if they can be
started; it waits only for running ones.
"""

import _thread
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")

THREADS = 8
"""Threads at work at once, with the calling one."""
STACK_BYTES = 256 << 10
"""Stack of a helper. The usual 8 MB count as memory under a limit."""

_STACK_MUTEX = threading.Lock()
"""Guards the whole process's stack size: it is restored before another thread looks. A fork waits
too, so that no child keeps the small size, or the lock, for good."""
os.register_at_fork(
    before=_STACK_MUTEX.acquire,
    after_in_parent=_STACK_MUTEX.release,
    after_in_child=_STACK_MUTEX.release,
)


def at_once(
    function: Callable[[Item], object], items: Iterable[Item], *, threads: int = THREADS
) -> None:
    """Call a function with each item. Blocks; no thread is left at work afterwards.

    Args:
        threads: Most threads at work at once, with the calling one; fewer if memory is short for
            their stacks.

    Raises:
        BaseException: The first error of the function; items not yet begun are left.
    """
    given = list(items)
    left = deque(range(len(given)))
    is_done = bytearray(len(given))
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                number = left.popleft()
            except IndexError:
                return
            try:
                function(given[number])
                is_done[number] = True
            except BaseException as error:
                errors.append(error)

    helpers = _start_helpers(work, min(threads, len(given)) - 1)
    work()
    for helper in helpers:
        helper.acquire()
    if not all(is_done):  # even an error may have found no memory to be noted in
        raise errors[0] if errors else MemoryError


def _start_helpers(work: Callable[[], None], count: int) -> list[threading.Lock]:
    """Start up to ``count`` threads, as far as possible; return a lock of each.

    A thread holds its lock while it works. So waiting for the lock is waiting for a running thread,
    never for one that could not begin for want of memory; a late one finds its lock taken.
    """

    def help_(lock: threading.Lock) -> None:
        if lock.acquire(blocking=False):
            try:
                work()
            finally:
                lock.release()

    helpers: list[threading.Lock] = []
    with _STACK_MUTEX:
        usual = threading.stack_size(STACK_BYTES)
        try:
            for _ in range(count):
                lock = threading.Lock()
                _thread.start_new_thread(help_, (lock,))
                helpers.append(lock)
        except (RuntimeError, MemoryError):
            pass  # started ones help; without any the caller does it all
        finally:
            threading.stack_size(usual)
    return helpers
