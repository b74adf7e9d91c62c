"""How fast this machine copies memory that was touched before: what a move can at best be."""

import mmap
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

MEMORY_DISK = "/dev/shm"


def copy_seconds(stored_bytes: int, read_bytes: int, workers: int, runs: int) -> list[float]:
    """Return the seconds in which each of ``workers`` processes copies ``stored_bytes`` of its
    memory into shared memory and ``read_bytes`` of that back, by run.

    Everything was touched before, and each copy is one call.
    """
    context = get_context("spawn")
    barrier, results = context.Barrier(workers), context.Queue()
    job = (stored_bytes, read_bytes, runs, barrier, results)
    processes = [context.Process(target=_copy, args=job) for _ in range(workers)]
    for process in processes:
        process.start()
    times = [results.get() for _ in processes]
    for process in processes:
        process.join()
    # Barrier to barrier: the slowest of each run.
    return [max(of_run) for of_run in zip(*times, strict=True)]


def _copy(stored_bytes: int, read_bytes: int, runs: int, barrier: Barrier, results: Any) -> None:
    most = max(stored_bytes, read_bytes)
    with tempfile.TemporaryFile(dir=MEMORY_DISK) as file:
        file.truncate(most)
        private = np.frombuffer(mmap.mmap(-1, most, flags=mmap.MAP_PRIVATE), np.uint8)
        shared = np.frombuffer(mmap.mmap(file.fileno(), most), np.uint8)
        private[:], shared[:] = 1, 1
        seconds = []
        for _ in range(runs + 1):
            barrier.wait()
            began = time.perf_counter()
            np.copyto(shared[:stored_bytes], private[:stored_bytes])
            np.copyto(private[:read_bytes], shared[:read_bytes])
            seconds.append(time.perf_counter() - began)
        results.put(seconds[1:])
