"""Checks sealed parts for a whole state: at a stop, on the way, and after a failure."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from scalai.core.errors import LayoutError, ProofError
from scalai.core.job.recovery import Origin
from scalai.core.job.spacing import SnapshotCost
from scalai.core.job.transitions import step_of
from scalai.core.messages import commands, events
from scalai.core.messages.reports import Holding, Restored
from scalai.core.tensors.fingerprint import Tally
from scalai.launch.coordinator.held_states import HeldStates
from scalai.launch.coordinator.members import Members
from scalai.launch.coordinator.timeline import Timeline
from scalai.store.generation import check_whole


class Judge:
    """Unites and numbers parts of snapshots; the answers go to the law.

    Args:
        commit: Numbers a whole snapshot. Raises ``ProofError`` if replicas differ.
    """

    def __init__(
        self,
        generations: HeldStates,
        members: Members,
        commit: Callable[[str, Origin], int],
        log: Callable[[str], None],
    ) -> None:
        self._generations, self._members = generations, members
        self._number, self._log = commit, log

    def stop(self, snapshot: str, hosts: Iterable[str]) -> events.Judged:
        """Unite these hosts' parts of a stop."""
        step = step_of(snapshot)
        try:
            number, parts = self._commit(snapshot, hosts, Origin.STOP)
        except (LayoutError, ProofError) as error:
            # The newest committed generation is still good.
            is_refused = isinstance(error, ProofError)
            what = "refused" if is_refused else "incomplete"
            self._log(f"event=snapshot_{what} step={step} {error}")
            reason = f"what was written is refused: {error}" if is_refused else events.NOT_COVERED
            return events.Judged(False, reason=reason)
        self._log(f"event=snapshot committed={number} step={step} at=stop")
        return events.Judged(True, step, number, parts)

    def rescue(self, snapshot: str) -> events.Judged:
        """Unite parts of workers that outlived a failure at one step."""
        step = step_of(snapshot)
        try:
            number, parts = self._commit(snapshot, self._members.hosts(), Origin.SURVIVORS)
        except (LayoutError, ProofError) as error:
            self._generations.note_failed(step, str(error))
            self._log(f"event=not_rescued step={step} {error}")
            return events.Judged(False, step, reason=str(error))
        self._log(f"event=rescued committed={number} step={step}")
        return events.Judged(True, step, number, parts)

    def snapshot(
        self, reason: str, snapshot: str, seconds: Mapping[str, float]
    ) -> events.SnapshotJudged | None:
        """Unite the parts of a snapshot without a stop; None: they are not a whole state.

        Args:
            reason: "start" or "snapshot".
            seconds: Its cost on the slowest host, by part.
        """
        held = self._generations.sealed_parts(snapshot, self._members.hosts())
        step = step_of(snapshot)
        try:
            number, parts = self._commit(snapshot, held, Origin.SNAPSHOT)
        except (LayoutError, ProofError) as error:
            self._log(f"event={reason} step={step} refused: {error}")
            if reason == "snapshot":
                self._generations.forget_sealed(snapshot)
                self._members.command(sorted(held), commands.DropSnapshot(snapshot))
            return None
        self._log(f"event={reason} committed={number} step={step}{_cost(seconds)}")
        measured = _measured(seconds) if reason == "snapshot" else None
        return events.SnapshotJudged(tuple(sorted(parts)), step, number, measured)

    def _commit(
        self, name: str, hosts: Iterable[str], origin: Origin
    ) -> tuple[int, frozenset[str]]:
        """Number these hosts' parts of a snapshot. Returns the number and the hosts.

        Raises:
            LayoutError: They are not a whole state.
            ProofError: Replicas differ.
        """
        parts = self._generations.sealed_parts(name, hosts)
        if not parts:
            raise LayoutError("no host has a snapshot.")
        check_whole(parts.values())
        return self._number(name, origin), frozenset(parts)


def _measured(seconds: Mapping[str, float]) -> SnapshotCost:
    """Cost of a snapshot on the way. A slowdown of steps is known from the snapshot before; for the
    first one, the time of standstill counts."""
    write_s = seconds.get("snapshot", 0.0) + seconds.get("snapshot_proof", 0.0)
    return SnapshotCost(seconds.get("cost", seconds.get("stall")), seconds.get("step"), write_s)


def _cost(seconds: Mapping[str, float]) -> str:
    """Log text of the cost for the slowest worker."""
    return "".join(
        f" {what}_s={seconds[key]:.3f}"
        for what, key in (("stall", "stall"), ("copy", "snapshot"), ("proof", "snapshot_proof"))
        if key in seconds
    )


# ---------------------------------------------------------------------- proof of a start


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
