"""Whether what hosts have sealed is a state: at a stop, on the way, and after a failure."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from scalai.core.errors import LayoutError, ProofError
from scalai.core.job.recovery import Origin
from scalai.core.job.spacing import Measured
from scalai.core.job.transitions import step_of
from scalai.core.messages import commands, events
from scalai.store.generation import check_whole

if TYPE_CHECKING:
    from scalai.launch.coordinator.live_job import LiveJob


def judge_stop(live: "LiveJob", hosts: Iterable[str]) -> None:
    """Unite what these hosts wrote at the stop, and tell the law."""
    step = live.state.stop
    try:
        number, parts = _commit(live, _name(live, step), hosts, Origin.STOP)
    except (LayoutError, ProofError) as error:
        # The newest committed generation is as good as before.
        is_refused = isinstance(error, ProofError)
        what = "refused" if is_refused else "incomplete"
        live.log(f"event=snapshot_{what} step={step} {error}")
        reason = f"what was written is refused: {error}" if is_refused else events.NOT_COVERED
        live.feed(events.Judged(False, reason=reason))
        return
    live.feed(events.Judged(True, step, number, parts))


def judge_rescue(live: "LiveJob", step: int) -> None:
    """Unite what workers wrote that outlived a failure and stood at this step, and tell the law."""
    try:
        name, hosts = _name(live, step), live.members.hosts()
        number, parts = _commit(live, name, hosts, Origin.SURVIVORS)
    except (LayoutError, ProofError) as error:
        live.generations.note_failed(step, str(error))
        live.log(f"event=not_rescued step={step} {error}")
        live.feed(events.RescueJudged(step, None))
        return
    live.log(f"event=rescued committed={number} step={step}")
    live.feed(events.RescueJudged(step, number, parts))


def judge_snapshot(live: "LiveJob", reason: str, snapshot: str) -> None:
    """Unite the parts of a snapshot that was made on the way, and tell the law if it is a state."""
    held = live.generations.sealed_parts(snapshot, live.members.hosts())
    step, seconds = step_of(snapshot), live.answers.on_the_way.pop(snapshot, {})
    try:
        number, parts = _commit(live, snapshot, held, Origin.SNAPSHOT)
    except (LayoutError, ProofError) as error:
        live.log(f"event={reason} step={step} refused: {error}")
        if reason == "snapshot":
            live.generations.forget_sealed(snapshot)
            live.command(sorted(held), commands.DropSnapshot(snapshot))
        return
    live.log(f"event={reason} committed={number} step={step}{_cost(seconds)}")
    if reason == "start":
        live.note_start(step)
    measured = _measured(seconds) if reason == "snapshot" else None
    live.feed(events.SnapshotJudged(tuple(sorted(parts)), step, number, measured))


def _measured(seconds: Mapping[str, float]) -> Measured:
    """Return what a snapshot on the way has cost. What the steps beside it took longer is known of
    the one before it; of the first one it is known how long the training stood still."""
    write_s = seconds.get("snapshot", 0.0) + seconds.get("snapshot_proof", 0.0)
    return Measured(seconds.get("cost", seconds.get("stall")), seconds.get("step"), write_s)


def _cost(seconds: Mapping[str, float]) -> str:
    """Say what a snapshot on the way has cost the worker that it cost most."""
    return "".join(
        f" {what}_s={seconds[key]:.3f}"
        for what, key in (("stall", "stall"), ("copy", "snapshot"), ("proof", "snapshot_proof"))
        if key in seconds
    )


def _name(live: "LiveJob", step: int) -> str:
    """Return the name of the snapshot of a step of the present round."""
    return f"{live.run}-{live.state.round}-{step}"


def _commit(
    live: "LiveJob", name: str, hosts: Iterable[str], origin: Origin
) -> tuple[int, frozenset[str]]:
    """Number the parts of a snapshot that these hosts have, if they are a whole state. Return the
    number and the hosts.

    Raises:
        LayoutError: They are none.
        ProofError: Replicas differ.
    """
    parts = live.generations.sealed_parts(name, hosts)
    if not parts:
        raise LayoutError("no host has a snapshot.")
    check_whole(parts.values())
    return live.commit(name, origin), frozenset(parts)
