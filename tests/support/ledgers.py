"""What the ranks of a job wrote of each step, united."""

from collections.abc import Mapping
from pathlib import Path

from scalai.core.dataset.step_lines import StepEntry, read_lines, united


def read_ledger(directory: Path) -> Mapping[int, StepEntry]:
    """Return what all ranks of a job wrote, by step; of a step done twice, the newest round."""
    files = sorted(directory.glob("rank-*.jsonl"))
    return united(read_lines(path.read_text(), path.name)[0] for path in files)
