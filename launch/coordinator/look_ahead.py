"""Computes beside the job what it would run if hosts came or went, so that nothing waits for
it when they do."""

import threading
from collections.abc import Callable

from scalai.core.ahead import plans_ahead
from scalai.core.membership import Job, present_degrees, staying


class LookAhead:
    """One computation at a time; what comes meanwhile is computed behind it, the newest only.

    Args:
        say: Takes log lines.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._next: Job | None = None
        self._is_busy = False
        self._said = ""

    def begin(self, job: Job) -> None:
        """Compute what ``job`` would run; returns at once."""
        with self._lock:
            self._next = job
            if self._is_busy:
                return
            self._is_busy = True
        threading.Thread(target=self._work, name="look-ahead", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                job, self._next = self._next, None
                if job is None:
                    self._is_busy = False
                    return
            try:
                line = plans_line(job)
            except Exception as error:  # our own slip: nothing depends on this
                line = f"event=ahead failed: {error!r}"
            if line != self._said:
                self._said = line
                self._say(line)


def plans_line(job: Job) -> str:
    """Return what the job would run after each change that may come."""
    plans = plans_ahead(job.assign, staying(job), present_degrees(job))
    parts = (
        f"{name.replace(' ', '_')}={'none' if plan is None else plan.degrees}"
        for name, plan in plans
    )
    return " ".join(("event=ahead", *parts))
