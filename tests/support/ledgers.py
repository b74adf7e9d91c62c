"""What the ranks of a job wrote of each step, united."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.core.batches import combine_hashes


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a job, done in ``round``.

    ``samples_hash`` is that of the global batch, ``lr`` the rate after the step.
    """

    round: int
    step: int
    consumed_samples: int
    samples_hash: int
    loss: float | None
    lr: float | None


def read_ledger(directory: Path) -> Mapping[int, Entry]:
    """Return what all ranks of a job wrote, by step; of a step done twice, the newest round."""
    lines = [
        json.loads(line)
        for path in sorted(directory.glob("rank-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return unite(lines)


def unite(lines: Iterable[Mapping[str, Any]]) -> Mapping[int, Entry]:
    """Unite the lines of all ranks to one entry a step, ordered by step."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        steps.setdefault(line["step"], []).append(line)
    return {step: _entry(step, steps[step]) for step in sorted(steps)}


def _entry(step: int, lines: list[Mapping[str, Any]]) -> Entry:
    newest = max(line["round"] for line in lines)
    kept = [line for line in lines if line["round"] == newest]

    def first(name: str) -> Any:
        return next((line[name] for line in kept if line[name] is not None), None)

    samples_hash = combine_hashes(*(line["hash"] for line in kept if line["hash"] is not None))
    return Entry(
        newest, step, kept[0]["consumed_samples"], samples_hash, first("loss"), first("lr")
    )
