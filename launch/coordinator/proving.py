"""What hosts report of a round until all have, and the proof of a start: what they have restored
against what was committed."""

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
    """The answers of one round, by host."""

    tensors: dict[str, frozenset[str]] = field(default_factory=dict)
    """Names of the tensors that each host's workers hold."""
    holding: dict[str, Holding] = field(default_factory=dict)
    """What each host's workers hold, where replicas are kept."""
    restored: dict[str, Restored] = field(default_factory=dict)
    """What each host has reported, without its rows: those are in ``tally``."""
    tally: Tally | None = None
    """The fingerprints of what was restored so far, added up."""
    difference: ProofError | None = None
    """Two hosts have restored one piece otherwise."""
    snapshots: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds of each host's snapshot at the stop."""
    on_the_way: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """By its name the seconds of a snapshot on the way on the host that needed most."""
    is_weighed: bool = False
    """Whether it was said what replicas take of this round."""

    def slowest(self, what: str) -> float:
        """Return the longest time that a host took for a part of the restore, in seconds."""
        return max(
            (answers.seconds.get(what, 0.0) for answers in self.restored.values()), default=0.0
        )

    def slowest_snapshot(self, what: str) -> float:
        return max((seconds.get(what, 0.0) for seconds in self.snapshots.values()), default=0.0)

    def add(self, host: str, report: Restored) -> None:
        """A host has restored."""
        self.tally = self.tally or Tally()
        none = report.rows.select(np.zeros(0, np.int64))
        self.restored[host] = replace(report, rows=none, fingerprints=report.fingerprints[:0])
        try:
            self.tally.add(report.rows, report.fingerprints)
        except ProofError as error:
            self.difference = self.difference or error

    def totals(self) -> Mapping[str, int]:
        """Return the fingerprints of all tensors that were restored, by name.

        Raises:
            ProofError: Replicas of a piece differ.
        """
        if self.difference is not None:
            raise self.difference
        return {} if self.tally is None else self.tally.totals

    def names(self) -> frozenset[str]:
        """Return the names of all tensors of the job."""
        return frozenset().union(*self.tensors.values())


def prove(number: int, answers: Answers, generations: HeldStates, timeline: Timeline) -> str | None:
    """Return why what the hosts ``told`` of a generation is not what was written; None: it is."""
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
    """Return what the law must know of a proof that has failed."""
    if verdict := generations.failed_proof(number, reason):
        return events.ProofFailed(round, verdict, is_second=True, can_reread=False)
    can_reread = generations.is_whole_as_written(number)
    return events.ProofFailed(round, reason, is_second=False, can_reread=can_reread)
