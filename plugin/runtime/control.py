"""The control page: one page of memory shared by a host's agent and its workers, read once a step.

A stop is agreed without a collective. The agent writes the step to stop at, then reads every
worker's step; a worker writes its step, then reads the stop. If every worker was below the stop as
it was written, every worker will see it in time; otherwise the agent withdraws it and tries a later
one.

This needs an order between a write and a read of another cell, and no processor gives it by itself
(x86 may read first, ARM may also change the order of writes). The agent has the kernel order all
processors (``order``), so that a worker's step costs nothing more.
"""

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from scalai.core.errors import StoreError
from scalai.core.job.function_proof import MOST_STEPS, Made
from scalai.core.job.spacing import Schedule
from scalai.store.secure import Folder

STOP, AGREED, IN_FLIGHT, LOOKS, WANTED, SPACED, PROVED, FIRST_WORKER = 0, 1, 2, 3, 4, 5, 6, 8
EVERY_BITS = 20
"""Bits for the number of steps between snapshots."""
PAGE_BYTES = 8192
MAX_WORKERS = (512 - FIRST_WORKER) // 2
FIRST_IN_STEP = FIRST_WORKER + MAX_WORKERS
FIRST_MADE = 512
MADE_CELLS = 3
"""Step, loss, gradient norm of each of the newest steps."""
FIRST_PACE = FIRST_MADE + MOST_STEPS * MADE_CELLS
PACE_BITS = 40
"""Bits for the microseconds of a pass; above them is the number of the window."""
MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
"""Number of the system call, by machine: the C library has no name for it."""
ON_ALL = 1
"""``MEMBARRIER_CMD_GLOBAL``."""
VISIBLE_S = 0.002
"""Wait without the system call: far longer than a write waits in a processor."""


def order() -> None:
    """Return once every running thread of this machine has passed a full memory barrier.

    Their earlier writes are visible, and their later reads see writes made before this call.

    Source:
        membarrier(2), since Linux 4.3. A kernel with ``nohz_full`` has none, nor some sandboxes.
    """
    number = MEMBARRIER.get(platform.machine())
    if number is None or ctypes.CDLL(None).syscall(number, ON_ALL, 0, 0):
        time.sleep(VISIBLE_S)


def control_path(directory: Path, round: int) -> Path:
    """Return the path of a round's page in an agent's directory."""
    return directory / f"control-{round}"


def _make(folder: Folder, name: str) -> int:
    folder.remove(name)
    descriptor = folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(descriptor, 0, PAGE_BYTES)
    except OSError as error:
        os.close(descriptor)
        folder.remove(name)
        raise StoreError(
            f"{folder.path / name} needs {PAGE_BYTES} bytes, but {error.strerror}. Enlarge the "
            "shared memory (--shm-size of docker run) or choose another --store-dir."
        ) from error
    return descriptor


