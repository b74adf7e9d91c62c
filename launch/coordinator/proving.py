"""Hosts' reports of a round, and the proof of a start: restored against committed fingerprints."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from scalai.core.errors import LayoutError, ProofError
from scalai.core.messages import events
from scalai.core.messages.reports import Holding, Restored
from scalai.core.tensors.fingerprint import Tally
from scalai.launch.coordinator.held_states import HeldStates
from scalai.launch.coordinator.timeline import Timeline


@dataclass(slots=True)
class Answers:
    """Reports of one round, by host."""

    tensors: dict[str, frozenset[str]] = field(default_factory=dict)
    """Tensor names of each host's workers."""
    holding: dict[str, Holding] = field(default_factory=dict)
    """Pieces of each host's workers, for replicas."""
    restored: dict[str, Restored] = field(default_factory=dict)
    """Each host's report without its rows, summed in ``tally``."""
    tally: Tally | None = None
    """Sum of the restored fingerprints so far."""
    difference: ProofError | None = None
    """Two hosts restored different contents of one piece."""
    snapshots: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds of each host's snapshot at the stop."""
    on_the_way: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds of the slowest host, by name of a snapshot on the way."""
    is_weighed: bool = False
    """The memory for this round's replicas was logged."""

    def slowest(self, what: str) -> float:
        """Longest duration of a part of the restore on any host, in seconds."""
        return max(
            (answers.seconds.get(what, 0.0) for answers in self.restored.values()), default=0.0
        )

    def slowest_snapshot(self, what: str) -> float:
        return max((seconds.get(what, 0.0) for seconds in self.snapshots.values()), default=0.0)

    def add(self, host: str, report: Restored) -> None:
        """Add a host's restore."""
        self.tally = self.tally or Tally()
        none = report.rows.select(np.zeros(0, np.int64))
        self.restored[host] = replace(report, rows=none, fingerprints=report.fingerprints[:0])
        try:
            self.tally.add(report.rows, report.fingerprints)
        except ProofError as error:
            self.difference = self.difference or error

    def totals(self) -> Mapping[str, int]:
        """Fingerprints of all restored tensors, by name.

        Raises:
            ProofError: Replicas of a piece differ.
        """
        if self.difference is not None:
            raise self.difference
        return {} if self.tally is None else self.tally.totals

    def names(self) -> frozenset[str]:
        """Names of all tensors of the job."""
        return frozenset().union(*self.tensors.values())


def prove(number: int, answers: Answers, generations: HeldStates, timeline: Timeline) -> str | None:
    """Compare the restored with the committed state. Returns the difference; None: they are
    equal."""
    for name in ("plan", "move", "restore"):
        timeline.phase(name, answers.slowest(name))
    timeline.note(
        page_fault_s=answers.slowest("page_fault"),
        bytes_local=sum(entry.bytes_local for entry in answers.restored.values()),
        bytes_remote=sum(entry.bytes_remote for entry in answers.restored.values()),
    )
    began = time.monotonic()
    try:
        found = answers.totals()
        generations.prove(number, found)
    except (ProofError, LayoutError) as error:
        return f"the restored state is not the written one: {error}"
    took = answers.slowest("proof") + time.monotonic() - began
    timeline.phase("proof", took, generation=number, proven=len(found))
    timeline.mark("proven")
    return None


def doubted(round: int, number: int, reason: str, generations: HeldStates) -> events.ProofFailed:
    """The law's event for a failed proof."""
    if verdict := generations.failed_proof(number, reason):
        return events.ProofFailed(round, verdict, is_second=True, can_reread=False)
    can_reread = generations.is_whole_as_written(number)
    return events.ProofFailed(round, reason, is_second=False, can_reread=can_reread)
