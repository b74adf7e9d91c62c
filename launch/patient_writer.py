"""Writing to what may answer nobody: a file system that hangs, a pipe that is read no more."""

import queue
import threading
from collections.abc import Callable


class PatientWriter:
    """Writes in a thread of its own. Whoever has something written waits for it, as for any write,
    but not for long: behind a write that takes longer nobody waits, until all is written again.

    Args:
        name: Of its thread.
        answer_s: How long a write is waited for, in seconds.
        late: Called once a write takes longer, by whoever waits for it.
        back: Called once all is written again, by the thread.
        most: How many writes may lie behind a late one; more are left out.
    """

    def __init__(
        self,
        name: str,
        answer_s: float,
        late: Callable[[], object],
        back: Callable[[int], object],
        most: int = 10_000,
    ) -> None:
        self._answer_s, self._late, self._back = answer_s, late, back
        self._work = queue.Queue[tuple[Callable[[], object], threading.Event]](most)
        self._lock = threading.Lock()
        self._is_late, self._left_out = False, 0
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def do(self, write: Callable[[], object]) -> None:
        """Have something written, which must not raise. It is on return, unless it is late."""
        done = threading.Event()
        with self._lock:
            is_late = self._is_late
            try:
                self._work.put_nowait((write, done))
            except queue.Full:
                self._left_out += 1
        if is_late or done.wait(self._answer_s):
            return
        with self._lock:
            is_first = not self._is_late and not done.is_set()
            self._is_late |= is_first
        if is_first:
            self._late()

    def _serve(self) -> None:
        while True:
            write, done = self._work.get()
            write()
            with self._lock:
                done.set()
                is_back = self._is_late and self._work.empty()
                left_out = self._left_out
                if is_back:
                    self._is_late, self._left_out = False, 0
            if is_back:
                self._back(left_out)
