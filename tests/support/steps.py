"""Steps of one thread, and what comes between two of them: a crash, or another thread."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

DEADLINE_S = 60.0
CHANGES = ("rename", "replace", "fsync", "unlink", "ftruncate", "posix_fallocate", "mkdir", "rmdir")
LOOKS = ("stat", "lstat", "listdir", "scandir")

RLock = threading.RLock


@contextmanager
def before_call(
    step: int, act: Callable[[], object], names: Sequence[str] = CHANGES
) -> Iterator[Callable[[], bool]]:
    """Run ``act`` before the ``step``-th of these calls of ``os`` and each later one; give whether
    it came to that."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count >= step:
                act()
            return call(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, counted(getattr(os, name)))
        yield lambda: count >= step


def with_another_between(run: Callable[[], object], other: Callable[[], object], step: int) -> bool:
    """Run something, and the whole of another thread's work before its ``step``-th call of the file
    system; return whether it has so many."""
    left = [other]
    with before_call(step, lambda: left.pop()() if left else None, CHANGES + LOOKS):
        run()
    return not left


class Beside(threading.Thread):
    """Something that another thread does; what it returned or raised is kept."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(name="beside", daemon=True)
        self._work, self._stands = work, threading.Event()
        self.result: list[object] = []
        self.errors: list[BaseException] = []
        self.start()

    def run(self) -> None:
        try:
            self.result.append(self._work())
        except BaseException as error:
            self.errors.append(error)
        self._stands.set()

    def stand(self) -> None:
        """Note that this thread goes no further by itself."""
        self._stands.set()

    def until_it_stands(self) -> "Beside":
        """Wait until it waits for a ``SeenLock``, or has ended."""
        assert self._stands.wait(DEADLINE_S)
        return self

    def end(self) -> "Beside":
        self.join(DEADLINE_S)
        assert not self.is_alive()
        return self


class SeenLock:
    """In place of ``threading.RLock``: a thread ``Beside`` that waits for it is seen to do so."""

    def __init__(self) -> None:
        self._lock: Any = RLock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        self._seen()
        return bool(self._lock.acquire(blocking, timeout))

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> Any:
        """As a condition begins to wait."""
        self._seen()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)

    @staticmethod
    def _seen() -> None:
        thread = threading.current_thread()
        if isinstance(thread, Beside):
            thread.stand()
