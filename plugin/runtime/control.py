"""The control page: one page of memory that a host's agent and its workers share, read once a step.

A stop is agreed without a collective. The agent writes the step at which to stop, then reads how
far every worker is; a worker writes how far it is, then reads where to stop. If every worker was
below the stop when it was written, every worker will see it in time; otherwise the agent takes it
back and tries a later one.

That needs an order between a write and a read of another cell, which no processor gives by itself
(x86 may read first, ARM may also change the order of writes). The agent has the kernel make it on
all of them (``order``), so that a step of a worker costs nothing more.
"""

import ctypes
import errno
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

STOP, AGREED, IN_FLIGHT, LOOKS, WANTED, SPACED, PROBED, FIRST_WORKER = 0, 1, 2, 3, 4, 5, 6, 8
EVERY_BITS = 20
"""So many bits say how many steps lie between snapshots."""
PAGE_BYTES = 8192
OUT_OF_MEMORY_EXIT = errno.ENOMEM
"""Exit code by which a worker tells its agent that these degrees do not fit into its device."""
MAX_WORKERS = (512 - FIRST_WORKER) // 2
FIRST_IN_STEP = FIRST_WORKER + MAX_WORKERS
FIRST_MADE = 512
MADE_CELLS = 3
"""Step, loss, gradient norm of each of the newest steps."""
MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
"""Number of the system call, by machine: the C library has no name for it."""
ON_ALL = 1
"""``MEMBARRIER_CMD_GLOBAL``."""
VISIBLE_S = 0.002
"""Where the kernel cannot order them, by far longer than a write waits in a processor."""


def order() -> None:
    """Return once every running thread of this machine has passed a full memory barrier: what it
    had written before is visible, and what it reads from now on is what was written before this
    call.

    Source:
        membarrier(2), since Linux 4.3. A kernel with ``nohz_full`` has none, nor some sandboxes.
    """
    number = MEMBARRIER.get(platform.machine())
    if number is None or ctypes.CDLL(None).syscall(number, ON_ALL, 0, 0):
        time.sleep(VISIBLE_S)


def control_path(directory: Path, round: int) -> Path:
    """Return where the page of a round lies in an agent's directory."""
    return directory / f"control-{round}"


