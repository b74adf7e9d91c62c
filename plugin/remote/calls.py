"""Calls of fsspec's file systems that end at a deadline, whatever the other side does."""

import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from fsspec.asyn import AsyncFileSystem, sync

HANGING = 8
"""Calls of a file that have not come back, at most; of file systems that cannot end one."""


class Calls:
    """Calls the methods of a file system. May be used by several threads.

    Those that are coroutines end at their deadline. Of others the thread stays until they return
    by themselves, and where many have not there are no more.
    """

    def __init__(self, files: Any) -> None:
        self._files = files
        # By its type: fsspec's own caches pass on what they are asked for, of their target's.
        self._is_async = issubclass(type(files), AsyncFileSystem) and not files.asynchronous
        self._free = threading.BoundedSemaphore(HANGING)

    def call(self, name: str, within_s: float, *args: Any, **options: Any) -> Any:
        """Return what a method returns. Raises ``TimeoutError``, and what it raises."""
        if self._is_async:
            return self.run(lambda: getattr(self._files, f"_{name}")(*args, **options), within_s)
        method = getattr(self._files, name)
        return self._in_a_thread(lambda: method(*args, **options), within_s)

    def run(self, start: Callable[[], Coroutine[Any, Any, Any]], within_s: float) -> Any:
        """Return what a coroutine returns in the loop of the file system. Raises as ``call``."""
        try:
            return sync(self._files.loop, start, timeout=within_s)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no answer within {within_s:g} s") from error

    def _in_a_thread(self, call: Callable[[], Any], within_s: float) -> Any:
        end = time.monotonic() + within_s
        if not self._free.acquire(timeout=within_s):
            raise TimeoutError(f"{HANGING} earlier calls of its file system have not come back")
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)
            finally:
                self._free.release()

        threading.Thread(target=run, daemon=True).start()
        try:
            return done.result(max(end - time.monotonic(), 0))
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no answer within {within_s:g} s") from error
