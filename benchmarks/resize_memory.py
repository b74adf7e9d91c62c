"""The memory of a job's workers while it changes, from the kernel."""

import json
import threading
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.05
PARTS = ("Pss_Anon:", "Pss_File:")
"""Of smaps_rollup (proc(5)); not ``Pss_Shmem``, the store's segments."""


class WorkersMemory:
    """Looks at the memory of all workers that note their process in a folder, during a block.

    Attributes:
        peak: Largest sum over the workers of all rounds, in bytes, without models that scripts have
            built before the brink: the notes ``model`` of workers beside those of an earlier round.
        whole: The same with them.
        rounds: Largest sum over the workers of each round.
    """

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self.peak = self.whole = 0
        self.rounds: dict[int, int] = {}

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
            used, models = self._used()
            total = sum(used.values())
            later = sum(models[number] for number in used if number != min(used))
            self.peak, self.whole = max(self.peak, total - later), max(self.whole, total)
            for number, size in used.items():
                self.rounds[number] = max(size, self.rounds.get(number, 0))

    def _used(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Return the memory of each round's living workers, and of models noted by them."""
        found, models = defaultdict[int, int](int), defaultdict[int, int](int)
        for path in self._marks.glob("round-*.jsonl"):
            with suppress(OSError, ValueError):
                lines = path.read_text().splitlines()
                number = int(path.name.split("-")[1])
                size = private_bytes(json.loads(lines[0])["pid"])
                found[number] += size
                noted = [line for line in lines if '"model"' in line]
                models[number] += sum(json.loads(line)["bytes"] for line in noted)
        return found, models


def private_bytes(pid: int) -> int:
    """Return a process's share of memory other than the store's; raises OSError: it is gone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(PARTS))
