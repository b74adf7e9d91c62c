"""Checks sealed parts for a whole state: at a stop, on the way, and after a failure."""

from collections.abc import Callable, Iterable, Mapping

from scalai.core.errors import LayoutError, ProofError
from scalai.core.job.recovery import Origin
from scalai.core.job.spacing import SnapshotCost
from scalai.core.job.transitions import step_of
from scalai.core.messages import commands, events
from scalai.launch.coordinator.held_states import HeldStates
from scalai.launch.coordinator.members import Members
from scalai.store.generation import check_whole


class Judge:
    """Unites and numbers parts of snapshots; the answers go to the law.

    Args:
        generations: The parts.
        members: The hosts.
        commit: Numbers a whole snapshot. Raises ``ProofError`` if replicas differ.
        log: Takes log lines.
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
        return events.Judged(True, step, number, parts)

    def rescue(self, snapshot: str) -> events.Judged:
        """Unite parts of workers that outlived a failure at one step."""
        step = step_of(snapshot)
        try:
            number, parts = self._commit(snapshot, self._members.hosts(), Origin.SURVIVORS)
        except (LayoutError, ProofError) as error:
            self._generations.note_failed(step, str(error))
            self._log(f"event=not_rescued step={step} {error}")
            return events.Judged(False, step)
        self._log(f"event=rescued committed={number} step={step}")
        return events.Judged(True, step, number, parts)

    def snapshot(
        self, reason: str, snapshot: str, seconds: Mapping[str, float]
    ) -> events.SnapshotJudged | None:
        """Unite the parts of a snapshot without a stop; None: they are not a whole state.

        Args:
            reason: "start" or "snapshot".
            snapshot: Name of the snapshot.
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
