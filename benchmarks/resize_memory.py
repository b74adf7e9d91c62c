"""The memory of a job's workers while it changes, from the kernel."""

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.05
PARTS = ("Pss_Anon:", "Pss_File:")
"""Of smaps_rollup (proc(5)); not ``Pss_Shmem``, the store's segments."""


class WorkersMemory:
    """Looks at the memory of all workers that note their process in a folder, during a block.

    Attributes:
        peak: Largest sum over the workers of all rounds, in bytes.
        rounds: Largest sum over the workers of each round.
    """

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self.peak = 0
        self.rounds: dict[str, int] = {}

    def __enter__(self) -> "WorkersMemory":
        self._watch.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._watch.join()

    @property
    def ratio(self) -> float:
        return self.peak / max(self.rounds.values())

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            used = self._used()
            self.peak = max(self.peak, sum(used.values()))
            for number, size in used.items():
                self.rounds[number] = max(size, self.rounds.get(number, 0))

    def _used(self) -> Mapping[str, int]:
        """Return the memory of each round's living workers."""
        found: dict[str, int] = {}
        for path in self._marks.glob("round-*.jsonl"):
            with suppress(OSError, ValueError), path.open() as file:
                pid = json.loads(file.readline())["pid"]
                number = path.name.split("-")[1]
                found[number] = found.get(number, 0) + private_bytes(pid)
        return found


def private_bytes(pid: int) -> int:
    """Return a process's share of memory other than the store's; raises OSError: it is gone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(PARTS))