class ControlPage:
    """Eight-byte cells, each with one writer.

    The prepared stop, the agreed stop, the save in flight (its iteration and 1), the number of the
    workers' looks for it, the urgency of a stop waiting for it, the schedule of snapshots, the stop
    with a step without update behind it, each worker's newest step, its mark for being within the
    next one, and its newest window of passes.

    Eight aligned bytes are written at once on every platform supported by torch.

    Args:
        create: Make it, as the agent. Its room is allocated at once: a write to a page missing on a
            full file system ends the process.

    Raises:
        StoreError: There is no room for it, or its folder is not this user's alone.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        with Folder.open(path.parent) as folder:
            name = path.name
            descriptor = _make(folder, name) if create else folder.open_file(name, os.O_RDWR)
        try:
            memory = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            os.close(descriptor)
        self._cells = np.frombuffer(memory, dtype=np.int64)

    def clear(self) -> None:
        """Agent, before a round's workers start: no stop, and no steps."""
        self._cells[:] = 0
        self._cells[FIRST_WORKER:FIRST_IN_STEP] = -1

    def prepare(self, stop: int) -> None:
        """Agent: make every worker wait for the agreement at the end of step ``stop``."""
        if self._cells[AGREED]:  # of an earlier stop: it must not count for this one
            self._cells[AGREED] = 0
            order()
        self._cells[STOP] = stop
        order()

    def agree(self, stop: int, *, proves: bool = False) -> None:
        """Agent: agree. Every worker leaves at ``stop``.

        ``proves``: after the next step up to its update.
        """
        self._cells[PROVED] = stop if proves else 0
        self._cells[AGREED] = stop

    def withdraw(self) -> None:
        """Agent: withdraw the prepared stop; workers waiting at it go on."""
        self._cells[STOP] = 0

    def space(self, schedule: Schedule) -> None:
        """Agent: set the schedule of snapshots."""
        # One cell, so that reads are whole.
        self._cells[SPACED] = schedule.begin << EVERY_BITS | schedule.every
        order()

    def spaced(self) -> Schedule | None:
        """Worker, after ``report``: the schedule of snapshots; None: unchanged since the start."""
        cell = int(self._cells[SPACED])
        return Schedule(cell & (1 << EVERY_BITS) - 1, cell >> EVERY_BITS) if cell else None

    def save_in_flight(self) -> int | None:
        """Agent: iteration of the training's save that must end before a stop."""
        return int(self._cells[IN_FLIGHT]) - 1 if self._cells[IN_FLIGHT] else None

    def save_looks(self) -> int:
        """Agent: number of the workers' looks for the end of a save."""
        return int(self._cells[LOOKS])

    def want_stop(self, urgency: int) -> None:
        """Agent: set ``stop_urgency``."""
        self._cells[WANTED] = urgency

    def newest_step(self, workers: int) -> int:
        """Agent: highest ended step of the first ``workers`` workers; -1 before attach."""
        return int(self._cells[FIRST_WORKER : FIRST_WORKER + workers].max(initial=-1))

    def steps(self, workers: int) -> list[int]:
        """Agent: ended step of each of the first ``workers`` workers; -1 before attach."""
        return [int(step) for step in self._cells[FIRST_WORKER : FIRST_WORKER + workers]]

    def has_reached_stop(self, local_rank: int) -> bool:
        """Agent: True if this worker has ended the agreed step."""
        agreed = int(self._cells[AGREED])
        return bool(agreed and self._cells[FIRST_WORKER + local_rank] >= agreed)

    def are_within_steps(self, workers: int) -> bool:
        """Agent: True if the first ``workers`` workers are all within a step, not between two."""
        return bool(self._cells[FIRST_IN_STEP : FIRST_IN_STEP + workers].all())

    def report_within(self, local_rank: int, *, is_within: bool) -> None:
        """Worker: a step is under way here, or none is."""
        self._cells[FIRST_IN_STEP + local_rank] = is_within

    @contextmanager
    def between_steps(self, local_rank: int) -> Iterator[None]:
        """Worker: exclude the block, such as a wait for a copy, from the step under way."""
        was = bool(self._cells[FIRST_IN_STEP + local_rank])
        self.report_within(local_rank, is_within=False)
        try:
            yield
        finally:
            self.report_within(local_rank, is_within=was)

    def report(self, local_rank: int, step: int) -> None:
        """Worker: step ``step`` has ended here."""
        self._cells[FIRST_WORKER + local_rank] = step

    def report_save(self, iteration: int | None) -> None:
        """First worker of the host: the oldest save in flight; None: none."""
        self._cells[IN_FLIGHT] = 0 if iteration is None else iteration + 1
        self._cells[LOOKS] += 1

    def stop_urgency(self) -> int:
        """Worker: urgency of a stop.

        0: none waits for a save in flight; 1: one waits; 2: one was put off before, because another
        save began on the way to it.
        """
        return int(self._cells[WANTED])

    def report_made(self, step: int, loss: float, norm: float) -> None:
        """One worker of the job: loss and norm of step ``step``; NaN: unknown."""
        begin = FIRST_MADE + step % MOST_STEPS * MADE_CELLS
        self._cells[begin] = 0
        self._cells[begin + 1 : begin + MADE_CELLS] = np.array([loss, norm]).view(np.int64)
        self._cells[begin] = step

    def made(self, after: int) -> list[Made]:
        """Agent: kept results of steps behind ``after``."""
        rows = self._cells[FIRST_MADE : FIRST_MADE + MOST_STEPS * MADE_CELLS].copy()
        rows = rows.reshape(MOST_STEPS, MADE_CELLS)
        rows = rows[rows[:, 0] > after]
        values = rows[:, 1:].copy().view(np.float64)
        found = zip(rows[:, 0].tolist(), values.tolist(), strict=True)
        return sorted((step, loss, norm) for step, (loss, norm) in found)

    def report_pace(self, local_rank: int, window: int, seconds: float) -> None:
        """Worker: usual seconds of a pass in a window of steps, by its number from 1 on."""
        most = (1 << PACE_BITS) - 1
        # One cell, so that reads are whole.
        self._cells[FIRST_PACE + local_rank] = window << PACE_BITS | min(
            max(int(seconds * 1e6), 1), most
        )

    def pace(self, workers: int) -> tuple[int, float] | None:
        """Agent: the newest window that each of the first ``workers`` workers has ended, and the
        seconds of a pass on the slowest; None: none yet."""
        cells = self._cells[FIRST_PACE : FIRST_PACE + workers].copy()
        window = int(cells.min()) >> PACE_BITS
        return (window, int((cells & (1 << PACE_BITS) - 1).max()) / 1e6) if window else None

    def must_prove(self, step: int) -> bool:
        """Worker, at the stop of this step: True to make the next one up to its update."""
        return bool(step) and int(self._cells[PROVED]) == step

    def must_stop(self, step: int) -> bool:
        """Worker, after ``report``: wait at a prepared stop for the agreement; True to leave
        now.
        """
        stop = int(self._cells[STOP])
        while stop and step >= stop:
            if self._cells[AGREED] == stop:
                return True
            time.sleep(0.0005)
            stop = int(self._cells[STOP])
        return False