def _make(folder: Folder, name: str) -> int:
    """Return a descriptor of a new file of one page."""
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
    """Eight-byte cells: the prepared stop, the agreed stop, the save that is in flight (its
    iteration and 1), how often the workers looked for it, how much a stop waits for it, how many
    steps lie between snapshots and from which step on, the stop behind which a step is made without
    its update, each worker's newest step, and whether it says to be within the next one.

    Eight aligned bytes are written at once on every platform that torch supports, and every cell
    has one writer.

    Args:
        create: Make it: the agent does; its room is taken at once, because writing to a page
            that a full file system cannot give ends the process.

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
        """Agent, before a round's workers start: no stop, and nobody has made a step."""
        self._cells[:] = 0
        self._cells[FIRST_WORKER:FIRST_IN_STEP] = -1

    def prepare(self, stop: int) -> None:
        """Agent: ask every worker to wait for the word at the end of step ``stop``."""
        if self._cells[AGREED]:  # of an earlier one: nobody takes it for the word of this one
            self._cells[AGREED] = 0
            order()
        self._cells[STOP] = stop
        order()

    def agree(self, stop: int, *, probes: bool = False) -> None:
        """Agent: the word. Every worker that reaches ``stop`` leaves there; ``probes``: once it has
        made the next step up to the door of its update."""
        self._cells[PROBED] = stop if probes else 0
        self._cells[AGREED] = stop

    def withdraw(self) -> None:
        """Agent: forget the prepared stop; whoever waits at it goes on."""
        self._cells[STOP] = 0

    def space(self, schedule: Schedule) -> None:
        """Agent: which steps have snapshots, from its first one on."""
        # One cell, so that nobody reads a half of it.
        self._cells[SPACED] = schedule.begin << EVERY_BITS | schedule.every
        order()

    def spaced(self) -> Schedule | None:
        """Worker, after ``report``: which steps have snapshots; None: as it was told at first."""
        cell = int(self._cells[SPACED])
        return Schedule(cell & (1 << EVERY_BITS) - 1, cell >> EVERY_BITS) if cell else None

    def save_in_flight(self) -> int | None:
        """Agent: the iteration of the save of the training's own that must end before a stop."""
        return int(self._cells[IN_FLIGHT]) - 1 if self._cells[IN_FLIGHT] else None

    def save_looks(self) -> int:
        """Agent: how often the workers have looked whether a save has ended."""
        return int(self._cells[LOOKS])

    def want_stop(self, urgency: int) -> None:
        """Agent: how much a stop waits for the save that is in flight, as of ``stop_urgency``."""
        self._cells[WANTED] = urgency

    def newest_step(self, workers: int) -> int:
        """Agent: the highest step that any of the first ``workers`` workers has ended; -1 before
        attach."""
        return int(self._cells[FIRST_WORKER : FIRST_WORKER + workers].max(initial=-1))

    def steps(self, workers: int) -> list[int]:
        """Agent: the step that each of the first ``workers`` workers has ended; -1 before
        attach."""
        return [int(step) for step in self._cells[FIRST_WORKER : FIRST_WORKER + workers]]

    def has_reached_stop(self, local_rank: int) -> bool:
        """Agent: whether this worker has ended the step at which all agreed to stop."""
        agreed = int(self._cells[AGREED])
        return bool(agreed and self._cells[FIRST_WORKER + local_rank] >= agreed)

    def are_within_steps(self, workers: int) -> bool:
        """Agent: whether each of the first ``workers`` workers says to be within a step, and not
        in an evaluation, a save or whatever else is between two steps."""
        return bool(self._cells[FIRST_IN_STEP : FIRST_IN_STEP + workers].all())

    def report_within(self, local_rank: int, *, is_within: bool) -> None:
        """Worker: a step is under way here, or none is."""
        self._cells[FIRST_IN_STEP + local_rank] = is_within

    @contextmanager
    def between_steps(self, local_rank: int) -> Iterator[None]:
        """Worker: what happens here is no part of a step, though one may be under way, as a wait
        for a copy."""
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
        """The first worker of the host: the oldest save that is in flight; None: none is."""
        self._cells[IN_FLIGHT] = 0 if iteration is None else iteration + 1
        self._cells[LOOKS] += 1

    def stop_urgency(self) -> int:
        """Worker: 0: no stop waits for a save in flight; 1: one does; 2: one was put off before,
        because another save began on the way to it."""
        return int(self._cells[WANTED])

    def report_made(self, step: int, loss: float, norm: float) -> None:
        """One worker of the job: what step ``step`` has computed; NaN: it is not known."""
        begin = FIRST_MADE + step % MOST_STEPS * MADE_CELLS
        self._cells[begin] = 0
        self._cells[begin + 1 : begin + MADE_CELLS] = np.array([loss, norm]).view(np.int64)
        self._cells[begin] = step

    def made(self, after: int) -> list[Made]:
        """Agent: what steps behind ``after`` have computed, as far as they are still kept."""
        rows = self._cells[FIRST_MADE : FIRST_MADE + MOST_STEPS * MADE_CELLS].copy()
        rows = rows.reshape(MOST_STEPS, MADE_CELLS)
        rows = rows[rows[:, 0] > after]
        values = rows[:, 1:].copy().view(np.float64)
        found = zip(rows[:, 0].tolist(), values.tolist(), strict=True)
        return sorted((step, loss, norm) for step, (loss, norm) in found)

    def must_prove(self, step: int) -> bool:
        """Worker, at the stop of this step: make the next one up to the door of its update."""
        return bool(step) and int(self._cells[PROBED]) == step

    def must_stop(self, step: int) -> bool:
        """Worker, after ``report``: wait for the word where a stop is prepared; True to leave
        now."""
        stop = int(self._cells[STOP])
        while stop and step >= stop:
            if self._cells[AGREED] == stop:
                return True
            time.sleep(0.0005)
            stop = int(self._cells[STOP])
        return False
