"""Work spread over forked processes, which inherit what they need instead of being sent it."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from scalai.core.errors import PeerError
from scalai.runtime.orphans import die_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")

_inherited: Callable[[Any], Any] | None = None


def _call(item: Any) -> Any:
    assert _inherited is not None
    return _inherited(item)


def map_forked(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with its result, as they get ready. ``function`` may be a closure.

    ``workers`` 0: in this process.

    Raises:
        PeerError: A process died. And whatever ``function`` raises.
    """
    global _inherited
    if not items or not workers:
        yield from ((item, function(item)) for item in items)
        return
    _inherited = function
    try:
        context = multiprocessing.get_context("fork")
        # A worker without its parent would wait forever, and hold the parent's locks.
        with ProcessPoolExecutor(
            min(workers, len(items)), context, die_with_parent, (os.getpid(),)
        ) as pool:
            pending = {pool.submit(_call, item): item for item in items}
            try:
                for future in as_completed(pending):
                    yield pending[future], future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except BrokenProcessPool as error:
        raise PeerError(
            "a worker process died (killed, or out of memory). Run the same command again, with a "
            "smaller --memory or fewer --workers if memory was short."
        ) from error
    finally:
        _inherited = None
