"""What every benchmark does alike: progress on standard error, at last one JSON line on output.

A benchmark is a script: ``python benchmarks/x.py``. It creates a ``Report``, adds figures under the
names that the README uses, and calls ``finish``. Timings are medians of several runs; the machine's
load is written down with them, because a figure from a busy machine means little.
"""

import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


def median_s(run: Callable[[], Any], runs: int = 3) -> float:
    """Return the median of the seconds that ``run`` takes, of ``runs`` runs."""
    return statistics.median(timed(run)[0] for _ in range(runs))


def timed(run: Callable[[], Value]) -> tuple[float, Value]:
    """Return the seconds that ``run`` takes, and what it returns."""
    begin = time.perf_counter()
    value = run()
    return time.perf_counter() - begin, value


def peak_rss_gb() -> float:
    """Return the most memory that this process has had resident so far, in GB (10**9 bytes)."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * 1024 / 1e9


class Report:
    """The figures of one benchmark, and the conditions under which they were taken."""

    def __init__(self, name: str) -> None:
        self._begin = time.perf_counter()
        self._figures: dict[str, Any] = {
            "benchmark": name,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "python": platform.python_version(),
            "load_before": round(os.getloadavg()[0], 2),
        }

    def say(self, text: str) -> None:
        """Write one line of progress to standard error."""
        print(f"[{time.perf_counter() - self._begin:7.1f} s] {text}", file=sys.stderr, flush=True)

    def add(self, name: str, value: Any, unit: str = "") -> None:
        """Add a figure and show it. Numbers are kept with four significant digits."""
        if isinstance(value, float):
            value = float(f"{value:.4g}")
        self._figures[name] = value
        self.say(f"{name} = {value} {unit}".rstrip())

    def finish(self) -> None:
        """Print the JSON line. Nothing may be printed to standard output after it."""
        self._figures["load_after"] = round(os.getloadavg()[0], 2)
        self._figures["took_s"] = round(time.perf_counter() - self._begin, 1)
        print(json.dumps(self._figures), flush=True)
