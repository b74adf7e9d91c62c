"""Work spread over forked processes, which inherit their input instead of receiving it.

No thread takes part, unlike in ``ProcessPoolExecutor``: out of memory a thread does not start, and
its waiter waits for ever. A worker's end is seen at its pipe.
"""

import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

from scalai.core.errors import MemoryShortError, PeerError, is_memory_short
from scalai.runtime.processes import die_with_parent

log = logging.getLogger("scalai.converters")

Item = TypeVar("Item")
Result = TypeVar("Result")

SILENT_S = 60.0
"""Seconds at one item before a worker is named; doubled each time."""
END_S = 10.0
"""Seconds for a killed worker to end; it cannot before its disk answers."""
STATES = {
    "T": "stopped; `kill -CONT {pid}` lets it go on",
    "D": "waiting for a disk",
    "R": "running",
    "S": "waiting",
}


def map_forked(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with its result, as they get ready. ``function`` may be a closure.

    ``workers`` 0: in this process. A worker that is long at an item is named in the log, with its
    state; nothing ends it: its disk may be slow, or a person may have stopped it.

    Raises:
        PeerError: A process died, or could not be started.
        MemoryShortError: ``function`` had too little memory. And any error it raises.
    """
    if not items or not workers:
        yield from ((item, function(item)) for item in items)
        return
    team: list[_Worker] = []
    try:
        for _ in range(min(workers, len(items))):
            team.append(_start(lambda number: function(items[number])))
        for number, result in _results(team, len(items)):
            yield items[number], result
    finally:
        for worker in team:
            worker.end()


@dataclass(slots=True)
class _Worker:
    """A process, its item, the item's start, and the time before the next warning."""

    process: ForkProcess
    pipe: Connection
    item: int = -1
    began: float = 0.0
    silent_s: float = SILENT_S

    def give(self, number: int) -> None:
        self.item, self.began, self.silent_s = number, time.monotonic(), SILENT_S
        try:
            self.pipe.send(number)
        except OSError:
            raise self._died() from None

    def answer(self) -> Any:
        """Return a result. Raises the function's error; ``PeerError`` if the process died."""
        try:
            error, result = self.pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if error is not None:
            raise error
        return result

    def report_silence(self) -> None:
        seconds = time.monotonic() - self.began
        if seconds < self.silent_s or self.pipe.poll():
            return
        self.silent_s = 2 * seconds
        pid = self.process.pid
        state = STATES.get(_state(pid), "of unknown state").format(pid=pid)
        log.warning("worker process %d is at one piece since %.0f s: it is %s", pid, seconds, state)

    def end(self) -> None:
        """Kill it: its answers are here, and the rest is not kept."""
        self.process.kill()
        self.process.join(END_S)
        self.pipe.close()

    def _died(self) -> PeerError:
        self.process.join(END_S)
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else "ended"
        return PeerError(
            f"worker process {self.process.pid} {how} (exit code {code}), as happens where memory "
            "is short. Run the same command again to go on, with a smaller --memory or fewer "
            "--workers if memory was short."
        )


def _start(function: Callable[[int], Any]) -> _Worker:
    context = multiprocessing.get_context("fork")
    try:
        here, there = context.Pipe()
        with there:
            process = context.Process(target=_work, args=(function, there, os.getpid()))
            process.start()
    except OSError as error:
        raise PeerError(
            f"a worker process cannot be started ({error.strerror}). Run the same command again "
            "with fewer --workers, or let this user have more processes (`ulimit -u`) and memory."
        ) from error
    return _Worker(process, here)


def _results(team: Sequence[_Worker], count: int) -> Iterator[tuple[int, Any]]:
    """Have the items done; yield each one's number and result."""
    left = iter(range(count))
    busy = {}
    for worker, number in zip(team, left, strict=False):
        worker.give(number)
        busy[worker.pipe] = worker
    while busy:
        due = min(worker.began + worker.silent_s for worker in busy.values())
        for pipe in wait(list(busy), max(due - time.monotonic(), 0)):
            assert isinstance(pipe, Connection)
            worker = busy[pipe]
            number, result = worker.item, worker.answer()
            following = next(left, None)
            if following is None:
                del busy[pipe]
            else:
                worker.give(following)
            yield number, result
        for worker in busy.values():
            worker.report_silence()


def _work(function: Callable[[int], Any], pipe: Connection, parent: int) -> None:
    """Answer numbers until the parent kills this process."""
    # A worker without its parent would wait forever, and hold the parent's locks.
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its workers
    while True:
        number = pipe.recv()
        try:
            answer: tuple[BaseException | None, Any] = None, function(number)
        except BaseException as error:
            answer = _shippable(error), None
        pipe.send(answer)


def _shippable(error: BaseException) -> BaseException:
    """Return the error for the parent: the same one, with the place of its origin."""
    if is_memory_short(error):
        return MemoryShortError("a worker process had too little memory")
    error.add_note("".join(traceback.format_exception(error)))
    return error


def _state(pid: int | None) -> str:
    """Return the letter of a process's state, "" if it cannot be told (Linux, proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
