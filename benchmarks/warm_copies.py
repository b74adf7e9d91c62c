"""How fast this machine copies memory that was touched before: what a move can at best be."""

import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np


def copy_seconds(size_bytes: int, workers: int, runs: int) -> list[float]:
    """Return the seconds in which ``workers`` processes copy ``size_bytes`` together, by run.

    Each copies its share from one touched buffer to another.
    """
    context = get_context("spawn")
    barrier, results = context.Barrier(workers), context.Queue()
    share = size_bytes // workers
    processes = [
        context.Process(target=_copy, args=(share, runs, barrier, results)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    times = [results.get() for _ in processes]
    for process in processes:
        process.join()
    # Barrier to barrier: the slowest of each run.
    return [max(of_run) for of_run in zip(*times, strict=True)]


def _copy(size_bytes: int, runs: int, barrier: Barrier, results: Any) -> None:
    source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    seconds = []
    for _ in range(runs + 1):
        barrier.wait()
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    results.put(seconds[1:])
