"""Commits of a host: a sealed snapshot gets its number; without room in the store the host tries
again."""

from collections.abc import Mapping

from scalai.core.host import actions, snapshots
from scalai.core.host.actions import Level
from scalai.core.host.step import Step
from scalai.core.messages import commands, reports


def commit(step: Step, command: commands.Commit) -> None:
    """Make a sealed snapshot this generation, and report it."""
    snapshots.settled(step, command.snapshot)
    step.do(command)


def no_room(step: Step, command: commands.Commit, reason: str) -> None:
    """Keep a commit without room: it is tried again, and logged once."""
    late = step.state.late
    if command.generation not in late:
        text = f"event=late_commit generation={command.generation}: {reason}"
        step.log(Level.ERROR, text)
    step.change(late={**late, command.generation: command})
    snapshots.reserve(step)


def _others(step: Step, generation: int) -> Mapping[int, commands.Commit]:
    return {number: each for number, each in step.state.late.items() if number != generation}


def done(step: Step, report: reports.Committed) -> None:
    """Record and report a commit."""
    held = step.state.generations | {report.generation}
    step.change(late=_others(step, report.generation), generations=held)
    step.tell(report)
    snapshots.reserve(step)


def nothing(step: Step, command: commands.Commit, found: str) -> None:
    """Handle a missing snapshot. If later ones replaced it, the host reports no part of it."""
    generation, snapshot = command.generation, command.snapshot
    if generation in step.state.late:
        return
    if snapshots.was_given_up(step, snapshot):
        step.tell(reports.Doubted(generation, None))
        step.tell(reports.Committed(generation))
        return
    step.fail(
        f"generation {generation} cannot be committed here: snapshot {snapshot!r} is not {found}"
    )


def drop(step: Step, command: commands.Drop) -> None:
    """Drop a generation, with its sealed snapshot that waits for room: the job has left it behind,
    and would not count its bytes."""
    late = step.state.late.get(command.generation)
    step.change(late=_others(step, command.generation))
    step.do(command)
    if late is not None:
        step.do(commands.DropSnapshot(late.snapshot))


def retry(step: Step) -> None:
    """Retry commits without room."""
    step.do(*step.state.late.values())


def forget(step: Step) -> None:
    """Forget commits without room: the job goes on without this host, or under another coordinator.
    The next join reports their snapshots as sealed, and the coordinator decides."""
    step.change(late={})


def discard(step: Step) -> None:
    """Drop the sealed snapshots without a number: the job goes on without them."""
    late = step.state.late.values()
    step.do(actions.DiscardSealed(frozenset(command.snapshot for command in late)))


def holds(step: Step, generations: frozenset[int]) -> None:
    """Update the store's generations: there may be room."""
    step.change(generations=generations)
    snapshots.reserve(step)
